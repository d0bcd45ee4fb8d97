"""What was selected: invariants on all rows, then the arms by tie-tolerant overlap.

The invariants need no reference: each row holds min(k, visible) different entries that exist and that it may see, and
no dropped entry scores more than a kept one. Where scores were observed that is all there is to say. Where they were
not, the scores are predicted and every arm of every stage that nobody saw is ranked by how many misses it explains
(`distance.selection_distance`); this is all that an engine's own output allows.

A selection that skips a few of the best and is otherwise in order, down to its last entry, was made from the right
scores by a top-k that drops winners: no change of the scores does that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..invariants import check_selection
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..stages import GRAPH, visible_under
from .distance import Distance, selection_distance

if TYPE_CHECKING:
    from .engine import Engine

SAME_SELECTION = 0.005
"""Share of missed entries up to which a selection is the predicted one (`compare.SAME_JACCARD`)."""
FEWEST = 3
"""Misses below which no arm is named: too few to tell arms apart."""


NOISE_BANDS = {torch.bfloat16: 4.0, torch.float16: 16.0, torch.float32: 2.0**11, torch.float64: 2.0**40}
"""Units of the score's type that another order of summation and its roundings upstream can move a score by."""


@dataclass(frozen=True, slots=True)
class SelectionLook:
    """Misses of a selection against the scores of a recipe, or the observed ones."""

    pipeline: Pipeline
    selected: Tensor
    known: Tensor
    scored: bool
    bands: float = 1.0

    def __call__(self, recipe: Recipe) -> Distance:
        """The misses that are left."""
        with self.pipeline.scratch():
            scores = self.pipeline.seen("scores") if self.scored else self.pipeline.stage(recipe, "scores")
            visible = visible_under(self.pipeline.call, recipe, self.pipeline.call.rows)
            hidden = torch.arange(scores.shape[1]) >= visible[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
            return selection_distance(self.selected, scores, self.known, visible.clamp(max=recipe.k), bands=self.bands)

    def hold(self, recipe: Recipe) -> None:
        """Keep the stages of this recipe."""
        if not self.scored:
            self.pipeline.stage(recipe, "scores")


class Selector:
    """Judges one selection int64 [rows of the trace, places] for an engine that has been through the other stages."""

    def __init__(self, engine: Engine, selected: Tensor) -> None:
        self.engine, self.selected = engine, selected
        self.clean = _distinct(selected, engine.evidence.entries)
        self.wide = self.clean[engine.rows]
        self.scored = "scores" in engine.pipeline.observed_names

    def run(self) -> None:
        """Search first, so that a wrong k or mask is no broken invariant; what then still fails is the kernel's."""
        engine = self.engine
        inside = engine.inside("topk")
        fields = {f for name in inside for f in GRAPH[name].fields}
        look = self._look(None)
        base = look(engine.recipe)
        engine.unequal["topk"] = base.differing / max(base.elements, 1)
        if base.total > 0 and engine.recompute_coarse("topk", look, base):
            base = look(engine.recipe)
        if base.total > 0:
            rows = engine.narrow(base.energy)
            narrow = self._look(rows)
            found = engine.search(narrow, "topk", self.wide, fields, self._within)
            after = look(found.recipe) if found.arms else base
            kernel = self._broken(engine.recipe, base) or self._broken(found.recipe, after)
            # a few misses close to the last place may be rounding; one far from it is not
            clear = replace(look, bands=NOISE_BANDS[self._score_type()])(engine.recipe).total > 0
            enough = clear or base.total - after.total >= FEWEST
            same = base.total <= SAME_SELECTION * base.elements and not clear
            if not enough or (same and after.total > 0.1 * base.total):
                if not same and not kernel:
                    engine.unexplained("topk", base, found)
            elif not (kernel and after.total > 0.1 * base.total):
                engine.accept("topk", self.wide, base, found, look, quiet=bool(kernel))
        engine.reached |= fields
        self._invariants()

    def _look(self, rows: Tensor | None) -> SelectionLook:
        engine = self.engine
        return SelectionLook(
            engine.pipeline if rows is None else engine.pipeline.narrowed(rows),
            self.wide if rows is None else self.wide[rows],
            engine.known,
            self.scored,
        )

    def _within(self, rows: Tensor, entries: Tensor) -> SelectionLook:
        """The misses among some entries [rows, E] of some rows."""
        return replace(self._look(rows), known=entries & self.engine.known)

    def _score_type(self) -> torch.dtype:
        engine = self.engine
        with engine.pipeline.scratch():
            return (
                engine.pipeline.seen("scores") if self.scored else engine.pipeline.stage(engine.recipe, "scores")
            ).dtype

    def _broken(self, recipe: Recipe, distance: Distance) -> list[str]:
        """Causes of the selection kernel itself, under a recipe."""
        failed = self._failures(recipe)
        found = [cause for cause in ("topk_slots", "topk_drop") if failed.get(cause)]
        return found if distance.total > 0 else [cause for cause in found if cause == "topk_slots"]

    def _failures(self, recipe: Recipe) -> dict[str, int]:
        """Rows that break an invariant, by cause."""
        engine = self.engine
        pipeline = engine.pipeline
        with pipeline.scratch():
            # as they were observed, in whatever type: their order is what counts
            scores = engine.observed["scores"] if self.scored else pipeline.stage(recipe, "scores")
        visible = visible_under(pipeline.call, recipe, pipeline.call.rows)
        raw = self.selected[engine.rows]
        check = check_selection(raw, scores, visible, recipe.k)
        slots = max(check.count, check.unique, check.in_range)
        failed = {"topk_slots": slots, "mask": check.causal}
        complete = bool(engine.known.all())
        if self.scored:
            failed["topk_drop"] = check.order
            self.wrong_values = check.wrong_values
        elif complete:
            failed["topk_drop"], self.wrong_values = _skipped(self.wide, scores, visible)
        return failed

    def _invariants(self) -> None:
        engine = self.engine
        failed = self._failures(engine.recipe)
        named = {hit.arm.field for hit in engine.hits if hit.arm is not None and hit.observed == "topk"}
        if "mask_shift" in named or not failed.get("mask"):
            failed.pop("mask", None)
        explained = any(hit.observed == "topk" for hit in engine.hits)
        if not self.scored and explained:
            failed.pop("topk_drop", None)
        if failed.get("topk_drop", 0) <= failed.get("topk_slots", 0):
            failed.pop("topk_drop", None)  # an empty place is a dropped entry too
        for cause, rows in failed.items():
            if rows and (cause != "topk_drop" or rows >= 1):
                engine.broken("topk", cause, rows, len(engine.rows), getattr(self, "wrong_values", 0))


def _distinct(selected: Tensor, entries: int) -> Tensor:
    """Selections with repeats and impossible entries turned into -1, order kept."""
    held = torch.where((selected >= 0) & (selected < entries), selected, -1)
    ordered, place = held.sort(dim=1, stable=True)
    repeated = torch.zeros_like(held, dtype=torch.bool)
    repeated[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return held.masked_fill(torch.zeros_like(repeated).scatter(1, place, repeated), -1)


def _skipped(selected: Tensor, scores: Tensor, visible: Tensor) -> tuple[int, int]:
    """Rows that skip some of the best entries and are otherwise in order, and how many entries they skip.

    A row of n entries with m misses is in order when it holds nothing outside the n + m best; it counts when one of
    the misses ranks well inside, below three quarters of n, where no noise of the scores reaches.
    """
    keys = torch.where(torch.arange(scores.shape[1]) < visible[:, None], scores.float(), -torch.inf)
    order = keys.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(keys.shape[1]).expand_as(order))
    rows, skipped = 0, 0
    for row in range(len(selected)):
        own = selected[row][selected[row] >= 0]
        n = len(own)
        if n == 0 or n >= int(visible[row]):
            continue
        ranks = rank[row][own]
        misses = n - int((ranks < n).sum())
        inside = torch.ones(n, dtype=torch.bool)
        inside[ranks[ranks < n]] = False
        first_missed = int(torch.nonzero(inside)[0]) if misses else n
        if misses and int(ranks.max()) < n + misses and first_missed < 0.75 * n:
            rows, skipped = rows + 1, skipped + misses
    # one row alone may be chance
    return (rows, skipped) if rows >= 2 or (rows and len(selected) == 1) else (0, 0)


def unrepeatable(selected: Tensor, repeats: tuple[Tensor, ...]) -> int:
    """Rows whose set changed between runs of the same call."""
    sets = [s.sort(dim=1).values for s in (selected, *repeats) if s.shape == selected.shape]
    return int(torch.stack([(s != sets[0]).any(1) for s in sets]).any(0).sum()) if len(sets) > 1 else 0
