"""The vLLM adapter against fake modules: what it hands over, and what it makes of the result.

The fakes have the parameters of vLLM 0.33.0, assert the arguments that the real functions ask for and compute in
torch. Tolerances: keys and selections equal, scores equal up to the order of fp32 sums.
"""

import dataclasses
import sys
import types

import pytest
import torch

from diffcheck import kernels
from diffcheck.backends import Chain
from diffcheck.backends.base import KeyCache
from diffcheck.backends.emulated import EmulatedKernels, encode, shuffled_slots
from diffcheck.backends.vllm import KEY_FORMAT, VllmKernels
from diffcheck.formats import BF16
from diffcheck.pipeline import Pipeline
from diffcheck.recipe import Recipe

SMS = 132


def is_tensor(tensor, dtype, *shape):
    return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()


def indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype):
    assert is_tensor(k, torch.bfloat16, len(k), 128)
    assert is_tensor(kv_cache, torch.uint8, len(kv_cache), 64, 132)
    assert is_tensor(slot_mapping, torch.int64, len(k))
    assert (quant_block_size, kv_cache_dtype) == (128, "ue8m0")
    kernels.write_entries(kv_cache.view(len(kv_cache), -1), "e4m3", slot_mapping, *encode(k.float(), KEY_FORMAT))


def top_k_per_row_decode(logits, next_n, seq_lens, raw_topk_indices, num_rows, stride0, stride1, topk_tokens):
    assert is_tensor(logits, torch.float32, num_rows, logits.shape[1])
    assert (next_n, stride0, stride1) == (1, *logits.stride())
    assert is_tensor(seq_lens, torch.int32, num_rows)
    assert is_tensor(raw_topk_indices, torch.int32, num_rows, topk_tokens)
    assert topk_tokens <= logits.shape[1]
    assert seq_lens.min() > 0
    for row, length in enumerate(seq_lens.tolist()):
        best = logits[row, :length].sort(descending=True, stable=True).indices[:topk_tokens]
        raw_topk_indices[row, : len(best)] = best.flip(0).int()


def get_paged_mqa_logits_metadata(context_lens, block_size, num_sms, indices=None):
    assert is_tensor(context_lens, torch.int32, len(context_lens), 1)
    assert (block_size, num_sms, indices) == (64, SMS, None)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None
):
    codes, scales = q
    rows, _, heads, _ = codes.shape
    assert scales is None
    assert indices is None
    assert is_tensor(codes, torch.float8_e4m3fn, rows, 1, heads, 128)
    assert is_tensor(kv_cache, torch.uint8, len(kv_cache), 64, 1, 132)
    assert is_tensor(weights, torch.float32, rows, heads)
    assert is_tensor(context_lens, torch.int32, rows, 1)
    assert is_tensor(block_tables, torch.int32, rows, block_tables.shape[1])
    assert is_tensor(schedule_metadata, torch.int32, SMS + 1, 2)
    assert context_lens.min() > 0
    assert context_lens.max() <= max_model_len
    logits = torch.full((rows, max_model_len), torch.nan)
    for row, length in enumerate(context_lens[:, 0].tolist()):
        entry = torch.arange(length)
        slots = block_tables[row, entry // 64].long() * 64 + entry % 64
        keys = kernels.dequantise(*kernels.read_entries(kv_cache.view(len(kv_cache), -1), "e4m3", slots), "e4m3")
        logits[row, :length] = weights[row] @ (codes[row, 0].float() @ keys.T).relu()
    return logits


def older_logits(
    q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits, indices=None
):
    assert clean_logits is False
    return fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices
    )


