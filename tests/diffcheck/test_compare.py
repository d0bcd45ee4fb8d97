"""Comparison of one case: first stage, verdict, and that each known change is placed where it acts."""

import pytest
import torch

from diffcheck.backends import EmulatedBackend
from diffcheck.checkpoint.layer import Checkpoint
from diffcheck.compare import Targets, compare, first_stage, stage_differs, verdict
from diffcheck.formats import Format
from diffcheck.inputs.source import Needle
from diffcheck.pipeline import Pipeline
from diffcheck.presets import CHANGES as CHANGES_BY_PRESET
from diffcheck.recipe import Recipe
from diffcheck.refimpl import Trace

ROWS = 48


@pytest.fixture(scope="module")
def layer(mini):
    checkpoint = Checkpoint(mini)
    trace = Trace.load(mini / "trace.safetensors", 2)
    queries = torch.linspace(1000, 4095, ROWS).long()
    return Pipeline(checkpoint.config, checkpoint.load(2), trace["x"], trace["qr"], queries=queries)


@pytest.fixture(scope="module")
def reference(layer):
    return Recipe.reference(layer.call.config)


def run(layer, recipe, needles=()):
    targets = Targets.of(layer, needles)
    return compare(layer, recipe, EmulatedBackend().run(layer, recipe), targets)


CHANGES = [
    ({"theta": 10000.0}, "q_rope"),
    ({"k_theta": 10000.0}, "k_rope"),
    ({"k_yarn": None}, "k_rope"),
    ({"pairing": "half"}, "q_rope"),
    ({"k_slice": "first"}, "k_rope"),
    ({"k_position": "index"}, "k_rope"),
    ({"q_hadamard": False}, "q_hadamard"),
    ({"k_hadamard": False}, "k_hadamard"),
    ({"fp4": False}, "q_quant"),
    ({"k_fp4": False}, "k_quant"),
    ({"k_format": Format(element="e4m3")}, "k_quant"),
    ({"overlap": False}, "pool"),
    ({"ape": False}, "pool"),
    ({"round_ape": "bf16"}, "pool"),
    ({"round_pool_gemm": "bf16"}, "pool"),
    ({"eps": 1.0}, "k_norm"),
    ({"relu": False}, "scores"),
    ({"round_dot": "none", "round_product": "none", "round_score": "none"}, "scores"),
    ({"mask_shift": 3}, "topk"),
    ({"k": 32}, "topk"),
]


@pytest.mark.parametrize(("change", "stage"), CHANGES, ids=[next(iter(c)) + "-" + s for c, s in CHANGES])
def test_first_stage(layer, reference, change, stage):
    assert first_stage(layer, reference.replace(**change), reference) == stage


BENIGN = [
    {},
    {"ties": "higher"},
    {"round_score": "none"},
    {"k_format": Format(element="e4m3", scale="ue8m0")},
]


@pytest.mark.parametrize("change", BENIGN, ids=str)
def test_no_first_stage(layer, reference, change):
    """Rounding inside the scores and a lossless cache format move nothing by more than rounding."""
    assert first_stage(layer, reference.replace(**change), reference) is None


def test_reference_against_itself(layer, reference):
    case = run(layer, reference)
    assert case["verdict"] == "same"
    assert (case["jaccard"], case["jaccard_tied"], case["jaccard_kernel"], case["recall_worst"]) == (
        1,
        1,
        1,
        1,
    )
    assert (case["score_rel_error"], case["format_error"], case["kernel_error"]) == (0, 0, 0)
    # entries that tie with the k-th place share its rank, and not all of them fit
    assert [b["p"] for b in case["survival"][:4]] == [1] * 4
    assert all(b["p"] > 0.9 for b in case["survival"][4:6])
    assert case["survival"][6]["p"] == 0
    assert case["misses"] == {"ties": 0, "near_ties": 0, "real": 0}


def test_format_is_told_from_config(layer, reference):
    fp8 = run(layer, Recipe.preset("fp8", layer.call.config))
    assert fp8["verdict"] == "format"
    assert fp8["format_error"] == fp8["score_rel_error"] > 0
    assert fp8["kernel_error"] == 0
    assert run(layer, reference.replace(theta=1e4))["verdict"] == "config"


def test_a_wrong_kernel_is_a_kernel(layer, reference):
    """A deployment that leaves out what its recipe says differs from that recipe, whatever the recipe."""
    recipe = Recipe.preset("fp8", layer.call.config)
    broken = layer.trace(recipe.replace(k_hadamard=False))
    case = compare(layer, recipe, broken, Targets.of(layer, ()))
    assert case["verdict"] == "kernel"
    assert case["jaccard_kernel"] < 0.9
    assert case["format_error"] < case["score_rel_error"]


