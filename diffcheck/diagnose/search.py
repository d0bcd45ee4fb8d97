"""The search for the arms that explain a difference.

`look(recipe)` gives the distance that is left under a recipe. All arms are tried; then, unless one of them leaves
nothing worth explaining, the best few are taken as new starting points and all arms are tried again on top, up to
three changes deep: two faults between the same two observations are found together. A second change counts only if it
takes away at least half of what the first one left.

Numbers (theta, mscale, eps) are refined between their neighbours in the list: golden section on a logarithmic scale,
then the roundest value that does as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..recipe import Recipe
from .arms import Arm
from .distance import Distance

ArmsOf = Callable[[Recipe], list[Arm]]
MoreOf = Callable[[Recipe, Arm], list[Arm]]
Late = Callable[[], list[Arm]]


class Look(Protocol):
    """The distance that is left under a recipe."""

    def __call__(self, recipe: Recipe) -> Distance:
        """Compute the observed stage under a recipe and compare it."""

    def hold(self, recipe: Recipe) -> None:
        """Keep the stages of a recipe, from which others are about to be tried."""


DEPTH = 3
BEAM = 4
ENOUGH = 0.995
"""Where a change explains this much and the stage fits, the rest could be rounding."""
AS_WELL = 1.05
"""Times what the best value leaves: so much a rounder one may leave, since the other differences that the rest is made
of (a rounding that is not found yet) shift the best value a little. Where it leaves nothing, only it will do."""
SURE, NEXT = 0.9, 0.5
"""Share of the rest that a further change must explain, where the rest could be rounding and where it could not."""
_REFINED = {"theta": 1.3, "mscale": 1.15, "eps": 10.0}
_LISTED = ("theta", "mscale", "yarn", "format", "fp4_format")
PROMISING = 3
"""So many of the best arms have the rest of their field's values tried."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Ranked:
    """An arm and the energy that it leaves."""

    arm: Arm
    left: float


@dataclass(slots=True)
class Found:
    """Accepted arms in the order they were found, the recipe with all of them, and what else was tried.

    ranking: for each accepted arm all arms tried in its place, best first. before: energy left before each.
    """

    recipe: Recipe
    arms: list[Arm] = field(default_factory=list)
    rankings: list[list[Ranked]] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    left: float = 0.0


def search(
    look: Look, recipe: Recipe, arms_of: ArmsOf, more_of: MoreOf, late: Late, base: Distance, *, beam: int = BEAM
) -> Found:
    """The arms that leave least of `base`, the distance of the recipe itself.

    more_of: further arms in the field of one that is among the best. late: arms that are dear to find, asked for only
    where no other explains enough; from then on arms_of has them too.
    """
    found = Found(recipe=recipe, left=base.total)
    if base.total == 0:
        return found
    first = rank(look, recipe, arms_of(recipe), more_of, base.total)
    if not first or first[0].left > (1 - ENOUGH) * base.total:
        known = {ranked.arm.changes for ranked in first}
        dear = [arm for arm in late() if arm.changes not in known]
        if dear:
            first = sorted([*first, *rank(look, recipe, dear, more_of, base.total)], key=_left)
    if not first:
        return found
    best, ranking = first[0], first
    after = look(best.arm.apply(recipe))
    if after.equal:
        return _extend(found, best, ranking, base.total)
    needed = _needed(after, best.left, base.total)
    # several starting points, each with another field, because two faults may hide each other
    starts: list[Ranked] = []
    for candidate in first:
        if len(starts) < beam and candidate.arm.field not in {s.arm.field for s in starts}:
            starts.append(candidate)
    pairs = []
    for start in starts:
        changed = start.arm.apply(recipe)
        others = [arm for arm in arms_of(changed) if not _same_fields(arm, start.arm)]
        second = rank(look, changed, others, more_of, start.left)
        if second:
            pairs.append((second[0].left, start, second))
    left, start, second = min(pairs, key=lambda pair: pair[0]) if pairs else (math.inf, best, [])
    if left > (1 - needed) * best.left:
        return _extend(found, best, ranking, base.total)
    found = _extend(_extend(found, start, first, base.total), second[0], second, start.left)
    while len(found.arms) < DEPTH:
        changed, after = found.recipe, look(found.recipe)
        if after.equal:
            break
        needed = _needed(after, found.left, base.total)
        others = [arm for arm in arms_of(changed) if not any(_same_fields(arm, a) for a in found.arms)]
        more = rank(look, changed, others, more_of, found.left)
        if not more or more[0].left > (1 - needed) * found.left:
            break
        found = _extend(found, more[0], more, found.left)
    return found


