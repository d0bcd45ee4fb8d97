"""Chains: who runs what, refusals, and that a broken step is found isolated while its followers stay clean."""

import dataclasses

import pytest
import torch

from diffcheck.backends import Chain, EmulatedKernels
from diffcheck.checkpoint import Checkpoint
from diffcheck.pipeline import Pipeline
from diffcheck.recipe import Recipe
from diffcheck.refimpl import Trace

PRESETS = ("sglang-fp8", "sglang-fp4", "sglang-bf16", "vllm-fp8", "vllm-mxfp4", "trtllm-fp8", "trtllm-fp4")


@pytest.fixture(scope="module")
def layer(mini):
    checkpoint = Checkpoint(mini)
    trace = Trace.load(mini / "trace.safetensors", 4)
    queries = torch.linspace(300, 1199, 12).long()
    return Pipeline(checkpoint.config, checkpoint.load(4), trace["x"][:1200], trace["qr"][:1200], queries=queries)


class Only:
    """One step of the emulation, perhaps broken, under another name."""

    def __init__(self, step, breaks=None, refuses=None):
        self.name, self.steps = f"only-{step}", (step,)
        self._breaks, self._refuses = breaks, refuses
        self._emulation = EmulatedKernels()

    def unavailable(self, device):
        return None

    def version(self):
        return "1"

    def refusal(self, step, recipe, config):
        return self._refuses

    def _run(self, name, *arguments):
        result = getattr(self._emulation, name)(*arguments)
        return self._breaks(result) if self._breaks else result

    def store_keys(self, *a):
        return self._run("store_keys", *a)

    def quantise_queries(self, *a):
        return self._run("quantise_queries", *a)

    def paged_logits(self, *a):
        return self._run("paged_logits", *a)

    def topk(self, *a):
        return self._run("topk", *a)


@pytest.mark.parametrize("name", PRESETS)
def test_the_emulated_chain_is_the_emulation(layer, name):
    """Pages, codes and folded gates give back what the stages say; this is also the test of `encode`."""
    recipe, chain = Recipe.preset(name, layer.call.config), Chain.of("all emulated")
    assert chain.refusal(recipe, layer.call.config) is None
    trace = chain.run(layer, recipe)
    assert torch.equal(trace["k_quant"].float(), layer.stage(recipe, "k_quant").float())
    torch.testing.assert_close(trace["q_quant"].float(), layer.stage(recipe, "q_quant").float(), rtol=1e-6, atol=0)
    for record in chain.judge(layer, recipe, trace):
        for found in (record["isolated"], record["cumulative"]):
            assert found.get("equal", 1) == 1
            assert found.get("calc_diff", 0) < 1e-11
            assert found.get("causes", []) == []


BROKEN = {
    "keys": lambda cache: dataclasses.replace(cache, slots=cache.slots.flip(0)),
    "queries": lambda query: dataclasses.replace(query, gate=query.gate.flip(1)),
    "logits": lambda scores: scores * torch.where(torch.arange(scores.shape[1]) % 2 == 0, 1.0, 0.5),
    "topk": lambda selected: selected.clamp_min(0) // 2,
}


@pytest.mark.parametrize("step", BROKEN)
def test_a_broken_step_answers_for_itself(layer, step):
    recipe, chain = Recipe.preset("sglang-fp8", layer.call.config), Chain.of("broken", Only(step, BROKEN[step]))
    records = {r["step"]: r for r in chain.judge(layer, recipe, chain.run(layer, recipe))}
    assert records[step]["backend"] == f"only-{step}"
    assert records["logits"]["isolated"]["calc_diff"] > 1e-4 if step == "logits" else True
    assert bool(records["topk"]["isolated"]["causes"]) == (step == "topk")
    if step == "keys":
        assert records["keys"]["isolated"]["equal"] < 0.9
    if step != "topk":  # whatever is wrong before it, the scores of the chain are
        assert records["logits"]["cumulative"]["calc_diff"] > 1e-4
        assert records["logits"]["isolated"]["calc_diff"] < 1e-11 or step == "logits"


def test_the_first_candidate_that_can_runs(layer):
    config, recipe = layer.call.config, Recipe.preset("sglang-fp8", layer.call.config)
    chain = Chain.of("two", Only("logits", refuses="not this one"), EmulatedKernels())
    assert chain.part("logits", recipe, config).name == "emulated"
    assert chain.refusal(recipe, config) is None
    alone = Chain.of("one", Only("logits", refuses="not this one"))
    assert alone.refusal(recipe, config) == "logits (only-logits): not this one"


def test_what_no_page_holds_is_refused(layer):
    config = layer.call.config
    for name in ("ideal", "llama.cpp"):
        assert "keys" in Chain.of("all emulated").refusal(Recipe.preset(name, config), config)
