"""The DeepGEMM adapter against a fake package: what it hands over, and what it makes of the result.

The fake asserts the arguments that the real package asks for, computes in torch and leaves NaN wherever the real
one leaves memory as it was. Tolerance: equal up to the order of fp32 sums.
"""

import dataclasses
import sys
import types

import pytest
import torch

from diffcheck import kernels
from diffcheck.backends import Chain
from diffcheck.backends.base import KeyCache
from diffcheck.backends.deep_gemm import ENTRIES, ROWS_PER_CALL, DeepGemmKernels
from diffcheck.backends.emulated import EmulatedKernels, shuffled_slots
from diffcheck.formats import BF16, Format
from diffcheck.pipeline import Pipeline
from diffcheck.recipe import Recipe

SMS = 132


class Foreign:
    """A tensor of another library: all it has is DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def scores_of(q, keys, scales, gate):
    return gate @ (q.float() @ (keys.float() * scales[:, None]).T).relu()


def is_tensor(tensor, dtype, *shape):
    return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()


class Fake(types.ModuleType):
    """The four functions; `calls` has the rows of each paged call."""

    def __init__(self, wrap=lambda tensor: tensor):
        super().__init__("deep_gemm")
        self.wrap, self.calls = wrap, []

    def get_num_sms(self):
        return SMS

    def get_paged_mqa_logits_metadata(self, context_lens, block_kv, num_sms):
        assert is_tensor(context_lens, torch.int32, len(context_lens), 1)
        assert (block_kv, num_sms) == (64, SMS)
        return torch.zeros(num_sms + 1, 2, dtype=torch.int32)

    def fp8_paged_mqa_logits(
        self, q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False
    ):
        rows, _, heads, _ = q.shape
        assert is_tensor(q, torch.float8_e4m3fn, rows, 1, heads, 128)
        assert heads in (32, 64)
        assert is_tensor(kv_cache, torch.uint8, len(kv_cache), 64, 1, 132)
        assert is_tensor(weights, torch.float32, rows, heads)
        assert is_tensor(context_lens, torch.int32, rows, 1)
        assert is_tensor(block_table, torch.int32, rows, block_table.shape[1])
        assert is_tensor(schedule_meta, torch.int32, SMS + 1, 2)
        assert not clean_logits, "two-dimensional lengths cannot be cleaned"
        assert context_lens.min() > 0
        assert context_lens.max() <= max_context_len <= 64 * block_table.shape[1]
        self.calls.append(rows)
        # rows lie 256 entries apart, and what was not computed is left as it was
        logits = torch.full((rows, -(-max_context_len // 256) * 256), torch.nan)
        for row, length in enumerate(context_lens[:, 0].tolist()):
            pages = kv_cache[block_table[row, : -(-length // 64)].long()].flatten(1)
            keys = pages[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn)
            scales = pages[:, 64 * 128 :].contiguous().view(torch.float32).flatten()
            logits[row, : len(keys)] = scores_of(q[row, 0], keys, scales, weights[row])
        return self.wrap(logits[:, :max_context_len])

    def fp8_mqa_logits(self, q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
        keys, scales = kv
        rows, heads, _ = q.shape
        assert is_tensor(q, torch.float8_e4m3fn, rows, heads, 128)
        assert is_tensor(keys, torch.float8_e4m3fn, len(keys), 128)
        assert is_tensor(scales, torch.float32, len(keys))
        assert is_tensor(weights, torch.float32, rows, heads)
        assert is_tensor(ks, torch.int32, rows)
        assert is_tensor(ke, torch.int32, rows)
        assert (ks < ke).all()
        assert ks.min() >= 0
        assert ke.max() <= len(keys)
        assert max_seqlen_k == 0
        logits = torch.full((rows, len(keys)), torch.nan)
        for row, (first, last) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
            span = slice(max(first - 1, 0), last + 1)  # neighbours are scored too
            logits[row, span] = scores_of(q[row], keys[span], scales[span], weights[row])
        return self.wrap(logits)


@pytest.fixture(params=[lambda tensor: tensor, Foreign], ids=["torch", "dlpack"])
def fake(request, monkeypatch):
    module = Fake(request.param)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_query(rows, heads=32):
    codes = (torch.randn(rows, heads, 128) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return kernels.QuantisedQuery(codes, torch.rand(rows, heads), torch.randn(rows, heads))


def random_keys(entries):
    codes = (torch.randn(entries, 128) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.rand(entries) / 100


def poisoned_cache(entries):
    table, slots = shuffled_slots(entries, torch.device("cpu"))
    pages = kernels.allocate_pages("e4m3", table.shape[1] + 2).fill_(0xFF)
    kernels.write_entries(pages, "e4m3", slots, *random_keys(entries))
    return KeyCache(pages=pages, block_table=table, slots=slots, fmt="e4m3")


@pytest.fixture
def config(support):
    return support.config(index_n_heads=32)


@pytest.mark.parametrize("heads", [32, 64])
def test_paged_scores_and_masks(fake, heads):
    cache, query = poisoned_cache(150), random_query(8, heads)
    visible = torch.tensor([150, 0, 1, 63, 64, 65, 0, 149], dtype=torch.int32)
    got = DeepGemmKernels().paged_logits(query, cache, visible)
    torch.testing.assert_close(got, EmulatedKernels().paged_logits(query, cache, visible), rtol=1e-4, atol=1e-2)
    assert fake.calls == [6]


def test_paged_without_any_visible_entry_calls_nothing(fake):
    cache, visible = poisoned_cache(10), torch.zeros(3, dtype=torch.int32)
    got = DeepGemmKernels().paged_logits(random_query(3), cache, visible)
    assert got.shape == (3, 10)
    assert (got == -torch.inf).all()
    assert fake.calls == []


def test_paged_many_rows_are_divided(fake):
    rows = ROWS_PER_CALL + 3
    cache, query = poisoned_cache(2), random_query(rows)
    got = DeepGemmKernels().paged_logits(query, cache, torch.full((rows,), 2, dtype=torch.int32))
    assert fake.calls == [ROWS_PER_CALL, 3]
    assert got.isfinite().all()


def test_a_length_beyond_the_cache_is_cut(fake):
    cache, query = poisoned_cache(70), random_query(1)
    got = DeepGemmKernels().paged_logits(query, cache, torch.tensor([128], dtype=torch.int32))
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_scores_and_masks(fake, dtype):
    (codes, scales), query = random_keys(40), random_query(6)
    start = torch.tensor([0, 3, 7, 9, 40, -2], dtype=dtype)
    end = torch.tensor([40, 9, 7, 3, 40, 99], dtype=dtype)
    got = DeepGemmKernels().ragged_logits(query, codes, scales, start, end)
    want = kernels.ragged_logits_naive(query, codes, scales, start, end, fmt="e4m3")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def test_ragged_of_empty_ranges_calls_nothing(fake):
    nothing = torch.zeros(2, dtype=torch.int32)
    got = DeepGemmKernels().ragged_logits(random_query(2), *random_keys(5), nothing, nothing)
    assert (got == -torch.inf).all()


def test_a_chain_with_the_emulation(fake, config, support):
    x, qr = support.inputs(config, 96)
    pipeline = Pipeline(config, support.weights(config), x, qr, queries=torch.tensor([2, 40, 95]))
    recipe = Recipe.preset("sglang-fp8", config)
    chain = Chain.of("deep_gemm", DeepGemmKernels())
    assert chain.refusal(recipe, config) is None
    trace = chain.run(pipeline, recipe)
    logits = chain.judge(pipeline, recipe, trace)[2]
    assert logits["backend"] == "deep_gemm"
    assert logits["isolated"]["calc_diff"] < 1e-10


def test_available_with_the_package(fake):
    assert DeepGemmKernels().unavailable("cuda") is None or torch.cuda.is_available()
    assert DeepGemmKernels().unavailable("cpu") == "needs a CUDA device"


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert DeepGemmKernels().unavailable("cuda") == "package deep_gemm is missing: pip install sgl-deep-gemm"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import a_library_it_lacks", "ModuleNotFoundError: No module named 'a_library_it_lacks'"),
        ("raise OSError('undefined symbol:\\n  _ZN3c10')", "OSError: undefined symbol: _ZN3c10"),
        ("assert False", "AssertionError: no message; it needs a CUDA toolkit, see CUDA_HOME"),
    ],
)
def test_a_package_that_cannot_be_imported(body, reason, monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    assert DeepGemmKernels().unavailable("cuda") == f"package deep_gemm cannot be imported: {reason}"


def test_a_package_without_the_functions(monkeypatch):
    old = types.ModuleType("deep_gemm")
    old.get_num_sms = lambda: SMS
    monkeypatch.setitem(sys.modules, "deep_gemm", old)
    reason = DeepGemmKernels().unavailable("cuda")
    assert reason == f"package deep_gemm has no {', '.join(ENTRIES[1:])}: pip install sgl-deep-gemm"


def test_accepts_fp8_recipes(config):
    for name in ("sglang-fp8", "vllm-fp8", "trtllm-fp8"):
        recipe = Recipe.preset(name, config)
        assert DeepGemmKernels().refusal("logits", recipe, config) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round_score": "bf16"}, "round_score is 'bf16' and the kernel only has 'none'"),
        ({"round_gate": "bf16"}, "round_gate is 'bf16' and the kernel only has 'none'"),
        ({"relu": False}, "relu is False and the kernel only has True"),
        ({"compute": "fp64"}, "compute is 'fp64' and the kernel only has 'fp32'"),
        ({"k_format": BF16}, "keys: the kernel scores e4m3 with one scale per 128, not bf16"),
        ({"q_format": None}, "queries: unquantised values have no cache format"),
        ({"q_format": Format(element="e4m3", block=64)}, "queries: the kernel scores e4m3 with one scale per 128, not"),
        ({"format": Format(element="e2m1", block=32, scale="ue8m0")}, "queries: DeepGEMM scores e2m1 on compute"),
    ],
)
def test_refuses_other_recipes(changes, reason, config):
    recipe = Recipe.preset("sglang-fp8", config).replace(**changes)
    assert DeepGemmKernels().refusal("logits", recipe, config).startswith(reason)


def test_refuses_other_head_counts(config):
    recipe = Recipe.preset("sglang-fp8", config)
    for heads, dim in ((16, 128), (48, 128), (64, 64)):
        other = dataclasses.replace(config, index_n_heads=heads, index_head_dim=dim)
        reason = DeepGemmKernels().refusal("logits", recipe, other)
        assert reason == f"{heads} heads of {dim}, the kernel needs 32 or 64 heads of 128"


def test_has_no_other_step(config):
    assert DeepGemmKernels().refusal("topk", Recipe.preset("sglang-fp8", config), config)
