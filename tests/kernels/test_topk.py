"""topk: exactly the k best by (score, lower index), whatever the scores look like."""

import pytest
import torch
from hypothesis import given, settings

from diffcheck.kernels import topk, topk_naive
from diffcheck.kernels.topk import COLUMNS, LIST
from diffcheck.kernels.tournament import most_rows
from diffcheck.testing import assert_selection, strategies

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")


def check(logits, lengths, k, device, starts=None):
    """Equal to the sort, ascending, and a property without an oracle: the kept values are the best ones."""
    logits = logits.to(device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    got = topk(logits, lengths, k, starts)
    assert got.dtype == torch.int32
    assert torch.equal(got, topk_naive(logits, lengths, k, starts))
    for row in range(len(logits)):
        start = 0 if starts is None else int(starts[row])
        kept = got[row][got[row] >= 0].long()
        assert (kept.diff() > 0).all()
        assert (got[row, len(kept) :] == -1).all()
        assert_selection(kept[None] - start, scores=logits[row : row + 1, start : start + int(lengths[row])], k=k)
    return got


@pytest.mark.parametrize("k", [1, 16, 512])
def test_lengths_around_k(k, device):
    lengths = [0, 1, k - 1, k, k + 1, 1023, 1024, 1025, 1100]
    check(torch.randn(len(lengths), 1100), lengths, k, device)


def test_poison_beyond_the_length_does_not_matter(device):
    logits = torch.randn(3, 1100)
    lengths = [5, 64, 1030]
    clean = check(logits.clone(), lengths, 32, device)
    for row, length in enumerate(lengths):
        logits[row, length:] = torch.tensor([NAN, INF])[row % 2]
    assert torch.equal(check(logits, lengths, 32, device), clean)


def test_equal_scores_keep_the_lower_index(device):
    logits = torch.full((2, 1100), 3.5)
    got = check(logits, [1100, 1100], 40, device)
    assert got.tolist() == [list(range(40))] * 2
    logits[:, 700:720] = 4.0
    got = check(logits, [1100, 1100], 40, device)
    assert got[0].tolist() == [*range(20), *range(700, 720)]


@pytest.mark.parametrize("zeros", [[-0.0, 0.0], [0.0, -0.0], [-0.0, 0.0, -0.0, 0.0]])
def test_both_zeros_are_one_score(zeros, device):
    for k in range(1, len(zeros)):
        assert check(torch.tensor([zeros]), [len(zeros)], k, device).tolist() == [list(range(k))]


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0])
def test_clustered_scores(offset, device):
    """More scores share a coarse bin than a bounded candidate list holds, as in one public kernel's fault."""
    logits = offset + 0.5 * torch.randn(2, 6000)
    check(logits, [6000, 5999], 512, device)
    check(logits.bfloat16().float(), [6000, 5999], 512, device)  # many exact ties at the k-th place


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_scores_that_differ_in_one_byte_only(shift, device):
    """Each radix pass must decide on its own."""
    byte = torch.randperm(300, dtype=torch.int32) % (127 if shift == 24 else 256)
    logits = ((byte << shift) | (0 if shift == 24 else 0x3F00_0000)).view(torch.float32)[None]
    check(logits, [300], 37, device)
    check(-logits, [300], 37, device)


def test_special_values(device):
    row = [NAN, 1.0, -INF, 0.0, -0.0, INF, -1.0, NAN, 1e-45, -1e-45, 3.4e38, -3.4e38]
    ranked = [5, 10, 1, 8, 3, 4, 9, 6, 11, 2, 0, 7]  # best first; 0.0 and -0.0 are equal, so by index
    for k in range(1, 13):
        got = check(torch.tensor([row]), [12], k, device)
        assert got[0].tolist() == sorted(ranked[:k])
    three = torch.tensor([3], dtype=torch.int32, device=device)
    all_nan = torch.full((1, 4), NAN, device=device)
    assert topk(all_nan, three, 5).tolist() == [[0, 1, 2, -1, -1]]


def test_all_invisible_scores_are_still_scores(device):
    """-inf inside the length is a score: last among numbers, lower index first."""
    logits = torch.full((1, 50), -INF)
    logits[0, 30] = 0.0
    assert check(logits, [50], 3, device)[0].tolist() == [0, 1, 30]


def test_starts_count_columns_of_the_logits(device):
    logits = torch.randn(4, 1500)
    got = check(logits, [1400, 700, 10, 0], 64, device, starts=[100, 600, 1490, 50])
    assert got[0].min() >= 100
    assert got[2].tolist() == [*range(1490, 1500)] + [-1] * 54


def test_lengths_are_cut_at_the_width(device):
    logits = torch.randn(1, 20)
    lengths = torch.tensor([1000], dtype=torch.int32, device=device)
    assert topk(logits.to(device), lengths, 30)[0].tolist() == list(range(20)) + [-1] * 10


