"""Recipes and presets.

| what | tolerance |
|--|--|
| every preset's choices and bytes an entry, against the table in this file | equal |
| a preset runs, and what it changes shows | - |
| Hadamard on both sides or on neither, without rounding | IDEAL_TOLERANCE of the largest score of a row |
"""

import json

import pytest
import torch

from diffcheck import Format, Recipe
from diffcheck.pipeline import Pipeline
from diffcheck.presets import CHANGES, DESCRIPTIONS, PRECISIONS, build
from diffcheck.recipe import TWO_SIDED, plain
from diffcheck.refimpl import V4_FLASH, V4_PRO, InputError, Yarn

IDEAL_TOLERANCE = 1e-5
FLOOR = 1e-4
E2M1_FLOOR = 6 * 2.0**-126

# Hadamard on q and k, FP4 step on q and k, formats of q and k (element, block, scale, ties, floor), bytes an
# entry, what q is rounded to after projection, RoPE and Hadamard, what k is rounded to after GEMM, sum,
# pool, norm, RoPE and Hadamard, what the gate and the scores are rounded to
BF = ("bf16", None, None, None, None)
FP32_K, REFERENCE_K = ("none",) * 6, ("none", "none", "bf16", "bf16", "bf16", "bf16")
SGLANG_E4M3 = ("e4m3", 128, "fp32", "even", FLOOR)
SGLANG_E2M1 = ("e2m1", 32, "ue8m0", "down", FLOOR)
MXFP4 = ("e2m1", 32, "ue8m0", "even", E2M1_FLOOR)
E4M3_P = ("e4m3", 128, "ue8m0", "even", FLOOR)
TRTLLM_K = ("bf16", "bf16", "bf16", "bf16", "bf16", "bf16")
TABLE = {
    "reference": (True, True, BF, BF, 256, ("bf16", "bf16", "bf16"), REFERENCE_K, ("bf16", "bf16")),
    "bf16": (True, False, BF, BF, 256, ("bf16", "bf16", "bf16"), REFERENCE_K, ("bf16", "bf16")),
    "sglang-fp8": (
        True,
        False,
        SGLANG_E4M3,
        SGLANG_E4M3,
        132,
        ("bf16", "none", "none"),
        FP32_K,
        ("none", "none"),
    ),
    "sglang-fp4": (
        True,
        False,
        SGLANG_E2M1,
        SGLANG_E2M1,
        68,
        ("bf16", "bf16", "bf16"),
        FP32_K,
        ("none", "none"),
    ),
    "sglang-bf16": (True, False, SGLANG_E4M3, BF, 256, ("bf16", "none", "none"), FP32_K, ("none", "none")),
    # without Hadamard its rounding never acts, whatever the field says: None here
    "vllm-fp8": (
        *(False, False, E4M3_P, E4M3_P, 132, ("bf16", "bf16", None)),
        *(("none", "none", "none", "none", "bf16", None), ("none", "none")),
    ),
    "vllm-mxfp4": (
        *(False, False, MXFP4, MXFP4, 68, ("bf16", "bf16", None)),
        *(("none", "none", "none", "none", "bf16", None), ("none", "none")),
    ),
    "trtllm-fp8": (
        *(True, False, E4M3_P, ("e4m3", 128, "fp32", "even", 0.0), 132, ("bf16", "bf16", "bf16")),
        *(TRTLLM_K, ("none", "none")),
    ),
    "trtllm-fp4": (
        *(True, False, ("e2m1", 32, "ue8m0", "down", 1e-12), MXFP4, 68, ("bf16", "bf16", "bf16")),
        *(TRTLLM_K, ("none", "none")),
    ),
    "transformers": (
        *(False, False, BF, BF, 256, ("bf16", "bf16", None)),
        *(("bf16", "bf16", "bf16", "bf16", "bf16", None), ("none", "none")),
    ),
    "llama.cpp": (
        *(True, False, None, ("fp16", None, None, None, None), 256, ("none", "none", "none"), FP32_K),
        ("none", "none"),
    ),
}
ALL = [*dict.fromkeys([*PRECISIONS, *CHANGES])]


