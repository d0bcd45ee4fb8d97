"""The kernels against the emulation of the recipes that they run, code by code.

Small shapes run everywhere (interpreted without a GPU); the Flash shapes need a CUDA device. Each case prints one line
with what was measured, also when it passes: run with `-s` to see them.
"""

import dataclasses

import pytest
import torch

from diffcheck import kernels
from diffcheck.backends import Chain, TritonKernels
from diffcheck.checkpoint.layer import Checkpoint
from diffcheck.fixture import write_checkpoint
from diffcheck.formats import E2M1_REFERENCE, quantise
from diffcheck.inputs.hidden import synthetic_hidden
from diffcheck.kernels.layout import E2M1_BLOCK
from diffcheck.pipeline import Pipeline
from diffcheck.recipe import Recipe
from diffcheck.refimpl.formats import E2M1_VALUES

# What may differ between a kernel and its emulation: only the order of fp32 sums.
SAME_CODES = {"e4m3": 0.9999, "e2m1": 0.9999, "bf16": 0.999}
SCALE_RELATIVE = 1e-6
GATE_RELATIVE = 1e-6
CALC_DIFF = 5e-6
RERUNS = 20
# bf16 has no scale, so a value that cancels to near zero in the Hadamard sum has units far below what fp32 resolves
# in that sum: such values may differ by eight fp32 roundings of their row's length instead of by one unit
ROW_ROUNDING = 8 * 2.0**-24

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRESETS = ("sglang-fp8", "sglang-fp4", "sglang-bf16", "vllm-fp8", "vllm-mxfp4", "qat-bf16")
SMALL = pytest.param(("mini", 601, 3), id="small")
FLASH = pytest.param(
    ("v4-flash", 32768, 256),
    id="flash",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device: Flash shapes, 32768 tokens"),
    ],
)


def recipe_of(name, config):
    if name == "qat-bf16":  # the reference's own keys and queries; only its bf16 scores have no kernel
        unrounded = dict.fromkeys(("round_gate", "round_dot", "round_product", "round_score"), "none")
        return Recipe.reference(config).replace(name=name, **unrounded)
    return Recipe.preset(name, config)


@pytest.fixture(scope="module", params=[SMALL, FLASH])
def layer(request, tmp_path_factory):
    like, tokens, rows = request.param
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, like=like, layers=[2], seed=3)
    checkpoint = Checkpoint(directory)
    config = checkpoint.config
    if like == "mini":
        config = dataclasses.replace(config, index_topk=64)
    x, qr = synthetic_hidden(config, length=tokens, seed=5)
    queries = torch.linspace(config.index_topk * 4 + 8, tokens - 1, rows).long()
    weights = checkpoint.load(2).to(DEVICE)
    return Pipeline(config, weights, x.to(DEVICE), qr.to(DEVICE), queries=queries.to(DEVICE))


def value_order(codes):
    """Signed integers in value order, so that neighbours on the format's grid differ by one; both zeros are 0."""
    if codes.dtype == torch.bfloat16:
        bits = codes.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)
    if codes.dtype == torch.float8_e4m3fn:
        bits = codes.view(torch.uint8).int()
        return torch.where(bits > 127, -(bits & 127), bits)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
    return torch.where(nibbles > 7, -(nibbles & 7), nibbles)


def fp4_grid(values, x):
    """Order numbers on the FP4 step's grid of bf16 values that went through it; x is what went into the step."""
    step = quantise(x, E2M1_REFERENCE)[1].repeat_interleave(E2M1_BLOCK, dim=-1)
    table = torch.tensor(E2M1_VALUES, device=x.device)
    return torch.bucketize((values.float() / step).abs(), table) * values.sign().int()


def emulated_codes(x, fmt):
    """(order numbers of the codes, scales fp32) of the emulation; x is what goes into the format."""
    if fmt.plain:
        return value_order(x.bfloat16()), None
    grid, scales = quantise(x, fmt)
    if fmt.element == "e4m3":
        return value_order(grid.to(torch.float8_e4m3fn)), scales
    table = torch.tensor(E2M1_VALUES, device=x.device)
    return torch.searchsorted(table, grid.abs().contiguous()) * grid.sign().long(), scales


