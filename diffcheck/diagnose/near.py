"""A theta that is in no list, from scores or indices alone.

Scores depend on theta through the angle between a query and a key. Pair i turns by f_i = theta^(-2i/R) a token, so a
relative error d of theta turns it by p * f_i * (2i/R) * d too far after p tokens: at tens of thousands of tokens the
error that is left, seen as a function of theta, has narrow valleys that no list of thetas hits. Over short distances
the valley is wide. So theta is looked for on pairs of query and key that are close together first, over a coarse
logarithmic grid, and then again on pairs four times as far apart between the neighbours of the best, until all pairs
take part. What counts as far is the distance where both sides have the same theta, and the token position of the side
that alone has another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..recipe import Recipe
from ..refimpl.compressor import WINDOW
from .search import Look

Side = Literal["both", "q", "k"]
_SIDES: tuple[Side, ...] = ("q", "k")
Within = Callable[[Tensor, Tensor], Look]
"""(query rows, bool [rows, E]: the entries of each that count) -> the distance that is left under a recipe."""
_LOWEST, _HIGHEST = 5e2, 2e8
FIRST = {"scores": (128, 12), "topk": (256, 32)}
"""Tokens of the first window, and query rows, by what was observed: a selection says less of each pair."""
_STEP = 20.0
"""Grid step of ln(theta), times the window: the pair that moves most is then off by 0.4 rad at most at its edge."""
_WIDER = 4
_MOST_POINTS = 400
_FEWEST = 3
_STARTS = 2
"""Valleys of the first window that are looked into."""
_LESS = 0.7
"""Share of the base's error that the best theta of the first window may leave."""


def theta_hints(
    stage: str, fields: set[str], within: Within, recipe: Recipe, queries: Tensor, entries: int, fewer: int
) -> dict[str, list[Any]]:
    """Thetas that scores or a selection suggest, by bare or full field name; nothing for other stages.

    fields: recipe fields that are open. queries int64 [rows], token positions. fewer: query rows to compare at most.
    """
    if stage not in FIRST:
        return {}
    positions = WINDOW * torch.arange(entries)
    selective = (queries + 1) // WINDOW > recipe.k
    useful = selective if stage == "topk" else torch.ones_like(selective)
    shortest, most = FIRST[stage]

    def thetas(side: Side) -> list[float]:
        return near_thetas(
            within, recipe, side, queries, positions, useful, shortest=shortest, most_rows=min(most, fewer)
        )

    found: dict[str, list[Any]] = {}
    open_sides: list[Side] = [side for side in _SIDES if f"{side}_theta" in fields]
    if len(open_sides) == 2:
        found["theta"] = thetas("both")
    if not found.get("theta"):
        for side in open_sides:
            found[f"{side}_theta"] = thetas(side)
    return {name: values for name, values in found.items() if values}


def near_thetas(
    within: Within,
    recipe: Recipe,
    side: Side,
    queries: Tensor,
    entries: Tensor,
    useful: Tensor,
    *,
    shortest: int,
    most_rows: int,
) -> list[float]:
    """Thetas of one side or of both that leave least, rounded to a few digits; empty where none does.

    queries int64 [rows], entries int64 [E]: token positions. useful: bool [rows], rows that can tell thetas apart.
    shortest: tokens of the first window. most_rows: query rows to compare at once.
    """
    never = torch.iinfo(torch.int64).max
    distance = _distances(side, queries, entries)
    distance = torch.where(useful[:, None] & (entries[None] <= queries[:, None]), distance, never)
    if int(useful.sum()) < _FEWEST:
        return []
    window = max(shortest, int(distance.amin(1).sort().values[_FEWEST - 1]) + 1)
    farthest = int(torch.where(distance < never, distance, 0).max())
    step, low, high = _STEP / window, math.log(_LOWEST), math.log(_HIGHEST)
    points = int((high - low) / step)
    if points > _MOST_POINTS:
        return []
    own = math.log(getattr(recipe, f"{'k' if side == 'k' else 'q'}_theta"))
    grid = [own, *torch.linspace(low, high, points, dtype=torch.float64).tolist()]
    left = _tried(_look(within, distance, window, most_rows), recipe, side, grid)
    starts: list[float] = []
    for x in sorted(left, key=left.__getitem__):
        if len(starts) < _STARTS and all(abs(x - other) > 2 * step for other in starts):
            starts.append(x)
    if abs(starts[0] - own) > step and left[starts[0]] > _LESS * left[own]:
        return []
    # the last round but one has all pairs; one more for the digits
    while window <= farthest * _WIDER:
        spread, window, step = step, window * _WIDER, step / _WIDER
        fine = {x + spread * n / _WIDER for x in starts for n in range(-_WIDER, _WIDER + 1)}
        left = _tried(_look(within, distance, window, most_rows), recipe, side, sorted(fine))
        starts = [min(left, key=left.__getitem__)]
    return list(dict.fromkeys(float(f"{math.exp(starts[0]):.{digits}g}") for digits in (1, 2, 3, 4, 5, 6)))


def _distances(side: Side, queries: Tensor, entries: Tensor) -> Tensor:
    """Tokens [rows, E] over which an error of that side's theta adds up."""
    if side == "both":
        return queries[:, None] - entries[None]
    if side == "q":
        return queries[:, None].expand(len(queries), len(entries))
    return entries[None].expand(len(queries), len(entries))


def _look(within: Within, distance: Tensor, window: int, most_rows: int) -> Look:
    mask = distance < window
    rows = torch.nonzero(mask.any(1)).flatten()
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), most_rows)).long()]
    return within(rows, mask[rows])


def _tried(look: Look, recipe: Recipe, side: Side, logarithms: list[float]) -> dict[float, float]:
    """Energy left by the logarithm of theta."""
    sides = ("q", "k") if side == "both" else (side,)
    look.hold(recipe)
    return {x: look(recipe.replace(**{f"{s}_theta": math.exp(x) for s in sides})).total for x in logarithms}