def choices(fmt):
    if fmt is None:
        return None
    if fmt.plain:
        return (fmt.element, None, None, None, None)
    assert fmt.rule == "ceil"
    return (fmt.element, fmt.block, fmt.scale, fmt.ties, fmt.amax_floor)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_its_row_of_the_table(name):
    hadamard, fp4, q_format, k_format, size, q_rounds, k_rounds, (gate, score) = TABLE[name]
    r = Recipe.preset(name, V4_FLASH)
    assert (r.q_hadamard, r.k_hadamard) == (hadamard, hadamard)
    assert (r.q_fp4, r.k_fp4) == (fp4, fp4)
    assert (choices(r.q_format), choices(r.k_format)) == (q_format, k_format)
    assert r.k_format.bytes_per_entry(128) == size
    acting = r.round_q_hadamard if hadamard else None
    assert (r.round_q, r.round_q_rope, acting) == q_rounds
    acting = r.round_k_hadamard if hadamard else None
    k_side = (r.round_pool_gemm, r.round_pool_sum, r.round_pool, r.round_k_norm, r.round_k_rope, acting)
    assert k_side == k_rounds
    assert (r.round_gate, r.round_dot, r.round_product, r.round_score) == (gate, score, score, score)
    assert r.name == name


def test_the_table_is_complete():
    assert set(TABLE) == {"reference", "bf16", *CHANGES}
    assert set(DESCRIPTIONS) == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_no_preset_touches_what_the_checkpoint_decides(name):
    changed = set(CHANGES[name])
    assert not changed & {
        "theta",
        "yarn",
        "rope_dims",
        "eps",
        "k",
        "mask_shift",
        "pairing",
        "slice",
        "k_position",
    }
    assert not changed & {"ape", "overlap", "relu", "compute"}


def test_only_transformers_rounds_the_rope_table():
    rounding = {n for n in ALL if Recipe.preset(n, V4_FLASH).round_rope_table != "none"}
    assert rounding == {"transformers"}


def test_only_sglangs_fp8_multiplies_by_the_reciprocal():
    found = set()
    for name in ALL:
        r = Recipe.preset(name, V4_FLASH)
        found |= {(name, side) for side, f in (("q", r.q_format), ("k", r.k_format)) if f is not None and f.reciprocal}
    assert {n for n, side in found if side == "k"} == {"sglang-fp8", "fp8"}
    assert {n for n, side in found if side == "q"} == {"sglang-fp8", "fp8", "sglang-bf16"}


def test_short_names():
    for short, name in (("fp8", "sglang-fp8"), ("fp4", "sglang-fp4")):
        assert Recipe.preset(short, V4_FLASH).differences(Recipe.preset(name, V4_FLASH)) == {}
        assert Recipe.preset(short, V4_FLASH).name == short
    assert build("ideal", V4_FLASH) == Recipe.ideal(V4_FLASH)
    assert build("reference", V4_FLASH) == Recipe.reference(V4_FLASH)
    assert build("bf16", V4_FLASH).differences(Recipe.reference(V4_FLASH)) == {"q_fp4": False, "k_fp4": False}
    with pytest.raises(InputError, match=r"unknown precision or preset 'fp6'.*vllm-fp8"):
        Recipe.preset("fp6", V4_FLASH)


def test_the_reference_takes_the_checkpoints_values():
    r = Recipe.reference(V4_PRO)
    assert (r.k, r.eps, r.rope_dims) == (1024, 1e-6, 64)
    assert r.q_theta == r.k_theta == 160000.0
    assert r.q_yarn == r.k_yarn == V4_PRO.yarn
    assert Recipe.reference(V4_FLASH).k == 512


def test_the_ideal_rounds_nothing():
    r = Recipe.ideal(V4_FLASH)
    assert {getattr(r, n) for n in r.field_names() if n.startswith("round_")} == {"none"}
    assert (r.q_format, r.k_format, r.q_fp4, r.k_fp4, r.activation_quant) == (None, None, False, False, False)
    unlike = set(r.differences(Recipe.reference(V4_FLASH)))
    kept = {
        "q_hadamard",
        "k_hadamard",
        "ape",
        "overlap",
        "relu",
        "k",
        "eps",
        "q_theta",
        "k_theta",
        "k_position",
    }
    assert not unlike & kept


