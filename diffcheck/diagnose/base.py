"""The recipe that a deployment is compared with where nothing was declared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..presets import CHANGES, build
from ..recipe import Recipe
from ..stages import GRAPH

if TYPE_CHECKING:
    from .engine import Engine


def choose_base(engine: Engine) -> Recipe:
    """The reference, or the preset under which more of the observations hold as they are."""
    if not engine.observed:
        return engine.reference
    pipeline = engine.pipeline.narrowed(torch.arange(0, len(engine.rows), max(1, len(engine.rows) // 24)))
    rows = torch.arange(0, len(engine.rows), max(1, len(engine.rows) // 24))
    for name, tensor in engine.observed.items():
        pipeline.observe(name, tensor[rows] if GRAPH[name].query_side else tensor)
    best, most = engine.reference, -1
    presets = [build(name, engine.evidence.config) for name in ("reference", "bf16", *CHANGES)]
    # rotating neither side is nobody's fault and says nothing about the rest
    for recipe in (*presets, *(p.replace(hadamard=False) for p in presets if p.q_hadamard)):
        held = 0
        for stage, tensor in engine.observed.items():
            seen = tensor[rows] if GRAPH[stage].query_side else tensor
            with pipeline.scratch():
                predicted = pipeline.stage(recipe, stage)
                found = engine.compare(stage, seen, predicted)
            same_type = torch.equal(seen.float(), predicted.float())
            held += 2 * (found.equal and same_type) + found.equal + found.fits
        if held > most:
            best, most = recipe, held
    return best
