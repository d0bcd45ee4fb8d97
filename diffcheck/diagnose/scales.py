"""Gates, and positive scales on queries, gates and scores that change no selection.

Engines fold the scale of a quantised query into the gates, and any positive factor of a token's query is harmless. So
gates are read in every way in which they may have been written, together with the factor that was seen on the queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats import Format, quantise
from .distance import HIDDEN_SCORE, Distance, distance
from .rescaling import FEW_ULPS, row_scale

if TYPE_CHECKING:
    from .engine import Engine


def benign_scale(engine: Engine, stage: str, seen: Tensor, predicted: Tensor) -> bool:
    """Whether the stage is the predicted one times positive factors that change no selection."""
    if stage not in ("q", "q_rope", "q_hadamard", "q_quant", "scores"):
        return False
    if stage == "scores":
        scale = row_scale(seen, predicted, hidden=HIDDEN_SCORE)
        if scale is None:
            return False
        engine.notes.append("scores: each row times a positive factor, which changes no selection")
        return True
    scale = row_scale(seen, predicted)
    if scale is None:
        return False
    by_token = bool((scale.amax(1) <= 1.01 * scale.amin(1)).all())
    total = scale if engine.scale is None else scale * engine.scale
    if not by_token and not _folded(engine, total):
        return False
    engine.scale = total
    engine.notes.append(f"{stage}: queries times a positive scale, folded back into the gates or harmless")
    return True


def unscaled_scores(engine: Engine, seen: Tensor, base: Distance) -> bool:
    """Whether scores follow from the queries and gates without the scale that was seen on them.

    A scale that is no power of two moves the roundings in the scores, and nothing says on which side of them a
    trace was taken. Where neither reading holds to the bit, a difference of rounding size is forgiven.
    """
    if engine.scale is None:
        return False
    kept = {name: engine.pipeline.seen(name) for name in engine.unscaled if name in engine.pipeline.observed_names}
    for name in kept:
        engine.pipeline.observe(name, engine.unscaled[name])
    after = engine.compare("scores", seen, engine.pipeline.stage(engine.recipe, "scores"))
    visible = torch.where(seen > HIDDEN_SCORE, seen.float(), 0.0).double()
    small = (FEW_ULPS**2) * float(visible.square().sum())
    if after.fits:
        engine.pipeline.observe("scores", seen)
        return True
    for name, tensor in kept.items():
        engine.pipeline.observe(name, tensor)
    if min(base.total, after.total) <= small:
        engine.pipeline.observe("scores", seen)
        return True
    return False


def judge_gate(engine: Engine) -> None:
    """Take the gates in the reading that fits, scale and all; what then still differs is searched like any stage."""
    readings = _gates(engine)
    if not readings:
        if engine.scale is not None:
            predicted = engine.pipeline.stage(engine.recipe, "gate")
            engine.pipeline.observe("gate", predicted.float() / engine.scale)
            engine.unscaled["gate"] = predicted
        return
    predicted = engine.pipeline.stage(engine.recipe, "gate")
    if engine.scale is not None:
        for gate in readings:
            if distance(gate.float() * engine.scale, predicted.float()).fits:
                engine.pipeline.observe("gate", gate)
                engine.unscaled["gate"] = predicted
                engine.reached |= {"round_gate", "round_gate_gemm"}
                return
    gate = min(readings, key=lambda g: distance(g, predicted).total)
    if gate is not engine.observed.get("gate") and distance(gate, predicted).fits:
        engine.pipeline.observe("gate", gate)
        engine.reached |= {"round_gate", "round_gate_gemm"}
        return
    scale = row_scale(gate, predicted)
    if scale is not None and not distance(gate, predicted).fits:
        engine.notes.append("gate: each row times a positive factor, which changes no selection")
        engine.pipeline.observe("gate", gate)
        return
    engine.observed["gate"] = gate
    engine.judge("gate", gate)


def _gates(engine: Engine) -> list[Tensor]:
    """The gates as they act on the observed queries, in every reading of what was observed."""
    if "gate" in engine.observed:
        return [engine.observed["gate"]]
    if engine.evidence.gate_folded is None:
        return []
    folded = engine.evidence.gate_folded[engine.rows]
    readings = []
    if engine.evidence.q_scale is not None:
        scale = engine.evidence.q_scale[engine.rows]
        scale = scale if scale.shape[1] == folded.shape[1] else scale.mean(1, keepdim=True)
        readings.append(folded / scale)
    readings.append(folded)
    with engine.pipeline.scratch():
        codes = _query_scales(engine)
    return readings + ([folded / codes] if codes is not None else [])


def _query_scales(engine: Engine) -> Tensor | None:
    """The scale [rows, H] that the recipe's q format gives each query, where it gives one."""
    fmt = engine.recipe.q_format
    if not isinstance(fmt, Format) or fmt.plain or fmt.block != engine.evidence.config.index_head_dim:
        return None
    before = engine.observed.get("q_hadamard")
    if before is None:
        before = engine.pipeline.stage(engine.recipe, "q_hadamard")
    return quantise(before.float(), fmt)[1].squeeze(-1)


def _folded(engine: Engine, scale: Tensor) -> bool:
    """Whether some reading of the gates is the predicted gate divided by `scale`."""
    predicted = engine.pipeline.stage(engine.recipe, "gate")
    return any(distance(gate.float() * scale, predicted.float()).fits for gate in _gates(engine))