def test_replacing_a_bare_name_sets_both_sides():
    r = Recipe.reference(V4_FLASH)
    both = r.replace(theta=10000.0, yarn=None, hadamard=False, k=7)
    assert both.differences(r) == {
        "q_theta": 10000.0,
        "k_theta": 10000.0,
        "q_yarn": None,
        "k_yarn": None,
        "q_hadamard": False,
        "k_hadamard": False,
        "k": 7,
    }
    assert r.q_hadamard, "the original is untouched"
    one = r.replace(k_hadamard=False)
    assert one.differences(r) == {"k_hadamard": False}
    assert r.differences(one) == {"k_hadamard": True}
    rotation = {"theta", "yarn", "mscale", "pairing", "slice", "position_offset", "hadamard"}
    assert rotation | {"fp4", "fp4_format", "format"} == TWO_SIDED
    with pytest.raises(InputError, match=r"unknown field 'thetas', expected one of .*'theta'"):
        r.replace(thetas=1)


def test_the_name_is_no_difference():
    r = Recipe.reference(V4_FLASH)
    assert r.replace(name="other").differences(r) == {}


def test_json():
    r = Recipe.preset("sglang-fp4", V4_FLASH)
    back = json.loads(json.dumps(r.to_json()))
    assert set(back) == set(r.field_names())
    assert back["q_yarn"]["factor"] == 16
    assert back["k_format"].startswith("e2m1/32/ue8m0")
    assert back["k_theta"] == 160000.0
    assert plain(None) is None
    assert plain(Yarn(factor=2.0, beta_fast=3.0, beta_slow=1.0, original_max_position_embeddings=9)) == {
        "factor": 2.0,
        "beta_fast": 3.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 9,
    }
    assert plain(Format(element="bf16")) == "bf16"


@pytest.fixture(scope="module")
def pipeline(support):
    cfg = support.config(index_topk=6, index_n_heads=8)
    return Pipeline(cfg, support.weights(cfg), *support.inputs(cfg, 70))


def scores(pipeline, recipe):
    return pipeline.stage(recipe, "scores").double()


def relative(a, b):
    """Largest difference of visible scores, each row relative to its largest score."""
    seen = b.isfinite()
    assert torch.equal(seen, a.isfinite())
    largest = b.masked_fill(~seen, 0).abs().amax(dim=1, keepdim=True)
    return float(((a - b).masked_fill(~seen, 0).abs() / largest).nan_to_num(0).max())


@pytest.mark.parametrize("name", ALL)
def test_every_preset_runs_and_shows(pipeline, name):
    reference = Recipe.reference(pipeline.call.config)
    recipe = Recipe.preset(name, pipeline.call.config)
    got = pipeline.trace(recipe)
    visible = (got.queries + 1) // 4
    assert torch.equal(got["scores"].isfinite().sum(1), visible)
    assert ((got["topk"] >= 0).sum(1) == visible.clamp(max=6)).all()
    want, seen = scores(pipeline, reference), got["scores"].isfinite()
    error = float((got["scores"].double() - want)[seen].norm() / want[seen].norm())
    print(f"{name}: relative L2 of the scores {error:.3f}")
    assert (error == 0) == (name == "reference")
    assert error < 0.4, "a precision is not a fault"


def test_hadamard_on_both_sides_or_on_neither(pipeline):
    ideal = Recipe.ideal(pipeline.call.config)
    both, neither = scores(pipeline, ideal), scores(pipeline, ideal.replace(hadamard=False))
    assert relative(neither, both) < IDEAL_TOLERANCE
    one_side = scores(pipeline, ideal.replace(k_hadamard=False))
    assert relative(one_side, both) > 0.5


def test_ideal_in_fp32_and_fp64(pipeline):
    ideal = Recipe.ideal(pipeline.call.config)
    exact = ideal.replace(compute="fp64")
    assert pipeline.stage(exact, "scores").dtype == torch.float64
    error = relative(scores(pipeline, ideal), scores(pipeline, exact))
    assert 0 < error < IDEAL_TOLERANCE
    assert torch.equal(pipeline.stage(ideal, "topk"), pipeline.stage(exact, "topk"))
