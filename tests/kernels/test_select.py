"""select and select_paged: what topk of all logits at once selects, whatever the chunks and segments.

Keys carry any fp32 number as their score: one dim of q and k is 1, the other heads' gates are 0, so a row's score of a
key is the row's gate times the key's scale.
"""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcheck.kernels import (
    PAGE_FORMATS,
    QuantisedQuery,
    allocate_pages,
    paged_logits,
    ragged_logits,
    select,
    select_paged,
    topk,
    topk_naive,
    write_entries,
)
from diffcheck.kernels.topk import Lists

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODULE = sys.modules["diffcheck.kernels.select"]  # the package's attribute of that name is the function


def keys_scoring(scores, gates, heads=16):
    """Query, keys and key scales with scores[row, e] = gates[row] * scores[e]."""
    q = torch.zeros(len(gates), heads, 128)
    q[:, 0, 0] = 1.0
    gate = torch.zeros(len(gates), heads)
    gate[:, 0] = torch.tensor(gates)
    keys = torch.zeros(len(scores), 128)
    keys[:, 0] = 1.0
    query = QuantisedQuery(codes=q.to(torch.float8_e4m3fn).to(DEVICE), scales=None, gate=gate.to(DEVICE))
    return query, keys.to(torch.float8_e4m3fn).to(DEVICE), scores.to(DEVICE)


def random_problem(fmt, rows, count):
    """Random codes whose scores have many values."""
    if fmt == "e2m1":
        codes = (
            torch.randint(256, (rows, 16, 64), dtype=torch.uint8),
            torch.randint(256, (count, 64), dtype=torch.uint8),
        )
        scales = (torch.randint(124, 129, (*size, 4), dtype=torch.uint8) for size in ((rows, 16), (count,)))
    else:
        kind = torch.float8_e4m3fn if fmt == "e4m3" else torch.bfloat16
        codes = torch.randn(rows, 16, 128).to(kind), torch.randn(count, 128).to(kind)
        scales = None, (torch.rand(count) if fmt == "e4m3" else None)
    (q, k), (q_scales, k_scales) = codes, scales
    q, k, q_scales, k_scales = (None if t is None else t.to(DEVICE) for t in (q, k, q_scales, k_scales))
    return QuantisedQuery(codes=q, scales=q_scales, gate=torch.randn(rows, 16).to(DEVICE)), k, k_scales


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(problem, start, end, k, *, rows=3, segment=64, fmt="e4m3", exact=True):
    """Equal to topk and to the sort of all scores."""
    query, keys, scales = problem
    start, end = ints(start), ints(end)
    got = select(query, keys, scales, start, end, k, fmt=fmt, exact=exact, _rows=rows, _segment=segment)
    logits = ragged_logits(query, keys, scales, start, end, fmt=fmt, exact=exact)
    assert got.dtype == torch.int32
    assert torch.equal(got, topk_naive(logits, end - start, k, start))
    assert torch.equal(got, topk(logits, end - start, k, start))
    return got


@pytest.fixture
def small_lists(monkeypatch):
    """Lists with room for a tile of 16 beyond k, full of poison: they fill and shrink many times a segment."""
    empty = Lists.empty

    def small(programs, k, device, tile=16):
        lists = empty(programs, k, device, 16)
        for tensor in (lists.keys, lists.columns, lists.counts, lists.limits):
            tensor.fill_(2**31 - 1)
        return lists

    monkeypatch.setattr(MODULE.Lists, "empty", staticmethod(small))