@pytest.fixture
def fake(monkeypatch):
    """The module vllm.utils.deep_gemm; beside it vllm._custom_ops is in place."""
    ops, deep_gemm = types.ModuleType("vllm._custom_ops"), types.ModuleType("vllm.utils.deep_gemm")
    ops.indexer_k_quant_and_cache = indexer_k_quant_and_cache
    ops.top_k_per_row_decode = top_k_per_row_decode
    deep_gemm.is_deep_gemm_supported = lambda: True
    deep_gemm.get_num_sms = lambda: SMS
    deep_gemm.get_paged_mqa_logits_metadata = get_paged_mqa_logits_metadata
    deep_gemm.fp8_fp4_paged_mqa_logits = fp8_fp4_paged_mqa_logits
    for module in (types.ModuleType("vllm"), types.ModuleType("vllm.utils"), ops, deep_gemm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return deep_gemm


@pytest.fixture
def config(support):
    return support.config(index_n_heads=32)


@pytest.fixture
def pipeline(config, support):
    x, qr = support.inputs(config, 301)
    return Pipeline(config, support.weights(config), x, qr, queries=torch.tensor([2, 40, 255, 300]))


def test_keys_are_those_of_the_emulation(fake, pipeline, config, support):
    recipe = Recipe.preset("vllm-fp8", config)
    got, want = VllmKernels().store_keys(pipeline, recipe), EmulatedKernels().store_keys(pipeline, recipe)
    support.assert_same_bits(got.pages, want.pages, "pages")
    support.assert_same_bits(got.block_table, want.block_table, "block table")


@pytest.mark.parametrize("function", [fp8_fp4_paged_mqa_logits, older_logits])
def test_logits_score_and_mask(fake, function):
    fake.fp8_fp4_paged_mqa_logits = function
    torch.manual_seed(0)
    codes = (torch.randn(5, 32, 128) * 100).to(torch.float8_e4m3fn)
    query = kernels.QuantisedQuery(codes, None, torch.randn(5, 32))
    table, slots = shuffled_slots(130, torch.device("cpu"))
    pages = kernels.allocate_pages("e4m3", table.shape[1]).fill_(0xFF)
    kernels.write_entries(pages, "e4m3", slots, *encode(torch.randn(130, 128), KEY_FORMAT))
    cache = KeyCache(pages=pages, block_table=table, slots=slots, fmt="e4m3")
    visible = torch.tensor([0, 1, 64, 65, 130], dtype=torch.int32)
    got, want = (k.paged_logits(query, cache, visible) for k in (VllmKernels(), EmulatedKernels()))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def test_topk_selects_the_set(fake):
    torch.manual_seed(0)
    scores, visible = torch.randn(4, 20), torch.tensor([0, 3, 8, 20], dtype=torch.int32)
    for k in (1, 8, 20, 64):
        got, want = (kernels_.topk(scores, visible, k) for kernels_ in (VllmKernels(), EmulatedKernels()))
        assert got.dtype == torch.int64
        torch.testing.assert_close(got.sort(1).values, want.sort(1).values)


def test_a_chain_of_all_steps(fake, pipeline, config):
    recipe = Recipe.preset("vllm-fp8", config)
    chain = Chain.of("vllm", VllmKernels())
    assert chain.refusal(recipe, config) is None
    records = {record["step"]: record for record in chain.judge(pipeline, recipe, chain.run(pipeline, recipe))}
    assert [record["backend"] for record in records.values()] == ["vllm", "emulated", "vllm", "vllm"]
    assert records["keys"]["isolated"]["equal"] == 1
    assert records["logits"]["cumulative"]["calc_diff"] < 1e-10


def test_available_with_the_package(fake):
    assert VllmKernels().unavailable("cuda") is None
    assert VllmKernels().unavailable("cpu") == "needs a CUDA device"


def test_only_on_hopper(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in {(9, 0): None, (10, 0): "this one has 10.0", (8, 9): "this one has 8.9"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        got = VllmKernels().unavailable("cuda")
        assert got == (reason and f"needs a GPU of compute capability 9, {reason}")


def test_missing_package(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert VllmKernels().unavailable("cuda") == "package vllm is missing: pip install 'vllm>=0.33'"


def test_older_packages(fake, monkeypatch):
    ops = sys.modules["vllm._custom_ops"]
    monkeypatch.setattr(ops, "top_k_per_row_decode", lambda logits, next_n, seq_lens, raw_topk_indices: None)
    reason = "vllm._custom_ops.top_k_per_row_decode has no num_rows, stride0, stride1, topk_tokens: "
    assert VllmKernels().unavailable("cuda").startswith(reason)


def test_a_package_without_a_function(fake):
    del fake.fp8_fp4_paged_mqa_logits
    reason = "vllm.utils.deep_gemm has no fp8_fp4_paged_mqa_logits: pip install 'vllm>=0.33'"
    assert VllmKernels().unavailable("cuda") == reason


def test_without_deep_gemm(fake):
    fake.is_deep_gemm_supported = lambda: False
    assert "finds no DeepGEMM" in VllmKernels().unavailable("cuda")


@pytest.mark.parametrize(
    ("step", "changes", "reason"),
    [
        ("keys", {"k_format": BF16}, "k_format is bf16 and the kernel only has e4m3/128/ue8m0"),
        ("keys", {"k_hadamard": True}, "k_hadamard is True and the kernel only has False"),
        ("keys", {"k_fp4": True}, "k_fp4 is True and the kernel only has False"),
        ("keys", {"round_k_rope": "none"}, "round_k_rope is 'none' and the kernel only has 'bf16'"),
        ("logits", {"round_gate": "bf16"}, "round_gate is 'bf16' and the kernel only has 'none'"),
        ("topk", {"ties": "higher"}, "ties is 'higher' and the kernel only has 'lower'"),
        ("topk", {"k": 4096}, "k is 4096, the kernel selects at most 2048"),
        ("queries", {}, "vLLM has no public kernel for this step"),
    ],
)
def test_refuses_other_recipes(step, changes, reason, config):
    recipe = Recipe.preset("vllm-fp8", config).replace(**changes)
    assert VllmKernels().refusal(step, recipe, config) == reason


def test_refuses_other_shapes(config):
    recipe = Recipe.preset("vllm-fp8", config)
    small = dataclasses.replace(config, index_head_dim=64)
    assert VllmKernels().refusal("keys", recipe, small) == "head dim 64, the kernel needs 128"
    few = dataclasses.replace(config, index_n_heads=4)
    assert VllmKernels().refusal("logits", recipe, few) == "4 heads of 128, the kernel needs 32 or 64 heads of 128"
