"""The SGLang adapter against a fake SGLang that checks what it is given and computes in torch.

The fake asserts the contract of the real kernels' arguments (dtypes, shapes, strides) and follows the plan it gets, so
that a wrong plan, table or slot shows as wrong codes. The real kernels are in tests/gpu.
"""

import dataclasses
import importlib.metadata
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from diffcheck import Format, Recipe, kernels, packages
from diffcheck.backends import Chain, EmulatedKernels, sglang
from diffcheck.backends.emulated import encode
from diffcheck.backends.sglang import SglangKernels
from diffcheck.pipeline import Pipeline
from diffcheck.refimpl.compressor import rms_norm, softmax_pool
from diffcheck.refimpl.rotation import apply_rope, hadamard
from diffcheck.stages import GRAPH

PRESETS = ("sglang-fp8", "sglang-fp4")
TOKENS = 83


class Plan(NamedTuple):
    compress_ratio: int
    plan_c: torch.Tensor
    plan_w: torch.Tensor

    def words(self):
        """(token count, row, slots from the state) of each entry."""
        is_tensor(self.plan_c, torch.uint8, None, 16)
        is_tensor(self.plan_w, torch.uint8, 0, 8)
        words = self.plan_c.view(torch.int32)
        assert (words[:, 0] % 4 == 0).all()
        return words[:, 0].long(), words[:, 1].long() & 0xFFFF, words[:, 1].long() >> 16


def is_tensor(x, dtype, *shape):
    assert x.dtype == dtype
    assert len(x.shape) == len(shape)
    assert all(want in (None, size) for size, want in zip(x.shape, shape, strict=True)), (x.shape, shape)
    assert x.is_contiguous()


def rotated(x, table, position):
    is_tensor(table, torch.complex64, None, 32)
    assert int(position.max()) < len(table)
    return apply_rope(x, table.real[position], table.imag[position])