# --------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("k", [1, 8, 65])
def test_lengths(k):
    lengths = [0, 1, 63, 64, 65, k - 1, k, k + 1, 127, 128, 129, 200]
    problem = random_problem("e4m3", len(lengths), 200)
    got = check(problem, [0] * len(lengths), lengths, k, rows=4)
    assert [(row >= 0).sum().item() for row in got] == [min(k, length) for length in lengths]


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_two_requests_and_gaps(fmt):
    """Ranges of two requests, the second one's far from column 0, empty and reversed ones, and ends beyond the keys."""
    start = [0, 0, 130, 130, 200, 201, 90, 260, -5, 250]
    end = [1, 129, 131, 260, 259, 201, 80, 260, 3, 1000]
    problem = random_problem(fmt, len(start), 260)
    for rows, segment in ((4, 64), (10, 128)):
        check(problem, start, end, 9, rows=rows, segment=segment, fmt=fmt)


def test_neither_chunk_nor_segment_shows(small_lists):
    problem = random_problem("e4m3", 5, 260)
    start, end = [0, 100, 0, 150, 64], [260, 101, 0, 260, 128]
    results = [check(problem, start, end, 17, rows=r, segment=s) for r, s in ((2, 64), (3, 192))]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("order", ["ascending", "descending", "equal", "two values", "all NaN", "last wins"])
def test_adversarial_orders(order, small_lists):
    count = 200
    scores = {
        "ascending": torch.arange(count).float(),
        "descending": -torch.arange(count).float(),
        "equal": torch.full((count,), 0.5),
        "two values": (torch.arange(count) % 2).float(),
        "all NaN": torch.full((count,), NAN),
        "last wins": (torch.arange(count) >= count - 5).float(),
    }[order]
    check(keys_scoring(scores, [1.0, -1.0, 2.0, 1.0]), [0, 0, 3, 70], [200, 199, 180, 76], 7, rows=2)


def test_equal_scores_in_a_later_segment_lose(small_lists):
    scores = torch.zeros(256)
    scores[[10, 100, 150, 220]] = torch.tensor([2.0, 1.0, 1.0, 2.0])
    for k, want in ((2, [10, 220]), (3, [10, 100, 220]), (5, [0, 10, 100, 150, 220])):
        assert check(keys_scoring(scores, [1.0]), [0], [256], k).tolist() == [want]


def test_special_values_in_several_segments(small_lists):
    scores = torch.full((200,), NAN)
    scores[[3, 70, 71, 140, 141, 199]] = torch.tensor([-INF, -0.0, 0.0, INF, -1.0, 1e-45])
    problem = keys_scoring(scores, [1.0, 1.0])
    ranked = [140, 199, 70, 71, 141, 3, 0, 1, 2, 4]
    for k in (1, 3, 4, 6, 8):
        assert check(problem, [0, 0], [200, 200], k)[0].tolist() == sorted(ranked[:k])


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, NAN, INF, -INF, 1.5]) | st.floats(width=32)


