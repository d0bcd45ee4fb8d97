"""SGLang's real kernels through the adapter: against the emulation, and the selections against their invariants.

Each case prints one line with what was measured, also when it passes: run with `-s` to see them. The first call of a
kernel compiles it, which takes up to a minute.
"""

import pytest
import torch

from diffcheck import Recipe, kernels
from diffcheck.backends import sglang
from diffcheck.backends.emulated import encode
from diffcheck.backends.sglang import SglangKernels
from diffcheck.checkpoint.layer import Checkpoint
from diffcheck.fixture import write_checkpoint
from diffcheck.inputs.hidden import synthetic_hidden
from diffcheck.invariants import check_selection
from diffcheck.pipeline import Pipeline

MISSING = SglangKernels().unavailable("cuda") if torch.cuda.is_available() else "needs a CUDA device"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

PRESETS = ("sglang-fp8", "sglang-fp4")
TOKENS = 8192
SAME_CODES = 0.9999
# the pool is compiled with approximate exp and division, queries are not
SCALE_RELATIVE = {"keys": 3e-6, "queries": 1e-6}
GATE_RELATIVE = 1e-5
EDGES = 1e-3
"""Share of e2m1 blocks whose amax lies so near a binade edge that they may have the neighbouring scale."""


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, like="v4-flash", layers=[2], seed=3)
    checkpoint = Checkpoint(directory)
    config = checkpoint.config
    x, qr = synthetic_hidden(config, length=TOKENS, seed=5)
    queries = torch.linspace(3, TOKENS - 1, 64).long()
    return Pipeline(config, checkpoint.load(2).to("cuda"), x.cuda(), qr.cuda(), queries=queries.cuda())


def value_order(codes):
    """Signed integers in value order, so that neighbours on the grid differ by one; both zeros are 0."""
    if codes.dtype == torch.float8_e4m3fn:
        bits = codes.view(torch.uint8).int()
        return torch.where(bits > 127, -(bits & 127), bits)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
    return torch.where(nibbles > 7, -(nibbles & 7), nibbles)


def check_codes(what, name, codes, scales, unquantised, fmt, capsys):
    """Codes and scales of a kernel against the emulation of what it quantises."""
    ours, our_scales = encode(unquantised, fmt)
    assert codes.dtype == ours.dtype
    assert codes.shape == ours.shape
    difference = (value_order(codes) - value_order(ours)).abs()
    edges = 0.0
    if fmt.element == "e2m1":
        off = (scales.int() - our_scales.int()).abs()
        worst, edges = float(off.max()), float((off > 0).double().mean())
        # codes of a block with another scale differ throughout
        difference = difference[(off == 0).repeat_interleave(32, dim=-1)]
    else:
        worst = float(((scales - our_scales).abs() / our_scales).max())
    same = float((difference == 0).double().mean())
    with capsys.disabled():
        print(
            f"\n{name:11s} {what:7s} {tuple(codes.shape)!s:15s} codes equal {same:.6%}, largest difference "
            f"{int(difference.max())}, scales {worst:.1e}, blocks at a binade edge {edges:.1e}"
        )
    assert same >= SAME_CODES
    assert int(difference.max()) <= 1
    assert edges <= EDGES
    assert worst <= (1 if fmt.element == "e2m1" else SCALE_RELATIVE[what])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("part", [sglang.PART, 700])
def test_keys(layer, name, part, monkeypatch, capsys):
    monkeypatch.setattr(sglang, "PART", part)
    recipe = Recipe.preset(name, layer.call.config)
    assert SglangKernels().refusal("keys", recipe, layer.call.config) is None
    cache = SglangKernels().store_keys(layer, recipe)
    codes, scales = kernels.read_entries(cache.pages, cache.fmt, cache.slots)
    unquantised = layer.stage(recipe.replace(k_format=None), "k_quant")
    check_codes("keys", name, codes, scales, unquantised, recipe.k_format, capsys)


@pytest.mark.parametrize("name", PRESETS)
def test_queries_and_gates(layer, name, capsys):
    recipe = Recipe.preset(name, layer.call.config)
    assert SglangKernels().refusal("queries", recipe, layer.call.config) is None
    query = SglangKernels().quantise_queries(layer, recipe)
    unquantised = layer.stage(recipe.replace(q_format=None), "q_quant")
    check_codes("queries", name, query.codes, query.scales, unquantised, recipe.q_format, capsys)
    gate = layer.stage(recipe, "gate").float()
    if query.fmt == "e4m3":
        gate = gate * encode(unquantised, recipe.q_format)[1]
    worst = float(((query.gate - gate).abs() / gate.abs().clamp_min(1e-30)).max())
    with capsys.disabled():
        print(f"{name:11s} gates   {tuple(gate.shape)!s:15s} largest relative difference {worst:.1e}")
    assert worst <= GATE_RELATIVE


@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("width", [512, 1000, 2048, 4099, 8192, 12000])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_topk_of_random_scores(version, k, width, rows):
    """Right at every width up to 12000, also where rows see only some of it or nothing, and with one row."""
    generator = torch.Generator().manual_seed(width + rows)
    scores = torch.randn(rows, width, generator=generator).cuda()
    visible = torch.randint(0, width + 1, (rows,), generator=generator)
    visible[:2] = torch.tensor([width, 0])[:rows]
    visible = visible.to("cuda", torch.int32)
    chosen = SglangKernels(version).topk(scores, visible, k)
    assert chosen.shape == (rows, min(k, width))
    check = check_selection(chosen, scores, visible, k)
    assert check.causes == [], check


def narrow_scores(width):
    """Scores of nearly the same size, as a real layer's can be: many share the leading bits of the k-th."""
    generator = torch.Generator().manual_seed(7)
    return (100 + 0.5 * torch.randn(4, width, generator=generator)).cuda()


@pytest.mark.parametrize(
    ("version", "width", "causes"),
    [("v2", 12000, []), ("v2", 262144, ["topk_drop"]), ("v1", 12000, []), ("v1", 262144, [])],
)
def test_a_crowded_threshold(version, width, causes, capsys):
    """SGLang 0.5.23's v2 drops winners on wide rows when more than 2048 scores share the k-th one's coarse bin."""
    scores = narrow_scores(width)
    visible = torch.full((4,), width, dtype=torch.int32, device="cuda")
    chosen = SglangKernels(version).topk(scores, visible, 512)
    check = check_selection(chosen, scores, visible, 512)
    with capsys.disabled():
        print(f"\ntop-k {version} width {width}: causes {check.causes}, {check.wrong_values} of {4 * 512} values wrong")
    assert check.causes == causes
