"""paged_logits and ragged_logits against fp64 products of dequantised values, and what they must not read."""

import pytest
import torch

from diffcheck.kernels import (
    PAGE_FORMATS,
    QuantisedQuery,
    allocate_pages,
    dequantise,
    paged_logits,
    paged_logits_naive,
    ragged_logits,
    ragged_logits_naive,
    read_entries,
    write_entries,
)
from diffcheck.kernels.logits import QUERY_FORMATS_OF

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# ------------------------------------------------------------------------------------------------ tolerances
CALC_DIFF = 5e-6  # 1 - 2xy / (xx + yy) over all visible scores (DeepGEMM's measure and gate)
ELEMENT = 2e-4  # farthest score from fp64, relative to the row's largest sum of |gate| * relu

PAIRS = [(q_fmt, fmt) for fmt, q_formats in QUERY_FORMATS_OF.items() for q_fmt in q_formats]


def random_codes(fmt, *shape):
    """Codes and scales as a quantiser would leave them; of e2m1 rows, one in 100 has a block far below the others."""
    if fmt == "e4m3":
        return (torch.randn(*shape, 128) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), torch.rand(*shape) / 100
    if fmt == "bf16":
        return torch.randn(*shape, 128).bfloat16(), None
    scales = torch.randint(118, 125, (*shape, 1)) + torch.randint(4, (*shape, 4))
    scales[..., 1] -= 12 * (torch.rand(shape) < 0.01)
    return torch.randint(256, (*shape, 64), dtype=torch.uint8), scales.to(torch.uint8)


def random_query(fmt, rows, heads, device):
    codes, scales = random_codes(fmt, rows, heads)
    gate = torch.randn(rows, heads) / 10
    return QuantisedQuery(codes.to(device), None if scales is None else scales.to(device), gate.to(device))


def exact_scores(query, row, codes, scales, fmt):
    """fp64 scores of one row and the largest sum of terms, which bounds what rounding can do."""
    q_scales = query.scales[row] if query.fmt == "e2m1" else None
    q = dequantise(query.codes[row], q_scales, query.fmt).double()
    terms = (q @ dequantise(codes, scales, fmt).double().T).relu() * query.gate[row, :, None].double()
    return terms.sum(0), terms.abs().sum(0).max() if len(codes) else 0.0


def assert_scores(label, got, wants):
    """`wants`: per row (start, fp64 scores, magnitude); all else must be -inf. Prints when it passes too."""
    xy = xx = yy = worst = 0.0
    for row, (start, want, magnitude) in enumerate(wants):
        seen = got[row, start : start + len(want)].double()
        outside = torch.cat((got[row, :start], got[row, start + len(want) :]))
        assert (outside == -torch.inf).all(), f"{label}: row {row} scores what it may not see"
        if len(want):
            xy, xx, yy = xy + (seen @ want).item(), xx + (seen @ seen).item(), yy + (want @ want).item()
            worst = max(worst, ((seen - want).abs().max() / magnitude).item())
    diff = 1 - 2 * xy / (xx + yy) if xx + yy else 0.0
    print(f"{label}: calc_diff {diff:.2e}, farthest {worst:.2e}")
    assert abs(diff) < CALC_DIFF, label
    assert worst < ELEMENT, label