def test_rows_may_be_strided(device):
    wide = torch.randn(3, 400).to(device)
    lengths = torch.full((3,), 200, dtype=torch.int32, device=device)
    assert torch.equal(topk(wide[:, 100:300], lengths, 9), topk(wide[:, 100:300].contiguous(), lengths, 9))


@settings(max_examples=25, deadline=None)
@given(strategies.scores(max_rows=3, max_entries=70, max_k=20))
def test_scores_of_every_kind(made):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(made.scores, made.visible.tolist(), made.k, device)


def test_errors_name_what_was_found(device):
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    logits = torch.zeros(2, 5, device=device)
    with pytest.raises(ValueError, match="k is 0"):
        topk(logits, lengths, 0)
    with pytest.raises(ValueError, match=r"logits is torch\.float64"):
        topk(logits.double(), lengths, 1)
    with pytest.raises(ValueError, match=r"lengths is torch\.int64"):
        topk(logits, lengths.long(), 1)
    with pytest.raises(ValueError, match=r"starts is torch.int32 \[1\], expected torch.int32 \[2\]"):
        topk(logits, lengths, 1, lengths[:1])


@pytest.mark.parametrize("width", [0, 32, 64, 256])
@pytest.mark.parametrize("order", ["random", "ascending", "descending", "equal", "NaN"])
def test_widths_and_tiles_do_not_show(width, order, device):
    """Tiles of 16 fill and shrink the lists many times (width 0); else one to five rounds of lists, some empty."""
    scores = torch.randn(3, 150)
    logits = {
        "random": scores.bfloat16().float(),
        "ascending": scores.sort().values,
        "descending": scores.sort(descending=True).values,
        "equal": torch.zeros(3, 150),
        "NaN": torch.where(scores > 0, NAN, scores),
    }[order].to(device)
    starts, lengths = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 45, 3], [150, 101, 17]))
    for k in (1, 15, 40):
        if width and not most_rows(150, k, width):
            continue
        got = topk(logits, lengths, k, starts, _tile=16, _width=width)
        assert torch.equal(got, topk_naive(logits, lengths, k, starts))


def test_more_rows_than_programs(device):
    """A program's list is empty again for its next row."""
    check(torch.randn(25, 70), [70, 3, 0, 69, 8] * 5, 9, device)


def test_lists_longer_than_their_registers(device):
    """k + COLUMNS > 2 * LIST: most of the list is read again at each count."""
    k = 2 * LIST + 100
    columns = k + 2 * COLUMNS + 300
    check(torch.randn(1, columns).bfloat16().float(), [columns], k, device)
    check(torch.arange(columns).float()[None], [columns], k, device)


def test_lists_of_a_tournament_fit_their_bound():
    assert most_rows(32768, 512, 8192) == (25 << 20) // (8 * 512 * 4)
    assert most_rows(1 << 30, 512, 8192) == 0
    assert most_rows(8193, 4097, 8192) == 0  # two lists of 8192 do not fit
    assert most_rows(8192, 4097, 8192) > 0  # and need not


def test_more_rows_than_the_lists_of_one_round_hold(device, monkeypatch):
    monkeypatch.setattr("diffcheck.kernels.tournament.LISTS_BYTES", 8 * 9 * 3 * 2)
    logits = torch.randn(5, 70, device=device)
    lengths = torch.tensor([70, 3, 0, 69, 8], dtype=torch.int32, device=device)
    assert most_rows(70, 9, 32) == 2
    assert torch.equal(topk(logits, lengths, 9, _width=32), topk_naive(logits, lengths, 9))


def test_out_is_written(device):
    logits = torch.randn(2, 30, device=device)
    lengths = torch.tensor([30, 2], dtype=torch.int32, device=device)
    out = torch.full((4, 3), 77, dtype=torch.int32, device=device)
    assert topk(logits, lengths, 3, out=out[1:3]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1:3], topk_naive(logits, lengths, 3))
    assert out[[0, 3]].eq(77).all()
    with pytest.raises(ValueError, match=r"out is torch.int32 \[4, 3\], expected torch.int32 \[2, 3\]"):
        topk(logits, lengths, 3, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_flash_shapes(k, offset, device):
    """262144 entries, batches of 4 and 64; 20 reruns."""
    for rows, columns in ((1, 131072), (4, 262144), (64, 70000), (2000, 20000)):
        logits = offset + 0.5 * torch.randn(rows, columns)
        logits[rows // 2] = offset
        lengths = [columns - 3 * r for r in range(rows)]
        got = check(logits, lengths, k, device)
        lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        logits = logits.to(device)
        assert all(torch.equal(topk(logits, lengths, k), got) for _ in range(20))
