"""A chain of steps from one or several packages, run as a backend and judged step by step.

Each step is judged twice. *Isolated*: on the emulation's own inputs, so that a step answers only for itself.
*Cumulative*: on what the chain's earlier steps produced, which is what a deployment gets. Key and query steps read the
projections and nothing else, so for them both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import metrics
from ..invariants import check_selection
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerConfig, Trace
from ..stages import visible_under
from .base import STEPS, Kernels
from .emulated import EmulatedKernels

RERUNS = 2
"""How often the selection is repeated to see whether it repeats itself."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A backend made of kernels: for each step the candidates, of which the first that can run a recipe does."""

    name: str
    candidates: dict[str, tuple[Kernels, ...]]

    @staticmethod
    def of(name: str, *kernels: Kernels) -> Chain:
        """Each step from those of `kernels` that have it, in this order; the emulation fills what none has."""
        emulation = EmulatedKernels()
        return Chain(name, {s: tuple(k for k in kernels if s in k.steps) or (emulation,) for s in STEPS})

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages in the traces."""
        return ("k_quant", "q_quant", "gate_folded", "scores", "topk")

    def unavailable(self, device: str) -> str | None:
        """The reason of the first kernels that cannot run here; all of them must."""
        return next((why for part in self._all() if (why := part.unavailable(device))), None)

    def version(self) -> str | None:
        """Versions of all kernels that are not the emulation."""
        names = {part.name: part.version() for part in self._all() if part.name != "emulated"}
        return ", ".join(f"{name} {version}" for name, version in names.items() if version) or None

    def refusal(self, recipe: Recipe, config: IndexerConfig) -> str | None:
        """The reason of the first step that no candidate can run."""
        for step in STEPS:
            part = self.part(step, recipe, config)
            if reason := part.refusal(step, recipe, config):
                return f"{step}: {reason}" if part.name == self.name else f"{step} ({part.name}): {reason}"
        return None

    def part(self, step: str, recipe: Recipe, config: IndexerConfig) -> Kernels:
        """The kernels that run a step of a recipe; where all refuse, the first of them."""
        able = (k for k in self.candidates[step] if not k.refusal(step, recipe, config))
        return next(able, self.candidates[step][0])

    def _all(self) -> tuple[Kernels, ...]:
        return tuple(dict.fromkeys(part for parts in self.candidates.values() for part in parts))

    def _parts(self, pipeline: Pipeline, recipe: Recipe) -> dict[str, Any]:
        """The kernels of each step; Any, because each is only known to have the method of its step."""
        return {step: self.part(step, recipe, pipeline.call.config) for step in STEPS}

    def run(self, pipeline: Pipeline, recipe: Recipe) -> Trace:
        """All steps one after the other; the trace also has `pages` and `block_table`."""
        from .. import kernels

        parts, visible = self._parts(pipeline, recipe), self._visible(pipeline, recipe)
        cache = parts["keys"].store_keys(pipeline, recipe)
        query = parts["queries"].quantise_queries(pipeline, recipe)
        scores = parts["logits"].paged_logits(query, cache, visible)
        tensors: dict[str, Tensor] = {
            "k_quant": kernels.dequantise(*kernels.read_entries(cache.pages, cache.fmt, cache.slots), cache.fmt),
            "q_quant": kernels.dequantise(query.codes, query.scales, query.fmt),
            "gate_folded": query.gate,
            "scores": scores,
            "topk": parts["topk"].topk(scores, visible, recipe.k),
            "pages": cache.pages,
            "block_table": cache.block_table,
            "queries": pipeline.queries,
        }
        if query.fmt == "e4m3" and query.scales is not None:
            tensors["q_scale"] = query.scales
        return Trace(tensors, start=pipeline.call.start, metadata={"page_format": cache.fmt})

    def judge(self, pipeline: Pipeline, recipe: Recipe, trace: Trace) -> list[dict[str, Any]]:
        """One record a step: who ran it, how it compares with the emulation, isolated and cumulative."""
        parts, visible, emulation = self._parts(pipeline, recipe), self._visible(pipeline, recipe), EmulatedKernels()
        cache, query = emulation.store_keys(pipeline, recipe), emulation.quantise_queries(pipeline, recipe)
        own_scores = pipeline.stage(recipe, "scores").float()
        logits, topk = parts["logits"], parts["topk"]
        alone = logits.paged_logits(query, cache, visible)
        chosen = [topk.topk(own_scores, visible, recipe.k) for _ in range(RERUNS)]
        keys = _same_values(pipeline.stage(recipe, "k_quant"), trace["k_quant"])
        queries = _same_values(pipeline.stage(recipe, "q_quant"), trace["q_quant"])
        cumulative = check_selection(trace["topk"], trace["scores"], visible, recipe.k)
        isolated = check_selection(chosen[0], own_scores, visible, recipe.k, again=chosen[1:])
        measured: dict[str, tuple[Any, Any]] = {
            "keys": (keys, keys),
            "queries": (queries, queries),
            "logits": (_calc_diff(alone, own_scores, visible), _calc_diff(trace["scores"], own_scores, visible)),
            "topk": (isolated.to_json(), cumulative.to_json()),
        }
        return [
            {"step": s, "backend": parts[s].name, "isolated": measured[s][0], "cumulative": measured[s][1]}
            for s in STEPS
        ]

    def _visible(self, pipeline: Pipeline, recipe: Recipe) -> Tensor:
        return visible_under(pipeline.call, recipe, pipeline.call.rows).to(torch.int32)


def _same_values(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Share of dequantised values that are the same up to an fp32 scale's last bits."""
    same = torch.isclose(ours.float(), theirs.float(), rtol=1e-5, atol=0, equal_nan=True)
    return {"equal": float(same.double().mean())}


def _calc_diff(scores: Tensor, target: Tensor, visible: Tensor) -> dict[str, Any]:
    found = metrics.errors(scores=scores, target_scores=target, visible=visible.long())
    errors = {"rel": found.rel, "calc_diff": found.calc_diff, "max": found.max_abs}
    return {name: metrics.finite(value) for name, value in errors.items()}