class Pool:
    """Pages in shuffled order holding random keys of several requests; what is not stored is poison."""

    def __init__(self, fmt, key_counts, device, first_page=0, pages=None):
        self.fmt, self.device = fmt, device
        needed = [-(-count // 64) for count in key_counts]
        width = max(*needed, 1) + 1
        total = sum(needed) + 3
        self.pages = pages if pages is not None else allocate_pages(fmt, total, device)
        if pages is None:
            self.pages.fill_(0xFF)  # NaN in every format: values, fp32 scales and ue8m0 bytes
        order = (first_page + torch.randperm(total)).tolist()
        table = torch.randint(-(2**31), 2**31, (len(key_counts), width))  # nothing may be followed past the length
        for request, count in enumerate(needed):
            for column in range(count):
                table[request, column] = order.pop()
        self.block_table = table.to(torch.int32).to(device)
        for request, count in enumerate(key_counts):
            codes, scales = random_codes(fmt, count)
            if count > 2:
                codes.view(torch.uint8)[2] = 0
            scales = None if scales is None else scales.to(device)
            write_entries(self.pages, fmt, self.slots(request, count), codes.to(device), scales)

    def slots(self, request, count):
        entry = torch.arange(count, device=self.device)
        return self.block_table[request, entry // 64].long() * 64 + entry % 64

    def wants(self, query, lengths, next_n):
        out = []
        for row, length in enumerate(lengths):
            keys = read_entries(self.pages, self.fmt, self.slots(row // next_n, length))
            out.append((0, *exact_scores(query, row, *keys, self.fmt)))
        return out


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
@pytest.mark.parametrize("heads", [16, 48, 64])
def test_paged_lengths_and_shuffled_pages(q_fmt, fmt, heads, device):
    lengths = [0, 1, 63, 64, 65, 130]
    pool = Pool(fmt, lengths, device)
    query = random_query(q_fmt, len(lengths), heads, device)
    tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
    got = paged_logits(query, pool.pages, pool.block_table, tensor, fmt=fmt, max_length=140)
    assert got.shape == (6, 140)
    assert_scores(f"paged {q_fmt} x {fmt}, {heads} heads", got, pool.wants(query, lengths, 1))
    fast = paged_logits(query, pool.pages, pool.block_table, tensor, fmt=fmt, max_length=140, exact=False)
    assert_scores(f"paged {q_fmt} x {fmt}, {heads} heads, not exact", fast, pool.wants(query, lengths, 1))
    naive = paged_logits_naive(query, pool.pages, pool.block_table, tensor, fmt=fmt, max_length=140)
    assert_scores(f"naive {q_fmt} x {fmt}, {heads} heads", naive, pool.wants(query, lengths, 1))


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
@pytest.mark.parametrize(("next_n", "heads"), [(3, 16), (2, 64), (4, 32)])
def test_paged_several_rows_of_a_request(q_fmt, fmt, next_n, heads, device):
    pool = Pool(fmt, [66, 3], device)
    lengths = [64, 65, 66, 66][:next_n] + [0, 3, 2, 3][:next_n]
    query = random_query(q_fmt, 2 * next_n, heads, device)
    tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
    for exact in (True, False):
        got = paged_logits(
            query, pool.pages, pool.block_table, tensor, fmt=fmt, max_length=128, next_n=next_n, exact=exact
        )
        assert_scores(f"next_n {next_n}, {q_fmt} x {fmt}, exact {exact}", got, pool.wants(query, lengths, next_n))


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
@pytest.mark.parametrize(
    "requests", [33, pytest.param(300, marks=pytest.mark.gpu), pytest.param(1100, marks=pytest.mark.gpu)]
)
def test_many_requests_of_uneven_length(q_fmt, fmt, requests, device):
    """Every program's share begins and ends somewhere inside a request; requests without entries lie between."""
    most = 200 if requests == 33 else 900
    lengths = [0 if n % 5 == 0 else int(n * 37 % most) for n in range(requests)]
    pool = Pool(fmt, lengths, device)
    query = random_query(q_fmt, requests, 16 if requests == 33 else 64, device)
    tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
    got = paged_logits(query, pool.pages, pool.block_table, tensor, fmt=fmt, max_length=most)
    assert_scores(f"{requests} requests, {q_fmt} x {fmt}", got, pool.wants(query, lengths, 1))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_given_output_with_strided_rows(fmt, fill, exact, device):
    """The visible columns of a poisoned buffer are all written, and nothing is written beside the buffer."""
    lengths, columns = [0, 1, 70, 129], 150
    pool = Pool(fmt, lengths, device)
    query = random_query(QUERY_FORMATS_OF[fmt][0], 4, 64, device)
    tensor = torch.tensor(lengths, dtype=torch.int32, device=device)
    codes, scales = (None if t is None else t.to(device) for t in random_codes(fmt, columns))
    first = torch.tensor([0, 5, 64, 149], dtype=torch.int32, device=device)
    last = torch.tensor([150, 5, 66, 150], dtype=torch.int32, device=device)

    def paged(**how):
        return paged_logits(
            query, pool.pages, pool.block_table, tensor, fmt=fmt, max_length=columns, exact=exact, **how
        )  # fmt: skip

    def ragged(**how):
        return ragged_logits(query, codes, scales, first, last, fmt=fmt, exact=exact, **how)

    for run, start, end in ((paged, torch.zeros_like(tensor), tensor), (ragged, first, last)):
        want = run()
        wide = torch.full((4, columns + 7), torch.nan, device=device)
        got = run(out=wide[:, 3 : 3 + columns], fill=fill)
        assert got.data_ptr() == wide[:, 3:].data_ptr()
        assert wide[:, :3].isnan().all()
        assert wide[:, 3 + columns :].isnan().all()
        column = torch.arange(columns, device=device)
        seen = (column >= start[:, None]) & (column < end[:, None])
        if fill:
            seen = torch.ones_like(seen)
        assert torch.equal(got[seen], want[seen])
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        paged(out=wide)


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_paged_width_cuts_long_rows(fmt, device):
    pool = Pool(fmt, [100], device)
    query = random_query(QUERY_FORMATS_OF[fmt][0], 1, 16, device)
    length = torch.tensor([100], dtype=torch.int32, device=device)
    wide = paged_logits(query, pool.pages, pool.block_table, length, fmt=fmt, max_length=192)
    for width in (1, 64, 70):
        cut = paged_logits(query, pool.pages, pool.block_table, length, fmt=fmt, max_length=width)
        assert torch.equal(cut, wide[:, :width])


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_a_poisoned_key_shows_and_only_there(fmt, device):
    pool = Pool(fmt, [70], device)
    bad = pool.slots(0, 70)[66:67]
    row = torch.full((1, PAGE_FORMATS[fmt].value_bytes), 0x7F, dtype=torch.uint8, device=device)
    codes, scales = read_entries(pool.pages, fmt, bad)
    codes = row.view(codes.dtype) if fmt != "e2m1" else codes
    scales = torch.full_like(scales, 255) if fmt == "e2m1" else scales
    if fmt == "bf16":
        codes = torch.full_like(codes, torch.nan)
    write_entries(pool.pages, fmt, bad, codes, scales)
    query = random_query(QUERY_FORMATS_OF[fmt][0], 1, 16, device)
    length = torch.tensor([70], dtype=torch.int32, device=device)
    got = paged_logits(query, pool.pages, pool.block_table, length, fmt=fmt, max_length=128)
    assert got.isnan().nonzero().tolist() == [[0, 66]]


def one_request(fmt, codes, scales, device):
    """Keys of one request in pages, and their block table."""
    count = len(codes)
    pages = allocate_pages(fmt, -(-count // 64), device)
    scales = None if scales is None else scales.to(device)
    write_entries(pages, fmt, torch.arange(count, device=device), codes.to(device), scales)
    return pages, torch.arange(len(pages), dtype=torch.int32, device=device)[None]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("side", ["keys", "queries"])
def test_e2m1_blocks_far_below_the_largest(side, exact, device):
    """A block 2^-d of its row's largest, alone in the sum since the largest meets zeros: every d is exact."""
    most = 60
    below = torch.arange(most + 1, dtype=torch.uint8)
    codes, scales = random_codes("e2m1", most + 1)
    scales[:] = 127 - below[:, None]
    scales[:, 0] = 127
    other, other_scales = random_codes("e2m1", most + 1, 16)
    other[..., :16] = 0
    other_scales[:] = 127
    q = (other, other_scales) if side == "keys" else (codes[:, None].expand_as(other).contiguous(),
                                                      scales[:, None].expand_as(other_scales).contiguous())  # fmt: skip
    k = (codes, scales) if side == "keys" else (other[:, 0].contiguous(), other_scales[:, 0].contiguous())
    query = QuantisedQuery(q[0].to(device), q[1].to(device), torch.rand(most + 1, 16).to(device) + 0.5)
    pages, table = one_request("e2m1", *k, device)
    lengths = torch.full((most + 1,), most + 1, dtype=torch.int32, device=device)
    table = table.expand(most + 1, -1).contiguous()
    got = paged_logits(query, pages, table, lengths, fmt="e2m1", max_length=most + 1, exact=exact)
    for row in range(most + 1):
        want, _ = exact_scores(query, row, *(t.to(device) for t in k), "e2m1")
        torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=0)


def test_e2m1_sums_are_exact(device):
    """Blocks up to 2^3 apart and large terms that cancel: fp32 holds every partial sum, so each product is exact."""
    heads, keys = 16, 150
    k_codes, q_codes = torch.randint(256, (keys, 64)), torch.randint(256, (heads, heads, 64))
    largest = torch.rand(keys, 64) < 0.5  # 6 or -6 in two places of three: sums far beyond what is left of them
    k_codes = torch.where(largest, k_codes | 0x77, k_codes)
    q_codes = torch.where(torch.rand(heads, heads, 64) < 0.5, q_codes | 0x77, q_codes)
    k_scales, q_scales = torch.randint(121, 125, (keys, 4)), torch.randint(124, 128, (heads, heads, 4))
    pages, table = one_request("e2m1", k_codes.to(torch.uint8), k_scales.to(torch.uint8), device)
    query = QuantisedQuery(
        q_codes.to(torch.uint8).to(device), q_scales.to(torch.uint8).to(device), torch.eye(heads, device=device)
    )  # row h counts head h alone
    lengths = torch.full((heads,), keys, dtype=torch.int32, device=device)
    table = table.expand(heads, -1).contiguous()
    got = paged_logits(query, pages, table, lengths, fmt="e2m1", max_length=keys)
    stored = k_codes.to(torch.uint8).to(device), k_scales.to(torch.uint8).to(device)
    for row in range(heads):
        want, _ = exact_scores(query, row, *stored, "e2m1")
        assert torch.equal(got[row].double(), want)


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
@pytest.mark.parametrize("apart", [30, 90])
def test_gates_far_apart(fmt, apart, device):
    """Heads with a gate 2^apart of the others' meet keys that they oppose: what is left is as accurate as ever."""
    q_fmt = QUERY_FORMATS_OF[fmt][0]
    k_codes, k_scales = random_codes(fmt, 70)
    query = random_query(q_fmt, 1, 32, device)
    if fmt == "e2m1":
        k_codes &= 0x77  # keys >= 0, heads <= 0
        query.codes[0, :7] |= 0x88
    else:
        k_codes = k_codes.float().abs().to(k_codes.dtype)
        query.codes[0, :7] = (-query.codes[0, :7].float().abs()).to(query.codes.dtype)
    query.gate[0, :7] *= 2.0**apart
    keys = k_codes.to(device), None if k_scales is None else k_scales.to(device)
    pages, table = one_request(fmt, *keys, device)
    length = torch.tensor([70], dtype=torch.int32, device=device)
    got = paged_logits(query, pages, table, length, fmt=fmt, max_length=70)
    want, magnitude = exact_scores(query, 0, *keys, fmt)
    assert magnitude < 2.0**30
    assert (got[0].double() - want).abs().max() < ELEMENT * magnitude
    query.gate.zero_()
    assert not paged_logits(query, pages, table, length, fmt=fmt, max_length=70).any()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("floor", [True, False])
def test_e2m1_scales_are_powers_of_two_of_any_size(floor, exact, device):
    """Scales 2^60 larger or smaller move scores by just that; blocks of zeros with the floor's scale change nothing."""
    codes, scales = random_codes("e2m1", 70)
    if floor:
        codes[:, 48:] = 0
        scales[:, 3] = 1
    query = random_query("e2m1", 1, 64, device)
    length = torch.tensor([70], dtype=torch.int32, device=device)

    def run(scales, q_scales):
        pages, table = one_request("e2m1", codes, scales, device)
        q = QuantisedQuery(query.codes, q_scales, query.gate)
        return paged_logits(q, pages, table, length, fmt="e2m1", max_length=70, exact=exact)

    base = run(scales, query.scales)
    want, magnitude = exact_scores(query, 0, codes.to(device), scales.to(device), "e2m1")
    assert (base[0].double() - want).abs().max() < ELEMENT * magnitude
    for shift in (-60, 60):
        moved = scales.int() + shift
        moved[:, 3] = 1 if floor else moved[:, 3]
        assert torch.equal(run(moved.to(torch.uint8), query.scales), base * 2.0**shift)
        assert torch.equal(run(scales, (query.scales.int() + shift).to(torch.uint8)), base * 2.0**shift)


@pytest.mark.parametrize("exact", [True, False])
def test_one_bad_e2m1_scale_poisons_its_row(exact, device):
    codes, scales = random_codes("e2m1", 70)
    for block in range(4):
        scales[[3, 30, 62, 66][block], block] = 255
    pages, table = one_request("e2m1", codes, scales, device)
    length = torch.tensor([70], dtype=torch.int32, device=device)
    query = random_query("e2m1", 1, 64, device)
    got = paged_logits(query, pages, table, length, fmt="e2m1", max_length=70, exact=exact)
    assert got.isnan().nonzero()[:, 1].tolist() == [3, 30, 62, 66]
    for blocks in (slice(2, 3), slice(0, 4)):
        query.scales[0, 5, blocks] = 255
        got = paged_logits(query, pages, table, length, fmt="e2m1", max_length=70, exact=exact)
        assert got.isnan().all()


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
@pytest.mark.parametrize("exact", [True, False])
def test_an_unknown_page_is_nan_and_not_followed(q_fmt, fmt, exact, device):
    pool = Pool(fmt, [130], device)
    query = random_query(q_fmt, 1, 16, device)
    length = torch.tensor([130], dtype=torch.int32, device=device)
    for wrong in (-(2**31), -1, pool.pages.shape[0], 2**31 - 1):
        table = pool.block_table.clone()
        table[0, 1] = wrong
        got = paged_logits(query, pool.pages, table, length, fmt=fmt, max_length=130, exact=exact)[0]
        assert got.isnan().nonzero().flatten().tolist() == list(range(64, 128))


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 150])
def test_ragged_two_requests(q_fmt, fmt, keys, device):
    codes, scales = (None if t is None else t.to(device) for t in random_codes(fmt, keys))
    first = keys // 3
    spans = [
        (0, 0),
        (0, min(1, first)),
        (0, first),
        (first, first),
        (first, keys),
        (first, keys - 1),
        (keys, keys),
    ]
    spans = [(a, max(a, b)) for a, b in spans]
    start, end = (torch.tensor(t, dtype=torch.int32, device=device) for t in zip(*spans, strict=True))
    query = random_query(q_fmt, len(spans), 32, device)
    got = ragged_logits(query, codes, scales, start, end, fmt=fmt)
    wants = []
    for row, (a, b) in enumerate(spans):
        part = slice(a, b)
        wants.append((a, *exact_scores(query, row, codes[part], None if scales is None else scales[part], fmt)))
    assert_scores(f"ragged {q_fmt} x {fmt}, {keys} keys", got, wants)
    fast = ragged_logits(query, codes, scales, start, end, fmt=fmt, exact=False)
    assert_scores(f"ragged {q_fmt} x {fmt}, {keys} keys, not exact", fast, wants)
    assert_scores("naive", ragged_logits_naive(query, codes, scales, start, end, fmt=fmt), wants)


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
def test_ragged_equals_paged_bitwise(q_fmt, fmt, device):
    pool = Pool(fmt, [100], device)
    query = random_query(q_fmt, 1, 32, device)
    codes, scales = read_entries(pool.pages, fmt, pool.slots(0, 100))
    length = torch.tensor([100], dtype=torch.int32, device=device)
    paged = paged_logits(query, pool.pages, pool.block_table, length, fmt=fmt, max_length=100)
    ragged = ragged_logits(query, codes, scales, torch.zeros_like(length), length, fmt=fmt)
    if device.type == "cuda":  # the compiler may tile the two kernels' products differently
        torch.testing.assert_close(paged, ragged, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(paged, ragged)


@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
def test_reruns_are_bitwise_equal(q_fmt, fmt, device):
    pool = Pool(fmt, [70, 5], device)
    query = random_query(q_fmt, 2, 32, device)
    lengths = torch.tensor([70, 5], dtype=torch.int32, device=device)
    runs = [
        paged_logits(query, pool.pages, pool.block_table, lengths, fmt=fmt, max_length=128).view(torch.int32)
        for _ in range(3)
    ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_one_score_by_hand(device):
    """Two heads count: gates 2 and 3, q.k = 8 and -8, key scale 0.5 -> (2 * 8 + 3 * 0) * 0.5 = 8."""
    q = torch.zeros(1, 16, 128)
    q[0, 0, :8], q[0, 1, :8] = 1.0, -1.0
    gate = torch.zeros(1, 16)
    gate[0, :2] = torch.tensor([2.0, 3.0])
    query = QuantisedQuery(q.to(torch.float8_e4m3fn).to(device), None, gate.to(device))
    pages = allocate_pages("e4m3", 1, device)
    codes = torch.ones(1, 128).to(torch.float8_e4m3fn).to(device)
    write_entries(
        pages,
        "e4m3",
        torch.zeros(1, dtype=torch.int64, device=device),
        codes,
        torch.tensor([0.5], device=device),
    )
    one = torch.ones(1, dtype=torch.int32, device=device)
    got = paged_logits(query, pages, torch.zeros_like(one)[None], one, fmt="e4m3", max_length=2)
    assert got.tolist() == [[8.0, -torch.inf]]


def test_errors_name_what_was_found(device):
    pool = Pool("e2m1", [5], device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    query = random_query("e4m3", 1, 16, device)
    with pytest.raises(ValueError, match="query is e4m3 and keys are e2m1, expected a query in e2m1"):
        paged_logits(query, pool.pages, pool.block_table, length, fmt="e2m1", max_length=5)
    pool = Pool("e4m3", [5], device)
    arguments = (pool.pages, pool.block_table, length)
    for bad in ("e2m1", "bf16"):
        with pytest.raises(ValueError, match="expected a query in e4m3"):
            paged_logits(random_query(bad, 1, 16, device), *arguments, fmt="e4m3", max_length=5)
    with pytest.raises(ValueError, match="query has 8 heads, expected a multiple of 16"):
        paged_logits(random_query("e4m3", 1, 8, device), *arguments, fmt="e4m3", max_length=5)
    with pytest.raises(ValueError, match="next_n is 2 for 1 query rows"):
        paged_logits(query, *arguments, fmt="e4m3", max_length=5, next_n=2)
    with pytest.raises(ValueError, match=r"max_length is 1000, expected 0\.\.128"):
        paged_logits(query, *arguments, fmt="e4m3", max_length=1000)
    with pytest.raises(ValueError, match=r"lengths is torch\.int64"):
        paged_logits(query, pool.pages, pool.block_table, length.long(), fmt="e4m3", max_length=5)
    keys, scales = (t.to(device) for t in random_codes("e4m3", 4))
    with pytest.raises(ValueError, match="e4m3 keys come without scales"):
        ragged_logits(query, keys, None, length, length, fmt="e4m3")
    with pytest.raises(ValueError, match="key_scales is"):
        ragged_logits(query, keys, scales[:3], length, length, fmt="e4m3")


@pytest.mark.gpu
@pytest.mark.parametrize(("q_fmt", "fmt"), PAIRS)
@pytest.mark.parametrize("offset", [2**31, 2**32])
def test_flash_shapes(q_fmt, fmt, offset, device):
    """64 heads, 8192 entries and more, pages beyond 2^31 and 2^32 bytes, two rows a request, 20 reruns."""
    counts = [8192, 12345, 1]
    total = offset // PAGE_FORMATS[fmt].page_bytes + 400
    pages = torch.full((total, PAGE_FORMATS[fmt].page_bytes), 0xFF, dtype=torch.uint8, device=device)
    pool = Pool(fmt, counts, device, first_page=total - 360, pages=pages)
    assert int(pool.block_table[0, 0]) * PAGE_FORMATS[fmt].page_bytes > offset
    lengths = [8191, 8192, 12345, 12000, 0, 1]
    query = random_query(q_fmt, 6, 64, device)
    tensor = torch.tensor(lengths, dtype=torch.int32, device=device)

    def run():
        return paged_logits(query, pages, pool.block_table, tensor, fmt=fmt, max_length=12400, next_n=2)

    got = run()
    assert_scores(f"paged {q_fmt} x {fmt}, Flash", got, pool.wants(query, lengths, 2))
    assert all(torch.equal(run().view(torch.int32), got.view(torch.int32)) for _ in range(20))

    codes, scales = read_entries(pages, fmt, pool.slots(1, 12345))
    rows = 256
    query = random_query(q_fmt, rows, 64, device)
    start = torch.randint(0, 6000, (rows,), dtype=torch.int32)
    end = start + torch.randint(0, 6345, (rows,), dtype=torch.int32)
    wants = []
    for row, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        part = slice(a, b)
        wants.append((a, *exact_scores(query, row, codes[part], None if scales is None else scales[part], fmt)))
    start, end = start.to(device), end.to(device)
    got = ragged_logits(query, codes, scales, start, end, fmt=fmt)
    assert_scores(f"ragged {q_fmt} x {fmt}, Flash", got, wants)
    for _ in range(20):
        again = ragged_logits(query, codes, scales, start, end, fmt=fmt)
        assert torch.equal(again.view(torch.int32), got.view(torch.int32))
