"""What the FP4 step leaves of e4m3: a power-of-two scale loses nothing, amax / 448 does.

On trained layers (the miniature, real hidden states) and on unfriendly made-up ones.
"""

import pytest
import torch

from diffcheck import Pipeline, Recipe
from diffcheck.backends import find_backend
from diffcheck.checkpoint.layer import Checkpoint
from diffcheck.compare import Targets, compare
from diffcheck.inputs import load_inputs, synthetic_hidden
from diffcheck.presets import build


@pytest.fixture(scope="module", params=[2, 4, "made-up"])
def layer(request, mini):
    checkpoint = Checkpoint(mini)
    number = 4 if request.param == "made-up" else request.param
    if request.param == "made-up":
        x, qr = synthetic_hidden(checkpoint.config, length=1024, seed=3)
    else:
        found = load_inputs(mini / "trace.safetensors", checkpoint.config, [number])[number]
        x, qr = found.x, found.qr
    queries = torch.arange(300, len(x), 57)
    return Pipeline(checkpoint.config, checkpoint.load(number), x, qr, queries=queries)


def record(layer, name):
    recipe = build(name, layer.call.config)
    return compare(layer, recipe, find_backend("emulated").run(layer, recipe), Targets.of(layer, ()))


@pytest.mark.parametrize(
    "name", ["qat+e4m3/128/ue8m0", "k=qat+e4m3/128/ue8m0", "qat+bf16", "qat+e2m1/32/ue8m0:floor=0"]
)
def test_lossless_after_the_fp4_step(layer, name):
    """Not only the same selection: the same keys and scores, bit for bit, so no tie is broken otherwise either."""
    reference = Recipe.reference(layer.call.config)
    recipe = build(name, layer.call.config)
    assert recipe.differences(reference) or name == "qat+bf16"
    for stage in ("q_quant", "k_quant", "scores"):
        assert torch.equal(layer.stage(recipe, stage).float(), layer.stage(reference, stage).float()), stage
    found = record(layer, name)
    assert (found["jaccard"], found["jaccard_tied"], found["recall_worst"], found["verdict"]) == (1, 1, 1, "same")


@pytest.mark.parametrize("name", ["qat+e4m3/128/fp32", "k=qat+e4m3/128/fp32", "e4m3/128/ue8m0"])
def test_not_lossless(layer, name):
    """A scale of amax / 448 moves every row off the FP4 grid; without the FP4 step no scale brings it back."""
    found = record(layer, name)
    assert found["jaccard_tied"] < 0.995
    assert found["verdict"] == "format"
    keys = layer.stage(build(name, layer.call.config), "k_quant")
    want = layer.stage(Recipe.reference(layer.call.config), "k_quant").float()
    assert float((keys != want).any(dim=1).float().mean()) > 0.99