def test_needle_fields(layer, reference):
    query = int(layer.queries[-1])
    first = int(layer.stage(reference, "topk")[-1, 0]) * 4
    needles = (Needle(query=query, first_token=first, last_token=first + 3),)
    case = run(layer, reference, needles)
    assert (case["needle_rank"], case["needle_rank_reference"], case["needle_selected"]) == (0, 0, True)
    two = run(layer, reference, needles * 2)
    assert two["needle_rank"] == [0, 0]
    assert two["needles_lost"] == 0
    none = run(layer, reference)
    assert none["needle_rank"] is None
    assert none["needles_lost"] is None


def test_a_needle_that_the_reference_misses_is_not_lost(layer, reference):
    query = int(layer.queries[-1])
    worst = int(layer.stage(reference, "scores")[-1, : (query + 1) // 4].float().argmin())
    missed = Needle(query=query, first_token=4 * worst, last_token=4 * worst + 3)
    case = run(layer, reference, (missed,))
    assert case["needle_selected_reference"] is False
    assert (case["needles_lost"], case["needles_selected_reference"]) == (0, 0)


def test_one_wrong_selection_is_a_kernel_fault(layer, reference):
    """One entry of one row swapped for the row's worst: far inside the overlap's tolerance, and yet wrong."""
    good = layer.trace(reference)
    topk = good["topk"].clone()
    topk[0, 0] = int(good["scores"][0, : (int(layer.queries[0]) + 1) // 4].float().argmin())
    case = compare(layer, reference, Trace(dict(good) | {"topk": topk}), Targets.of(layer, ()))
    assert case["jaccard_kernel"] > 0.999
    assert (case["verdict"], case["topk_wrong_rows"]) == ("kernel", 1)
    assert [f["cause"] for f in case["findings"]] == ["topk_drop"]


def test_first_stage_is_judged_on_the_references_inputs(layer, reference):
    """Without intermediate roundings no stage is wrong by itself, although the differences pile up."""
    unrounded = dict.fromkeys(("round_pool", "round_k_norm", "round_k_rope", "round_k_hadamard"), "none")
    recipe = reference.replace(**unrounded)
    assert first_stage(layer, recipe, reference) is None
    assert stage_differs(layer.stage(recipe, "k_hadamard"), layer.stage(reference, "k_hadamard"))


def test_vacuous(layer, reference):
    config = layer.call.config
    short = Pipeline(config, layer.call.weights, layer.call.x[:256], layer.call.qr[:256])
    case = run(short, Recipe.preset("fp8", config))
    assert case["vacuous"]
    assert case["verdict"] == "vacuous"
    assert case["jaccard"] is None


def test_stage_differs_counts_ulps():
    """Hand-made: 100 values of 1.0 in bf16, whose unit in the last place is 2^-7."""
    ours = torch.ones(100, dtype=torch.bfloat16)

    def moved(count, ulps):
        theirs = ours.float()
        theirs[:count] += ulps * 2.0**-7
        return theirs

    assert not stage_differs(moved(5, 1), ours)  # 5 % unequal, none off by more than one
    assert stage_differs(moved(6, 1), ours)
    assert not stage_differs(moved(1, 2), ours)  # 1 % off by two
    assert stage_differs(moved(2, 2), ours)
    assert stage_differs(torch.full_like(ours, torch.nan), ours)
    assert not stage_differs(torch.full_like(ours, -torch.inf), torch.full_like(ours, -torch.inf))


@pytest.mark.parametrize(
    ("vacuous", "kernel", "tied", "structure_differs", "word"),
    [
        (True, 0.1, 0.1, True, "vacuous"),
        (False, 0.99, 0.5, True, "kernel"),
        (False, 1.0, 0.995, True, "same"),
        (False, 1.0, 0.99, True, "config"),
        (False, 1.0, 0.99, False, "format"),
    ],
)
def test_verdict(vacuous, kernel, tied, structure_differs, word):
    case = {"vacuous": vacuous, "jaccard_kernel": kernel, "jaccard_tied": tied, "topk_wrong_rows": 0}
    assert verdict(case, structure_differs=structure_differs) == word


STRUCTURAL = [{"theta": 1e4}, {"k_yarn": None}, {"k_hadamard": False}, {"relu": False}, {"mask_shift": 3}, {"k": 32}]


@pytest.mark.parametrize("change", STRUCTURAL, ids=str)
def test_structure_is_told_from_precision(reference, change):
    assert reference.replace(**change).structure_differs(reference)


def test_no_preset_differs_in_structure(layer, reference):
    for name in CHANGES_BY_PRESET:
        assert not Recipe.preset(name, layer.call.config).structure_differs(reference)