@settings(max_examples=25)
@given(st.data())
def test_any_scores_and_ranges(data):
    count = data.draw(st.sampled_from([1, 63, 64, 65, 130, 200]))
    few = data.draw(st.lists(NUMBERS, min_size=1, max_size=12))
    picks = torch.randint(len(few), (count,), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    k = data.draw(st.sampled_from([1, 2, 16, 64, 70]))
    lengths = sorted({0, 1, 63, 64, 65, max(k - 1, 0), k, k + 1, count})
    second = data.draw(st.integers(0, count))  # where the second request's keys begin
    rows = data.draw(st.lists(st.tuples(st.booleans(), st.sampled_from(lengths)), min_size=1, max_size=4))
    start = [second if later else 0 for later, _ in rows]
    end = [min(first + length, count if later else second) for first, (later, length) in zip(start, rows, strict=True)]
    gates = [1.0, -1.0, 1.0, 0.5][: len(rows)]
    check(keys_scoring(torch.tensor(few)[picks], gates), start, end, k, rows=data.draw(st.sampled_from([1, 2, 4])))


@pytest.mark.parametrize("poison", [NAN, INF])
def test_nothing_outside_a_range_is_selected(poison, monkeypatch, small_lists):
    """The workspace may hold anything where a row sees nothing."""

    def poisoned(query, keys, scales, start, end, **options):
        scores = ragged_logits(query, keys, scales, start, end, **options)
        column = torch.arange(len(keys), device=DEVICE)
        return scores.masked_fill((column < start[:, None]) | (column >= end[:, None]), poison)

    problem = random_problem("e4m3", 5, 200)
    start, end = [0, 0, 90, 100, 199], [0, 3, 110, 200, 200]
    want = check(problem, start, end, 12, rows=2)
    monkeypatch.setattr(MODULE, "ragged_logits", poisoned)
    assert torch.equal(check(problem, start, end, 12, rows=2), want)


def test_only_segments_that_some_row_sees_are_scored(monkeypatch):
    seen = []

    def counted(query, keys, scales, start, end, **options):
        seen.append((len(query.codes), len(keys)))
        return ragged_logits(query, keys, scales, start, end, **options)

    problem = random_problem("e4m3", 6, 1000)
    monkeypatch.setattr(MODULE, "ragged_logits", counted)
    check(problem, [0, 0, 5, 700, 700, 0], [10, 70, 5, 701, 900, 0], 4, rows=2)
    assert seen[0] == (6, 0)  # the check of the arguments
    # rows 0 and 1 see 0..69, rows 2 and 3 only 700, rows 4 and 5 700..899; segments begin at a multiple of 64
    assert seen[1:] == [(2, 64)] * (2 + 1 + 5)


def test_not_exact_is_the_topk_of_the_fast_kernel(small_lists):
    check(random_problem("e4m3", 5, 200), [0, 0, 30, 90, 0], [200, 130, 200, 91, 64], 20, exact=False)


def test_nothing_to_select_from():
    query, keys, scales = random_problem("e4m3", 2, 130)
    none = ints([0, 0])
    assert select(query, keys[:0], scales[:0], none, none, 3, fmt="e4m3").tolist() == [[-1] * 3] * 2
    assert select(query, keys, scales, none, none, 3, fmt="e4m3", _segment=64).tolist() == [[-1] * 3] * 2
    empty = QuantisedQuery(codes=query.codes[:0], scales=None, gate=query.gate[:0])
    assert select(empty, keys, scales, none[:0], none[:0], 3, fmt="e4m3", _segment=64).shape == (0, 3)


def test_errors_name_what_was_found():
    query, keys, scales = random_problem("e4m3", 2, 10)
    row = ints([0, 0])
    with pytest.raises(ValueError, match="k is 0, expected at least 1"):
        select(query, keys, scales, row, row, 0, fmt="e4m3")
    with pytest.raises(ValueError, match=r"start is torch.int32 \[1\], expected torch.int32 \[2\]"):
        select(query, keys, scales, row[:1], row, 2, fmt="e4m3")
    with pytest.raises(ValueError, match="key_scales has 9 rows for 10 keys"):
        select(query, keys, scales[:9], row, row, 2, fmt="e4m3")
    with pytest.raises(ValueError, match="e4m3 keys come without scales"):
        select(query, keys, None, row, row, 2, fmt="e4m3")
    pages, table = allocate_pages("e4m3", 2, DEVICE), ints([[0], [1]])
    with pytest.raises(ValueError, match="k is 0, expected at least 1"):
        select_paged(query, pages, table, row, 0, fmt="e4m3", max_length=64)
    with pytest.raises(ValueError, match=r"max_length is 65, expected 0\.\.64"):
        select_paged(query, pages, table, row, 2, fmt="e4m3", max_length=65)
    with pytest.raises(ValueError, match=r"lengths is torch\.int64"):
        select_paged(query, pages, table, row.long(), 2, fmt="e4m3", max_length=64)


# ---------------------------------------------------------------------------------------------------------- decode


def paged(fmt, requests, count):
    """Pages enough for `count` keys, and a block table in which each request has them all in its own order."""
    width = -(-count // 64)
    _, keys, scales = random_problem(fmt, 1, width * 64)
    pages = allocate_pages(fmt, width, DEVICE)
    write_entries(pages, fmt, torch.arange(width * 64, device=DEVICE), keys, scales)
    table = torch.stack([torch.randperm(width) for _ in range(requests)])
    return pages, table.to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
@pytest.mark.parametrize("next_n", [1, 2])
def test_paged(fmt, next_n):
    requests, count, k = 3, 130, 20
    pages, table = paged(fmt, requests, count)
    query, _, _ = random_problem(fmt, requests * next_n, 1)
    lengths = ints([130, 21, 0, 64, 20, 1][: requests * next_n])
    options = {"fmt": fmt, "max_length": count, "next_n": next_n}
    logits = paged_logits(query, pages, table, lengths, **options)
    want = topk_naive(logits, lengths, k)
    assert torch.equal(topk(logits, lengths, k), want)
    for scores in (1, 2 * count * next_n, 1 << 20):
        assert torch.equal(select_paged(query, pages, table, lengths, k, _scores=scores, **options), want)


def test_paged_without_columns():
    pages, table = paged("e4m3", 2, 64)
    query, _, _ = random_problem("e4m3", 2, 1)
    got = select_paged(query, pages, table, ints([64, 3]), 2, fmt="e4m3", max_length=0)
    assert got.tolist() == [[-1, -1]] * 2


# ------------------------------------------------------------------------------------------------------------- GPU


def flash(rows, count, exact=False):
    """Causal prefill at H = 64."""
    q = torch.randn(rows, 64, 128, device=DEVICE).to(torch.float8_e4m3fn)
    query = QuantisedQuery(codes=q, scales=None, gate=torch.randn(rows, 64, device=DEVICE))
    keys = torch.randn(count, 128, device=DEVICE).to(torch.float8_e4m3fn)
    end = ((torch.arange(rows, device=DEVICE) + 1) * count // rows).to(torch.int32)
    return query, keys, torch.rand(count, device=DEVICE) + 0.5, torch.zeros_like(end), end


def by_rows(query, keys, scales, start, end, k, exact, height=1024):
    """topk of all logits, some rows at a time."""
    out = []
    for part in (slice(first, first + height) for first in range(0, len(end), height)):
        some = QuantisedQuery(codes=query.codes[part], scales=None, gate=query.gate[part])
        logits = ragged_logits(some, keys, scales, start[part], end[part], fmt="e4m3", exact=exact)
        out.append(topk(logits, (end - start)[part], k, start[part]))
    return torch.cat(out)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_memory_of_a_long_prefill(k):
    """8192 x 131072, causal: the scores would be 4.3 GB."""
    problem = flash(8192, 131072)
    select(*problem, k, fmt="e4m3", exact=False)  # what compiles, compiles now
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = select(*problem, k, fmt="e4m3", exact=False)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    print(f"k {k}: peak {peak / 2**20:.1f} MiB, {(peak - 4 * got.numel()) / 2**20:.1f} without the result")
    assert peak - 4 * got.numel() <= 64 << 20
    assert k > 512 or peak <= 64 << 20
    assert torch.equal(got, by_rows(*problem, k, False))


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
def test_flash_prefill_reruns(exact):
    """Two requests and 20 bit-equal runs; every row against the sort as well."""
    query, keys, scales, _, _ = flash(2100, 40000)
    row = torch.arange(2100, device=DEVICE)
    start = torch.where(row < 1000, 0, 17001).to(torch.int32)
    end = torch.where(row < 1000, row * 17, 17001 + (row - 999) * 20).to(torch.int32)
    got = select(query, keys, scales, start, end, 512, fmt="e4m3", exact=exact)
    assert torch.equal(got, by_rows(query, keys, scales, start, end, 512, exact))
    for _ in range(20):
        assert torch.equal(select(query, keys, scales, start, end, 512, fmt="e4m3", exact=exact), got)
    for rows, segment in ((512, 4096), (2048, 16384)):
        other = select(query, keys, scales, start, end, 512, fmt="e4m3", exact=exact, _rows=rows, _segment=segment)
        assert torch.equal(other, got)
    logits = ragged_logits(query, keys, scales, start, end, fmt="e4m3", exact=exact)
    assert torch.equal(got, topk_naive(logits, end - start, 512, start))


def adversarial(order, count):
    """Scores fp32 [count] of a kind that selections stumble over."""
    x = torch.randn(count)
    return {
        "random": x,
        "ascending": x.sort().values,
        "descending": x.sort(descending=True).values,
        "equal": torch.full((count,), 0.5),
        "clustered": 100 + 0.5 * x,
        "bf16 ties": x.bfloat16().float(),
        "all NaN": torch.full((count,), NAN),
        "NaN and inf": torch.where(x > 0, NAN, torch.where(x < -1, -INF, INF)),
    }[order]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "order", ["ascending", "descending", "equal", "clustered", "bf16 ties", "all NaN", "NaN and inf"]
)
@pytest.mark.parametrize("k", [512, 2048])
def test_flash_adversarial(order, k):
    count = 50000
    scores = adversarial(order, count)
    gates = ([1.0, -1.0, 0.5] * 20)[:50]
    start = [0, 3, 8192, 20000, 0] * 10
    end = [50000, 8195, 8192 + k, 49999, 30000] * 10
    check(keys_scoring(scores, gates), start, end, k, rows=1024, segment=8192)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "order", ["random", "ascending", "descending", "equal", "clustered", "bf16 ties", "all NaN", "NaN and inf"]
)
@pytest.mark.parametrize("k", [1, 512, 1000, 1536])
def test_flash_adversarial_in_one_launch(order, k, exact):
    """Enough rows for the launch that does all, their number no multiple of anything, ranges of every kind."""
    count, rows = 20011, 1061
    scores = adversarial(order, count)
    query, keys, scales = keys_scoring(scores, ([1.0, -1.0, 0.5] * rows)[:rows], heads=64)
    row = torch.arange(rows)
    start = torch.stack((0 * row, row * 7, 0 * row - 5, row * 11, 0 * row + 20000), 1).flatten()[:rows]
    length = torch.stack((row * 40, row % 700, 0 * row, row * 0 + k + 1, row * 0 + 64), 1).flatten()[:rows]
    start, end = ints(start.tolist()), ints((start + length).clamp(max=count + 100).tolist())
    problem = query, keys, scales, start, end, k
    got = select(*problem, fmt="e4m3", exact=exact)
    assert torch.equal(got, select(*problem, fmt="e4m3", exact=exact, _rows=512, _segment=4096))
    logits = ragged_logits(query, keys, scales, start, end, fmt="e4m3", exact=exact)
    some = torch.arange(0, rows, 9, device=DEVICE)
    begin = start.clamp(min=0)
    assert torch.equal(got[some], topk_naive(logits[some], (end - begin)[some], k, begin[some]))
    assert all(torch.equal(select(*problem, fmt="e4m3", exact=exact), got) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "count"), [(64, 32768), (1, 131072), (256, 8192), (160, 65536)])
def test_flash_decode(requests, count):
    """The last shape has more scores than the workspace."""
    pages, table = paged("e4m3", requests, count)
    query = QuantisedQuery(
        codes=torch.randn(requests, 64, 128, device=DEVICE).to(torch.float8_e4m3fn),
        scales=None,
        gate=torch.randn(requests, 64, device=DEVICE),
    )
    lengths = (count - 37 * torch.arange(requests, device=DEVICE)).clamp(min=0).to(torch.int32)
    logits = paged_logits(query, pages, table, lengths, fmt="e4m3", max_length=count)
    want = topk_naive(logits, lengths, 512)
    del logits
    for _ in range(20):
        assert torch.equal(select_paged(query, pages, table, lengths, 512, fmt="e4m3", max_length=count), want)