def check_codes(layer, recipe, stage, codes, scales, capsys):
    """Codes, neighbours and scales of a kernel against the emulated stage; prints the measured line."""
    name, what = recipe.name, {"k_quant": "keys", "q_quant": "queries"}[stage]
    fmt = getattr(recipe, stage[:2] + "format")
    x = layer.stage(recipe.replace(k_format=None, q_format=None), stage)
    ours, scale = emulated_codes(x, fmt)
    difference = (value_order(codes) - ours).abs()
    edge, near_zero = 0, 0
    if scale is None:
        worst = 0.0
        if recipe.k_fp4:
            before = layer.stage(recipe.replace(fp4=False, k_format=None, q_format=None), stage)
            difference = (fp4_grid(codes, before) - fp4_grid(x, before)).abs()
        rounded = x.bfloat16().float()
        unresolved = (codes.float() - rounded).abs() <= ROW_ROUNDING * rounded.norm(dim=-1, keepdim=True)
        near_zero = int((unresolved & (difference > 1)).sum())
        difference = torch.where(unresolved, difference.clamp(max=1), difference)
    elif fmt.element == "e2m1":
        bytes_ = torch.frexp(scale)[1] + 126  # 2^n has exponent byte n + 127
        differs = bytes_ != scales.int()
        edge = int(differs.any(-1).sum())
        # a block whose amax lies on a binade edge may take the neighbouring scale; its codes then differ throughout
        keep = ~differs.repeat_interleave(E2M1_BLOCK, dim=-1)
        difference = difference[keep]
        worst = float((bytes_ - scales.int()).abs().max())
        assert worst <= 1, f"{name} {what}: a ue8m0 scale is off by {worst} binades"
    else:
        scales, scale = scales.reshape(-1), scale.reshape(-1)
        worst = float(((scales - scale).abs() / scale).max())
        assert worst <= SCALE_RELATIVE, f"{name} {what}: scale differs by {worst}"
    same = float((difference == 0).double().mean())
    with capsys.disabled():
        print(
            f"{name:12s} {what:7s} {tuple(codes.shape)!s:16s} codes equal {same:.6%}, largest difference "
            f"{int(difference.max())} ({near_zero} more near zero), scales {worst:.1e}, rows at a binade edge {edge}"
        )
    assert same >= SAME_CODES[fmt.element], f"{name} {what}: only {same:.4%} of the codes are equal"
    assert int(difference.max()) <= 1, f"{name} {what}: a code is not a neighbour of the emulation's"
    assert edge <= max(1, len(codes) // 1000), f"{name} {what}: {edge} rows have another ue8m0 scale"


@pytest.mark.parametrize("name", PRESETS)
def test_keys(layer, name, capsys):
    recipe = recipe_of(name, layer.call.config)
    cache = TritonKernels().store_keys(layer, recipe)
    codes, scales = kernels.read_entries(cache.pages, cache.fmt, cache.slots)
    check_codes(layer, recipe, "k_quant", codes, scales, capsys)


@pytest.mark.parametrize("name", PRESETS)
def test_queries_and_gates(layer, name, capsys):
    recipe = recipe_of(name, layer.call.config)
    query = TritonKernels().quantise_queries(layer, recipe)
    check_codes(layer, recipe, "q_quant", query.codes, query.scales, capsys)
    gate = layer.stage(recipe, "gate").float()
    if query.fmt == "e4m3":
        x = layer.stage(recipe.replace(q_format=None), "q_quant")
        gate = gate * quantise(x, recipe.q_format)[1].squeeze(-1)
    assert ((query.gate - gate).abs() <= GATE_RELATIVE * gate.abs()).all()


@pytest.mark.parametrize("name", PRESETS)
def test_scores_and_selection(layer, name, capsys):
    """Logits against dequantised pages; reruns bitwise equal; top-k exact on the kernel's own scores."""
    recipe, backend = recipe_of(name, layer.call.config), Chain.of("triton", TritonKernels())
    trace = backend.run(layer, recipe)
    visible = (layer.queries + 1) // 4
    keys, queries, gate = trace["k_quant"].double(), trace["q_quant"].double(), trace["gate_folded"].double()
    if "q_scale" in trace:
        gate = gate / trace["q_scale"].double()
    expected = torch.stack([(gate[r, :, None] * (queries[r] @ keys.T).relu()).sum(0) for r in range(len(visible))])
    shown = torch.arange(keys.shape[0], device=keys.device) < visible[:, None]
    a, b = trace["scores"].double()[shown], expected[shown]
    calc_diff = float(1 - 2 * (a @ b) / (a @ a + b @ b))
    with capsys.disabled():
        print(f"{name:12s} logits  {tuple(trace['scores'].shape)!s:16s} calc_diff {calc_diff:.2e}")
    assert calc_diff < CALC_DIFF
    assert (trace["scores"][~shown] == -torch.inf).all()
    for _ in range(RERUNS if layer.call.x.is_cuda else 2):
        again = backend.run(layer, recipe)
        assert torch.equal(again["scores"], trace["scores"])
        assert torch.equal(again["topk"], trace["topk"])
        assert torch.equal(again["pages"], trace["pages"])
    exact = trace["scores"].sort(dim=1, descending=True, stable=True).indices[:, : recipe.k]
    assert torch.equal(trace["topk"].sort(dim=1).values, exact.sort(dim=1).values)