def rank(look: Look, recipe: Recipe, arms: Iterable[Arm], more_of: MoreOf, total: float) -> list[Ranked]:
    """Arms that change something, by what they leave; of equals the earlier one first. Numbers are refined."""
    look.hold(recipe)

    def tried(these: Iterable[Arm]) -> list[Ranked]:
        ranked = [Ranked(arm, look(arm.apply(recipe)).total) for arm in these]
        return [r for r in ranked if r.left != total]

    ranked = sorted(tried(arms), key=_left)
    looked: set[str] = set()
    for best in ranked[:PROMISING]:
        if best.arm.field not in looked and ranked[0].left > 0 and not best.arm.preset:
            looked.add(best.arm.field)
            if best.arm.field.removeprefix("q_").removeprefix("k_") in _LISTED:
                known = {r.arm.changes for r in ranked}
                ranked = sorted(
                    [*ranked, *tried(a for a in more_of(recipe, best.arm) if a.changes not in known)], key=_left
                )
    if ranked and ranked[0].left > 0:
        best = ranked[0]
        bare = best.arm.field.removeprefix("q_").removeprefix("k_")
        if bare in _REFINED and best.left < total:
            ranked = sorted([*_refine(look, recipe, best, _REFINED[bare]), *ranked], key=_left)
    return ranked


def _left(ranked: Ranked) -> float:
    return ranked.left


def _refine(look: Look, recipe: Recipe, best: Ranked, factor: float) -> list[Ranked]:
    """Values near the best arm's, but for those that leave less than the roundest one that does as well."""
    arm, seen = best.arm, {float(best.arm.value): best.left}

    def left(value: float) -> float:
        if value not in seen:
            seen[value] = look(_with(arm, value).apply(recipe)).total
        return seen[value]

    low, high = math.log(float(arm.value) / factor), math.log(float(arm.value) * factor)
    for _ in range(14):
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if left(math.exp(a)) < left(math.exp(b)):
            high = b
        else:
            low = a
    centre = min(seen, key=seen.__getitem__)
    round_ones = [float(arm.value), *(float(f"{centre:.{digits}g}") for digits in (1, 2, 3, 4, 6))]
    enough = AS_WELL * min(left(value) for value in (centre, *round_ones))
    roundest = next((value for value in round_ones if left(value) <= enough), centre)
    return [
        Ranked(_with(arm, value), energy)
        for value, energy in seen.items()
        if value != arm.value and energy >= seen[roundest]
    ]


def _with(arm: Arm, value: float) -> Arm:
    return dataclasses.replace(arm, value=value, changes=tuple((name, value) for name, _ in arm.changes))


def _same_fields(a: Arm, b: Arm) -> bool:
    return not {n for n, _ in a.changes}.isdisjoint(n for n, _ in b.changes) and not (a.preset or b.preset)


def _needed(after: Distance, left: float, total: float) -> float:
    """What a further change must explain of the rest: nearly all where the rest could be rounding."""
    return SURE if after.fits and left <= (1 - ENOUGH) * total else NEXT


def _extend(found: Found, chosen: Ranked, ranking: list[Ranked], before: float) -> Found:
    return Found(
        recipe=chosen.arm.apply(found.recipe),
        arms=[*found.arms, chosen.arm],
        rankings=[*found.rankings, ranking],
        before=[*found.before, before],
        left=chosen.left,
    )