class FakeSglang(ModuleType):
    """The symbols of the real module that the adapter calls."""

    CompressorPrefillPlan = Plan

    def __init__(self, recipes):
        super().__init__(sglang.MODULE)
        self.recipes = recipes
        self.calls = []

    def compress_forward(self, state, rows, ape, plan, *, head_dim, compress_ratio):
        assert (head_dim, compress_ratio, plan.compress_ratio) == (128, 4, 4)
        is_tensor(state, torch.float32, None, 4, 512)
        is_tensor(rows, torch.float32, None, 512)
        is_tensor(ape, torch.float32, 8, 128)
        assert len(rows) <= 65536
        seen, last, from_state = plan.words()
        assert not from_state.any()
        self.calls.append(("compress_forward", len(seen)))
        kv, gate = torch.zeros(len(seen), 8, 128), torch.full((len(seen), 8, 128), -torch.inf)
        for slot in range(8):
            overlap = slot < 4
            there = seen > 4 if overlap else seen > 0
            row = last[there] - 7 + slot
            assert (row >= 0).all()
            column = 0 if overlap else 128
            kv[there, slot] = rows[row, column : column + 128]
            gate[there, slot] = rows[row, column + 256 : column + 384] + ape[slot]
        return softmax_pool(kv, gate)

    def compress_norm_rope_store(
        self, kv, plan, *, norm_weight, norm_eps, freq_cis, out_loc, kvcache, page_size, use_fp4
    ):
        fmt = "e2m1" if use_fp4 else "e4m3"
        is_tensor(kv, torch.float32, None, 128)
        is_tensor(norm_weight, torch.float32, 128)
        is_tensor(out_loc, torch.int64, None)
        is_tensor(kvcache, torch.uint8, None, 64 * (68 if use_fp4 else 132))
        assert page_size == 64
        assert isinstance(norm_eps, float)
        seen, last, _ = plan.words()
        assert len(seen) == len(kv) <= len(out_loc)
        x = hadamard(rotated(rms_norm(kv, norm_weight, norm_eps), freq_cis, seen - 4))
        codes, scales = encode(x, self.recipes[use_fp4].k_format)
        kernels.write_entries(kvcache, fmt, out_loc[last], codes, scales)

    def _query(self, q, weight, weight_scale, freqs_cis, positions, fp4):
        is_tensor(q, torch.bfloat16, None, None, 128)
        is_tensor(weight, torch.bfloat16, *q.shape[:2])
        is_tensor(positions, torch.int64, len(q))
        assert isinstance(weight_scale, float)
        x = rotated(q, freqs_cis, positions)
        if fp4:
            x = hadamard(x.bfloat16()).bfloat16()
        codes, scales = encode(x if fp4 else hadamard(x), self.recipes[fp4].q_format)
        return codes, scales, weight.float() * torch.tensor(weight_scale)

    def fused_q_indexer_rope_hadamard_quant(self, *args):
        codes, scales, gate = self._query(*args, fp4=False)
        return codes, (gate * scales).unsqueeze(-1)

    def fused_q_indexer_rope_hadamard_fp4_quant(self, *args):
        codes, scales, gate = self._query(*args, fp4=True)
        return (codes.view(torch.int8), scales.view(torch.int32).squeeze(-1)), gate.unsqueeze(-1)

    def _select(self, scores, seq_lens, out):
        rows, width = scores.shape
        assert scores.dtype == torch.float32
        assert scores.stride(1) == 1
        is_tensor(seq_lens, torch.int32, rows)
        is_tensor(out, torch.int32, rows, None)
        assert (seq_lens >= 0).all()
        assert (seq_lens <= width).all()
        for row, length in enumerate(seq_lens.tolist()):
            best = scores[row, :length].topk(min(length, out.shape[1])).indices.flip(0)  # in no particular order
            out[row] = -1
            out[row, : len(best)] = best

    def plan_topk_v2(self, seq_lens):
        self.calls.append(("plan_topk_v2", len(seq_lens)))
        return torch.full((len(seq_lens) + 1, 2), len(seq_lens), dtype=torch.int32)

    def topk_transform_paged_v2(self, scores, seq_lens, page_tables, out, page_size, metadata):
        assert page_tables is None
        assert page_size == 64
        assert scores.stride(0) % 4 == 0
        assert scores.data_ptr() % 16 == 0
        is_tensor(metadata, torch.int32, len(seq_lens) + 1, 2)
        assert out.shape[1] in (512, 1024)
        self._select(scores, seq_lens, out)

    def topk_transform_paged(self, scores, seq_lens, page_tables, out, page_size, out_raw):
        assert page_size == 64
        assert out.shape[1] <= 1024
        is_tensor(page_tables, torch.int32, len(scores), -(-scores.shape[1] // 64))
        assert torch.equal(page_tables[0], torch.arange(page_tables.shape[1], dtype=torch.int32))
        is_tensor(out_raw, torch.int32, *out.shape)
        self._select(scores, seq_lens, out)
        out_raw.copy_(out)


@pytest.fixture
def config(support):
    return support.config(index_topk=512)


@pytest.fixture
def fake(config, monkeypatch):
    module = FakeSglang({name == "sglang-fp4": Recipe.preset(name, config) for name in PRESETS})
    parent = ""
    for part in sglang.MODULE.split(".")[:-1]:
        parent = f"{parent}.{part}".lstrip(".")
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, sglang.MODULE, module)
    monkeypatch.setitem(sys.modules, "tvm_ffi", ModuleType("tvm_ffi"))
    monkeypatch.setattr(sglang.shutil, "which", lambda name: f"/bin/{name}")
    return module


@pytest.fixture
def layer(support, config):
    x, qr = support.inputs(config, TOKENS)
    return Pipeline(config, support.weights(config), x, qr, queries=torch.tensor([2, 7, 40, 82]))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("part", [8192, 7, 1])
def test_keys_and_queries_are_the_emulated_ones(fake, layer, name, part, monkeypatch):
    """Whole, and in parts that split the entries."""
    monkeypatch.setattr(sglang, "PART", part)
    recipe = Recipe.preset(name, layer.call.config)
    assert SglangKernels().refusal("keys", recipe, layer.call.config) is None
    assert SglangKernels().refusal("queries", recipe, layer.call.config) is None
    before = layer.stage(recipe, "kv_gate").clone()
    cache, expected = SglangKernels().store_keys(layer, recipe), EmulatedKernels().store_keys(layer, recipe)
    assert cache.fmt == expected.fmt
    assert torch.equal(cache.slots, expected.slots)
    assert torch.equal(cache.block_table, expected.block_table)
    got = kernels.dequantise(*kernels.read_entries(cache.pages, cache.fmt, cache.slots), cache.fmt)
    torch.testing.assert_close(got, layer.stage(recipe, "k_quant"), rtol=1e-5, atol=0)
    assert [n for call, n in fake.calls if call == "compress_forward"] == [
        min(part, 20 - first) for first in range(0, 20, part)
    ]
    assert torch.equal(layer.stage(recipe, "kv_gate"), before)

    query, expected = SglangKernels().quantise_queries(layer, recipe), EmulatedKernels().quantise_queries(layer, recipe)
    assert query.fmt == expected.fmt
    assert torch.equal(query.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(query.scales, expected.scales)
    torch.testing.assert_close(query.gate, expected.gate, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_chain_runs_and_is_judged(fake, layer, name):
    recipe, chain = Recipe.preset(name, layer.call.config), Chain.of("sglang", SglangKernels())
    assert chain.unavailable("cuda") is None
    assert chain.refusal(recipe, layer.call.config) is None
    trace = chain.run(layer, recipe)
    chosen = trace["topk"].sort(dim=1, descending=True).values
    expected = layer.stage(recipe, "topk").sort(dim=1, descending=True).values
    assert torch.equal(chosen, expected)
    records = {record["step"]: record for record in chain.judge(layer, recipe, trace)}
    assert {step: record["backend"] for step, record in records.items()} == {
        "keys": "sglang", "queries": "sglang", "logits": "emulated", "topk": "sglang",
    }  # fmt: skip
    assert records["keys"]["isolated"]["equal"] == 1
    assert records["queries"]["isolated"]["equal"] == 1
    assert records["topk"]["isolated"]["causes"] == records["topk"]["cumulative"]["causes"] == []


def test_a_gate_of_zero_has_a_scale(fake, layer):
    recipe = Recipe.preset("sglang-fp8", layer.call.config)
    layer.call.weights.weights_proj[1] = 0
    query = SglangKernels().quantise_queries(layer, recipe)
    assert (query.gate[:, 1] == 0).all()
    got = kernels.dequantise(query.codes, query.scales, "e4m3")
    torch.testing.assert_close(got, layer.stage(recipe, "q_quant"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("change", [{"theta": 10000.0}, {"yarn": None}, {"mscale": 1.25}, {"eps": 1e-5},
                                    {"round_rope_table": "bf16"}])  # fmt: skip
@pytest.mark.parametrize("name", PRESETS)
def test_what_enters_as_data_is_followed(fake, layer, name, change):
    recipe = Recipe.preset(name, layer.call.config).replace(**change)
    kernels_ = SglangKernels()
    assert kernels_.refusal("keys", recipe, layer.call.config) is None
    assert kernels_.refusal("queries", recipe, layer.call.config) is None
    cache, query = kernels_.store_keys(layer, recipe), kernels_.quantise_queries(layer, recipe)
    keys = kernels.dequantise(*kernels.read_entries(cache.pages, cache.fmt, cache.slots), cache.fmt)
    torch.testing.assert_close(keys, layer.stage(recipe, "k_quant"), rtol=1e-5, atol=0)
    queries = kernels.dequantise(query.codes, query.scales, query.fmt)
    torch.testing.assert_close(queries, layer.stage(recipe, "q_quant"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_few_tokens(fake, support, config, tokens):
    x, qr = support.inputs(config, tokens)
    layer = Pipeline(config, support.weights(config), x, qr)
    recipe = Recipe.preset("sglang-fp8", config)
    trace = Chain.of("sglang", SglangKernels()).run(layer, recipe)
    assert trace["topk"].shape == (tokens, tokens // 4)
    torch.testing.assert_close(trace["k_quant"], layer.stage(recipe, "k_quant"), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("version", "k"), [("v1", 5), ("v1", 512), ("v2", 512), ("v2", 1024)])
@pytest.mark.parametrize("entries", [1, 64, 601, 1100, 1203])
@pytest.mark.parametrize("rows", [1, 3])
def test_topk(fake, version, k, entries, rows):
    scores = torch.randn(rows, entries, generator=torch.Generator().manual_seed(entries))
    visible = torch.tensor([entries, 0, (entries + 1) // 2][:rows], dtype=torch.int32)
    got = SglangKernels(version).topk(scores, visible, k)
    assert got.dtype == torch.int64
    assert got.shape == (rows, min(k, entries))
    for row, length in enumerate(visible.tolist()):
        want = scores[row, :length].topk(min(k, length)).indices
        assert sorted(got[row].tolist()) == sorted([*want.tolist(), *[-1] * (min(k, entries) - len(want))])


def test_topk_of_a_strided_view(fake):
    """Columns of a wider matrix, at an address that is not a multiple of 16."""
    wide = torch.randn(4, 1001)
    scores = wide[:, 1:1000]
    visible = torch.full((4,), 999, dtype=torch.int32)
    got = SglangKernels().topk(scores, visible, 512)
    assert torch.equal(got.sort(dim=1).values, scores.topk(512).indices.sort(dim=1).values)


def test_topk_of_no_rows(fake):
    assert SglangKernels().topk(torch.empty(0, 7), torch.empty(0, dtype=torch.int32), 512).shape == (0, 7)


def test_a_plan_row_fits_sixteen_bits():
    assert 4 * (sglang.PART + 1) <= 65536
    parts = list(sglang.plans(3 * sglang.PART + 5))
    assert [len(words) for _, _, words in parts] == [sglang.PART] * 3 + [5]
    for first, last, words in parts:
        assert (words[:, 1] < last - first).all()
        assert torch.equal(words[:, 0] - 1 - words[:, 1], torch.full_like(words[:, 0], first))


OTHERS = {
    "overlap_order": "own-first",
    "compute": "fp64", "q_pairing": "half", "k_pairing": "half", "q_slice": "first", "k_slice": "first",
    "k_position": "last", "q_hadamard": False, "k_hadamard": False, "q_fp4": True, "k_fp4": True, "ape": False,
    "overlap": False, "q_format": None, "k_format": None, "rope_dims": 32, "round_q": "none",
    "round_gate_gemm": "none",
}  # fmt: skip
"""A value that is not the presets'; roundings without one here are tried at fp16."""


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("step", ["keys", "queries"])
def test_everything_built_in_is_refused_when_it_differs(config, name, step):
    recipe = Recipe.preset(name, config)
    for field in sglang.BUILT_IN[step]:
        other = recipe.replace(**{field: OTHERS.get(field, "fp16")})
        reason = SglangKernels().refusal(step, other, config)
        assert reason, field
        assert field in reason or field == "rope_dims", reason


def test_the_fields_of_a_step_are_those_of_its_stages():
    """Every field that a fused stage reads is either built in or enters as data."""
    stages = {"keys": ("pool", "k_norm", "k_rope", "k_hadamard", "k_quant"),
              "queries": ("q_rope", "q_hadamard", "q_quant", "gate")}  # fmt: skip
    for step, names in stages.items():
        read = {field for name in names for field in GRAPH[name].fields}
        assert read <= set(sglang.BUILT_IN[step]) | sglang.FREE


@pytest.mark.parametrize(
    ("change", "step", "reason"),
    [
        ({"k_format": Format(element="bf16")}, "keys", "k_format is bf16 and SGLang's kernels only have e4m3/128/fp32"),
        ({"k_format": Format(element="e2m1", block=32, scale="ue8m0")}, "keys", "or e2m1/32/ue8m0:ties=down"),
        ({"q_format": Format(element="e4m3", scale="ue8m0")}, "queries", "q_format is e4m3/128/ue8m0 and"),
        ({"q_hadamard": False}, "queries", "q_hadamard is False and SGLang's kernel only has True"),
        ({"round_gate": "bf16"}, "queries", "round_gate is 'bf16' and SGLang's kernel only has 'none'"),
        ({"k": 2048}, "topk", "SGLang's top-k v2 supports k = 512 or 1024, this is k = 2048"),
        ({"k": 64}, "topk", "SGLang's top-k v2 supports k = 512 or 1024, this is k = 64"),
    ],
)
def test_refusals(config, change, step, reason):
    recipe = Recipe.preset("sglang-fp8", config)
    assert SglangKernels().refusal(step, recipe, config) is None
    assert reason in SglangKernels().refusal(step, recipe.replace(**change), config)


def test_version_one_has_other_limits(config):
    recipe = Recipe.preset("sglang-fp8", config)
    one = SglangKernels("v1")
    assert one.name == "sglang-topk-v1"
    assert one.refusal("topk", recipe.replace(k=64, ties="higher"), config) is None
    assert one.refusal("topk", recipe.replace(k=1025), config) == (
        "SGLang's top-k v1 supports k up to 1024, this is k = 1025"
    )


def test_heads_of_another_size_are_refused(config):
    other = dataclasses.replace(config, index_head_dim=256)
    reason = SglangKernels().refusal("keys", Recipe.preset("sglang-fp8", other), other)
    assert "heads of 128 with 64 RoPE dims, not 256 with 64" in reason


def test_presets_of_other_engines_are_refused(config):
    for name in ("reference", "vllm-fp8", "vllm-mxfp4", "trtllm-fp8", "trtllm-fp4", "llama.cpp"):
        assert Chain.of("sglang", SglangKernels()).refusal(Recipe.preset(name, config), config), name


def test_unavailable_without_the_package(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert SglangKernels().unavailable("cpu") == "package sglang is missing: pip install sglang"
    assert SglangKernels().unavailable("cuda") == "package sglang is missing: pip install sglang"


def test_unavailable_when_the_import_fails(fake, monkeypatch):
    def fail(name):
        raise ImportError("libcuda.so.1: cannot open\nshared object file")

    monkeypatch.setattr(sglang, "import_module", fail)
    assert SglangKernels().unavailable("cuda") == (
        "sglang cannot be imported: ImportError: libcuda.so.1: cannot open shared object file"
    )


def test_unavailable_without_a_symbol(fake, monkeypatch):
    monkeypatch.setattr(sglang, "SYMBOLS", (*sglang.SYMBOLS, "topk_v3"))
    reason = SglangKernels().unavailable("cuda")
    assert "has no topk_v3 in sglang.kernels.ops.attention.dsv4: pip install sglang==" in reason


def test_unavailable_without_a_compiler(fake, monkeypatch):
    monkeypatch.setattr(sglang.shutil, "which", lambda name: None)
    monkeypatch.setattr(sglang.os, "access", lambda path, mode: False)
    assert "nvcc is missing" in SglangKernels().unavailable("cuda")
    monkeypatch.delitem(sys.modules, "tvm_ffi")
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert "pip install apache-tvm-ffi" in SglangKernels().unavailable("cuda")


def test_versions(fake, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", lambda name: "0.5.23")
    assert SglangKernels().version() == "0.5.23"
    monkeypatch.setattr(packages, "version", absent)
    assert SglangKernels().version() == "unknown (importable without metadata)"
    monkeypatch.delitem(sys.modules, "sglang")
    monkeypatch.setattr(packages, "find_spec", lambda name: SimpleNamespace())
    assert SglangKernels().version() == "unknown (importable without metadata)"
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert SglangKernels().version() is None


def test_nothing_is_imported_before_it_is_used():
    code = "import sys, diffcheck.backends.sglang as s; s.SglangKernels().version(); sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
