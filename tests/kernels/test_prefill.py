"""The prefill kernel where `ragged_logits` takes it: heads, tiles, empty and disjoint ranges, poisoned keys."""

import heapq

import pytest
import torch

from diffcheck.backends.emulated import encode
from diffcheck.formats import Format
from diffcheck.kernels import QuantisedQuery, hopper_prefill, prefill, ragged_logits, ragged_logits_naive, tuning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CALC_DIFF = 5e-6
E4M3 = Format(element="e4m3", block=128, scale="fp32", reciprocal=True)


def problem(rows, heads, keys, device):
    codes, q_scales = encode(torch.randn(rows, heads, 128), E4M3)
    key_codes, key_scales = encode(torch.randn(keys, 128), E4M3)
    query = QuantisedQuery(codes.to(device), None, (torch.randn(rows, heads) * q_scales).to(device))
    return query, key_codes.to(device), key_scales.to(device)


def compare(query, keys, scales, start, end):
    start, end = (torch.tensor(t, dtype=torch.int32, device=keys.device) for t in (start, end))
    got = ragged_logits(query, keys, scales, start, end, fmt="e4m3", exact=False)
    want = ragged_logits_naive(query, keys, scales, start, end, fmt="e4m3")
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    a, b = (t[want != -torch.inf].double() for t in (got, want))
    assert not len(a) or 1 - 2 * (a @ b) / (a @ a + b @ b) < CALC_DIFF
    return got


def test_which_heads_it_has():
    assert [prefill.rows_of(h) for h in (16, 32, 64, 128, 256)] == [16, 8, 4, 2, 1]
    assert [prefill.rows_of(h) for h in (48, 96, 512)] == [0, 0, 0]


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 200])
def test_ranges(heads, keys, device):
    """Rows beside each other with full, empty, one-key and disjoint ranges, and rows that fill no block."""
    query, codes, scales = problem(6, heads, keys, device)
    half = keys // 2
    compare(query, codes, scales, [0, 0, keys, half, 0, half], [keys, 0, keys, keys, min(1, keys), half])


def test_more_keys_than_a_program_walks_over(device):
    keys = tuning.PLAIN[9].prefill_tiles * prefill.KEYS + 70
    query, codes, scales = problem(2, 64, keys, device)
    compare(query, codes, scales, [10, keys - 90], [20, keys - 1])
    compare(query, codes, scales, [0, 0], [0, 0])


def test_a_poisoned_key_shows_where_it_is_seen_and_nowhere_else(device):
    query, codes, scales = problem(2, 64, 130, device)
    poisoned = codes.view(torch.uint8).clone()
    poisoned[70] = 0x7F  # NaN
    clean = compare(query, codes, scales, [0, 0], [130, 70])
    start, end = torch.zeros(2, dtype=torch.int32, device=device), torch.tensor([130, 70], device=device).int()
    got = ragged_logits(query, poisoned.view(torch.float8_e4m3fn), scales, start, end, fmt="e4m3", exact=False)
    assert got[0, 70].isnan()
    keep = torch.arange(130, device=device) != 70
    assert torch.equal(got[:, keep], clean[:, keep])


def busy(lengths, slots, start):
    """When the last of `slots` is done with programs of such lengths, each given to the first that is free."""
    free = [0.0] * slots
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + start + length)
    return max(free)


@pytest.mark.parametrize("total", [3, 64, 200, 512, 1024, 2048])
@pytest.mark.parametrize("blocks", [1, 5, 16, 128, 275, 512, 1024, 2048])
def test_tiles_of_a_program_on_hopper(blocks, total):
    """The choice, scheduled, is not far from the best one: rows that see all keys, and causal rows."""
    slots, start = 264, tuning.SM90.prefill_start

    def time(tiles):
        chunks = range(-(-total // tiles) * tiles - tiles, -1, -tiles)
        seen = [[total] * blocks, [(b + 1) * total / blocks for b in reversed(range(blocks))]]
        return sum(
            busy([min(max(n - begin, 0), tiles) for begin in chunks for n in each], slots, start) for each in seen
        )

    tiles = hopper_prefill.tiles_of(blocks, total, slots)
    assert tiles in tuning.SM90.prefill_tiles
    assert time(tiles) <= 1.15 * min(time(other) for other in tuning.SM90.prefill_tiles)
