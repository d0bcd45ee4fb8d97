"""DeepGEMM's logits on a GPU, through the adapter.

| what | tolerance |
|--|--|
| against fp64 products of the dequantised codes, paged and ragged | calc_diff 5e-6, DeepGEMM's own gate |
| against this project's Triton kernels | calc_diff 5e-6 |
| columns that a row may not see | -inf, also where pages and key rows hold NaN |
| a repetition | equal bits |
"""

import pytest
import torch

from diffcheck import kernels, metrics
from diffcheck.backends.base import KeyCache
from diffcheck.backends.deep_gemm import DeepGemmKernels
from diffcheck.backends.emulated import shuffled_slots

pytestmark = pytest.mark.gpu

CALC_DIFF = 5e-6
ROWS = 256
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4095, 4097)


@pytest.fixture(scope="module")
def deep_gemm():
    package = DeepGemmKernels()
    if why := package.unavailable("cuda"):
        pytest.skip(why)
    return package


@pytest.fixture(scope="module", params=[32, 64])
def query(request):
    rng = torch.Generator("cuda").manual_seed(request.param)
    codes = torch.randn(ROWS, request.param, 128, device="cuda", generator=rng) * 100
    gate = torch.randn(ROWS, request.param, device="cuda", generator=rng) / 10
    return kernels.QuantisedQuery(codes.clamp(-448, 448).to(torch.float8_e4m3fn), None, gate)


def keys_of(entries):
    rng = torch.Generator("cuda").manual_seed(entries)
    codes = torch.randn(entries, 128, device="cuda", generator=rng) * 100
    scales = torch.rand(entries, device="cuda", generator=rng) / 100
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales


def poisoned_cache(codes, scales):
    """The keys on shuffled pages of a larger pool; every byte that was not written makes NaN."""
    table, slots = shuffled_slots(len(codes), codes.device)
    pages = kernels.allocate_pages("e4m3", table.shape[1] + 3, codes.device).fill_(0xFF)
    kernels.write_entries(pages, "e4m3", slots, codes, scales)
    return KeyCache(pages=pages, block_table=table, slots=slots, fmt="e4m3")


def lengths_up_to(entries):
    rng = torch.Generator().manual_seed(entries)
    odd = torch.randint(entries // 2, (ROWS - len(LENGTHS) - 2,), generator=rng) * 2 + 1
    return torch.tensor([*LENGTHS, entries - 1, entries, *odd.tolist()], device="cuda").int()


def exact(query, codes, scales):
    """fp64 scores of all rows against all keys."""
    keys = kernels.dequantise(codes, scales, "e4m3").double()
    rows = zip(kernels.dequantise(query.codes, None, "e4m3"), query.gate, strict=True)
    return torch.stack([gate.double() @ (q.double() @ keys.T).relu() for q, gate in rows])


def assert_close(label, scores, want, visible):
    found = metrics.errors(scores=scores, target_scores=want, visible=visible.long())
    print(f"{label}: calc_diff {found.calc_diff:.2e}, rel {found.rel:.2e} over {found.pairs} pairs")
    assert found.calc_diff < CALC_DIFF, label


# 8155 leaves the last page unfinished
@pytest.mark.parametrize("entries", [8192, 8155])
def test_paged(deep_gemm, query, entries):
    codes, scales = keys_of(entries)
    cache, visible = poisoned_cache(codes, scales), lengths_up_to(entries)
    scores = deep_gemm.paged_logits(query, cache, visible)
    heads = query.codes.shape[1]
    assert scores.shape == (ROWS, entries)
    assert scores.dtype == torch.float32
    assert_close(f"paged, {heads} heads, fp64", scores, exact(query, codes, scales), visible)
    hidden = torch.arange(entries, device="cuda") >= visible[:, None]
    assert (scores[hidden] == -torch.inf).all()
    assert scores[~hidden].isfinite().all()
    again = deep_gemm.paged_logits(query, cache, visible)
    assert torch.equal(scores.view(torch.int32), again.view(torch.int32))
    tables = cache.block_table.expand(ROWS, -1).contiguous()
    ours = kernels.paged_logits(query, cache.pages, tables, visible, fmt="e4m3", max_length=entries)
    assert_close(f"paged, {heads} heads, triton", scores, ours, visible)
    assert (ours[hidden] == -torch.inf).all()


def test_paged_in_several_calls(deep_gemm, query, monkeypatch):
    codes, scales = keys_of(700)
    cache, visible = poisoned_cache(codes, scales), torch.arange(ROWS, device="cuda").int() * 2 + 1
    whole = deep_gemm.paged_logits(query, cache, visible)
    monkeypatch.setattr("diffcheck.backends.deep_gemm.ROWS_PER_CALL", 100)
    parts = deep_gemm.paged_logits(query, cache, visible)
    assert torch.equal(whole.view(torch.int32), parts.view(torch.int32))


def test_paged_rows_that_see_nothing(deep_gemm, query):
    cache = poisoned_cache(*keys_of(100))
    scores = deep_gemm.paged_logits(query, cache, torch.zeros(ROWS, dtype=torch.int32, device="cuda"))
    assert (scores == -torch.inf).all()


@pytest.mark.parametrize("entries", [8192, 8155])
def test_ragged(deep_gemm, query, entries):
    codes, scales = keys_of(entries)
    end = lengths_up_to(entries)
    start = (torch.arange(ROWS, device="cuda") * 7 % 300).int().clamp(max=entries)
    start[ROWS // 2 :] = 0
    scores = deep_gemm.ragged_logits(query, codes, scales, start, end)
    heads = query.codes.shape[1]
    column = torch.arange(entries, device="cuda")
    outside = (column < start[:, None]) | (column >= end[:, None])
    assert (scores[outside] == -torch.inf).all()
    assert scores[~outside].isfinite().all()
    want = exact(query, codes, scales).masked_fill(outside, -torch.inf)
    assert_close(f"ragged, {heads} heads, fp64", scores, want, end)
    again = deep_gemm.ragged_logits(query, codes, scales, start, end)
    assert torch.equal(scores.view(torch.int32), again.view(torch.int32))
    ours = kernels.ragged_logits(query, codes, scales, start, end, fmt="e4m3")
    assert_close(f"ragged, {heads} heads, triton", scores, ours, end)


def test_ragged_does_not_see_poisoned_neighbours(deep_gemm, query):
    codes, scales = keys_of(1001)
    codes.view(torch.uint8)[:100] = 0x7F
    codes.view(torch.uint8)[901:] = 0x7F
    scales[:100] = scales[901:] = torch.nan
    start, end = (torch.full((ROWS,), n, dtype=torch.int32, device="cuda") for n in (100, 901))
    scores = deep_gemm.ragged_logits(query, codes, scales, start, end)
    assert scores[:, 100:901].isfinite().all()
    assert (scores[:, :100] == -torch.inf).all()
    assert (scores[:, 901:] == -torch.inf).all()
