"""One case: a recipe on some query rows of one layer and one text, from nothing but its arguments.

A `LayerText` is what all cases of a layer and text share: weights, inputs, and which rows may be asked for. It is plain
data, so that it can lie in an object store. `measure` computes a case; the stages that cases share (projections, pool,
everything up to the first field in which two recipes differ) are kept by the process for the last few LayerTexts, so a
process that gets the cases of one layer together computes them once. What is kept never changes a result.

A case's record holds for each row how many of the reference's entries it selects, plainly and with ties forgiven, and
for each needle whether it is selected and was by the reference.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import metrics, ranks
from ..inputs.source import Needle
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerConfig, IndexerWeights
from ..refimpl.scoring import visible_entries

KEPT = 2
"""LayerTexts whose stages a process keeps: the one at work and, between two layers, the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerText:
    """A layer on a text: x bf16 [T, hidden], qr bf16 [T, q_lora]; positions int64 [rows], what may be compared.

    key names it among all of a sweep. order: the rows (indices into positions) in the order in which they are measured,
    so that any beginning of it is spread evenly. needles: whose queries are measured apart from the rows.
    """

    key: str
    config: IndexerConfig
    weights: IndexerWeights = field(repr=False)
    x: Tensor = field(repr=False)
    qr: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)
    order: tuple[int, ...] = field(repr=False)
    needles: tuple[Needle, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Which rows of a LayerText's order a case has, and whether it has the needles."""

    first: int
    last: int
    needles: bool


class _Layer:
    """The shared stages of a LayerText on a device, by rung."""

    def __init__(self, given: LayerText, device: str) -> None:
        self.given = given
        self.reference = Recipe.reference(given.config)
        queries = torch.cat((given.positions, torch.tensor([n.query for n in given.needles], dtype=torch.int64)))
        self.whole = Pipeline(
            given.config, given.weights.to(device), given.x.to(device), given.qr.to(device), queries=queries.to(device)
        )
        self._rungs: dict[tuple[int, ...], Pipeline] = {}

    def rows(self, rows: list[int]) -> Pipeline:
        """The pipeline of some query rows; made once for all recipes."""
        key = tuple(rows)
        if key not in self._rungs:
            self._rungs = {key: self.whole.narrowed(torch.tensor(rows, device=self.whole.queries.device))}
        return self._rungs[key]


_kept: OrderedDict[tuple[str, str], _Layer] = OrderedDict()


def measure(given: LayerText, recipe: Recipe, rung: Rung, device: str) -> dict[str, Any]:
    """The record of a case, plain JSON; see the module."""
    layer = _layer(given, device)
    k, count = given.config.index_topk, len(given.positions)
    own = sorted(given.order[rung.first : rung.last])
    # one pipeline for rows and needles, so that a rung's stages are computed in one go
    found = list(range(count, count + len(given.needles))) if rung.needles else []
    part = layer.rows(own + found)
    visible = visible_entries(part.queries)
    scores, selected = part.stage(recipe, "scores"), part.stage(recipe, "topk")
    target, best = (part.stage(layer.reference, name) for name in ("scores", "topk"))
    rows = slice(len(own))
    tied, _ = metrics.tied_hits(
        selected=selected[rows], target_scores=target[rows], visible=visible[rows], k=k, score_dtype=target.dtype
    )
    recalls = metrics.recalls(selected=selected[rows], target_selected=best[rows], entries=target.shape[1])
    record: dict[str, Any] = {
        "rows": own,
        "hits": (recalls * k).round().long().tolist(),
        "hits_tied": tied.tolist(),
    }
    if rung.needles:
        needles = slice(len(own), None)
        spans = [range(n.entries.start, min(n.entries.stop, target.shape[1])) for n in given.needles]
        kept, had = (
            ranks.needles(scores=s[needles], selected=t[needles], visible=visible[needles], spans=spans).selected
            for s, t in ((scores, selected), (target, best))
        )
        record |= {"needles_kept": kept, "needles_had": had}
    return record


def _layer(given: LayerText, device: str) -> _Layer:
    key = (given.key, device)
    if key not in _kept:
        while len(_kept) >= KEPT:
            _kept.popitem(last=False)
        _kept[key] = _Layer(given, device)
    _kept.move_to_end(key)
    return _kept[key]


def forget() -> None:
    """Let go of all shared stages of this process."""
    _kept.clear()


def spread(rows: int) -> tuple[int, ...]:
    """0 … rows - 1 in an order whose every beginning is spread evenly: by the reversed bits of the index."""
    bits = max(1, (rows - 1).bit_length())
    order = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return tuple(i for i in order if i < rows)
