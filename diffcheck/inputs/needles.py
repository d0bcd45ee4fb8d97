"""Needles: one window of tokens changed so that its entry scores exactly what you ask for.

A query row t sees V = (t + 1) // 4 entries, of which k are kept. A needle at depth f is entry j = floor(f *
(V - 1)). Its tokens 4j .. 4j+3 get alpha * d added, where d is the gradient of the *ideal* score (t, j) with
respect to those four rows of x, and alpha is found by bisection so that

    ideal score (t, j) = tau + strength * (max - tau)

Strength 0 is marginal (it ties with the k-th place), 1 is strong (it ties with the best), a negative one is
lost. Then x is rounded to bf16 once, and what is reached after the rounding is reported beside what was asked
for.

Decided here, because the formula leaves it open:

- *tau and max are those of the other visible entries of the row before planting*: the bar that the needle has
  to
  clear, wherever it stood itself. Entry j + 1 pools the same tokens through its overlap, so planting moves it
  too; its old value stays in the bar (otherwise a neighbour that rises with the needle could put strength 1
  out of reach), and the rank that is reported is counted in the row as it is after planting.
- *A query inside its own window* (t = 4j + 3) has its head gates changed by the planting, and with them the
  whole row.
  The bar is then that of the other entries under the changed gates.
- *When the line ends short.* A key is normalised, so scores level off, and one straight line often cannot
  reach the
  best score of a row. `lines` allows more of them, each along the gradient where the one before stopped; with
  1, the definition above, such a needle is refused. What was needed is reported as `lines`, with how much x
  changed.

The score of an entry depends on alpha only through projections that are linear in alpha, so a step of the
bisection costs one pooled window and one key, whatever the hidden size. It need not grow steadily with alpha:
the bracket comes from doubling alpha until the target is passed, and bisection keeps that crossing. `Planter`
computes the keys of a sequence once and plants any number of needles one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..refimpl.compressor import WINDOW
from ..refimpl.config import IndexerConfig
from ..refimpl.errors import InputError
from ..refimpl.linear import exact_matmul
from ..refimpl.weights import IndexerWeights
from .ideal import IdealSequence, Windows

SMALLEST_STEP = 2.0**-10
LARGEST_STEP = 2.0**6
"""The bracket runs from this share of the rows' own length to this multiple of it."""
LINE_STEP = 1.0
"""That multiple for one of several lines: a new direction is better than rows that are all needle."""
BISECTIONS = 60
DEFAULT_LINES = 16
"""Lines that a set of needles may take each: of 1440 at strengths 0 ... 1 on synthetic states none was
refused."""
DEFAULT_STRENGTHS = (1.0, 0.25, 0.5)


class Unreachable(InputError):
    """No change of the four rows that was tried gives the needle the strength that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlePlan:
    """A needle to plant: query position, depth in 0..1 over the visible entries, strength."""

    query: int
    depth: float
    strength: float

    @property
    def entry(self) -> int:
        """Entry number: floor(depth * (visible - 1))."""
        return math.floor(self.depth * ((self.query + 1) // WINDOW - 1))

    def check(self, length: int, k: int) -> None:
        """Raise InputError unless this needle makes sense in `length` tokens of which k entries are kept."""
        if not 0 <= self.query < length:
            raise InputError(f"needle query is {self.query}, expected a token position in 0..{length - 1}")
        visible = (self.query + 1) // WINDOW
        if visible <= k:
            raise InputError(
                f"query {self.query} sees {visible} entries, expected more than index_topk {k}: "
                "everything is selected there, a needle would be vacuous"
            )
        if not 0 <= self.depth <= 1:
            raise InputError(
                f"needle depth is {self.depth}, expected 0..1 (an entry beyond 1 is not visible to the query)"
            )
        if not math.isfinite(self.strength):
            raise InputError(f"needle strength is {self.strength}, expected a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedNeedle:
    """A planted needle; all scores are ideal ones.

    x: bf16 [T, hidden], the hidden states after planting; needles of one `Planter` share one x, with all of
    them in. query, entry: token position and entry number j; tokens 4j .. 4j+3 were changed. alpha: factor of
    the (last) gradient; lines: straight lines taken, 1 by definition. change: length of what was added as a
    multiple of the four rows' own. strength, target: asked for, and the score it means. unrounded: score that
    bisection found; score: after x was rounded to bf16; reached: the strength that score means. tau, maximum:
    the bar. rank: visible entries that score strictly more, after planting.
    """

    x: Tensor = field(repr=False, compare=False)
    query: int
    entry: int
    alpha: float
    lines: int
    change: float
    strength: float
    target: float
    unrounded: float
    score: float
    reached: float
    tau: float
    maximum: float
    rank: int

    @property
    def first_token(self) -> int:
        """First of the four changed tokens."""
        return WINDOW * self.entry

    @property
    def last_token(self) -> int:
        """Last of the four changed tokens."""
        return WINDOW * self.entry + WINDOW - 1


def plant_needle(
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    qr: Tensor,
    *,
    query: int,
    depth: float,
    strength: float,
    lines: int = 1,
) -> PlantedNeedle:
    """Plant one needle; x bf16 [T, hidden] is left as it is (the result has the new one), qr is bf16 [T,
    q_lora].

    Raises InputError for inputs that do not fit the config, and as `Planter.plant` does.
    """
    NeedlePlan(query=query, depth=depth, strength=strength).check(x.shape[0], config.index_topk)
    return Planter(config, weights, x, qr).plant(query=query, depth=depth, strength=strength, lines=lines)


def plant_needles(
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    qr: Tensor,
    plans: Sequence[NeedlePlan],
    *,
    lines: int = DEFAULT_LINES,
) -> tuple[Tensor, tuple[PlantedNeedle, ...]]:
    """Plant several needles one after another: (x bf16 [T, hidden] with all of them, the needles in order).

    Each needle reports its score at its own planting; later ones may move it by the little that their changed
    rows mean to its query. Raises InputError as `plant_needle` does, and when two of them would stand in the
    same or in neighbouring entries, which pool the same tokens.
    """
    for plan in plans:
        plan.check(x.shape[0], config.index_topk)
    ordered = sorted(plans, key=lambda plan: plan.entry)
    for left, right in pairwise(ordered):
        if right.entry - left.entry < 2:
            raise InputError(
                f"needles of queries {left.query} and {right.query} are at entries {left.entry} and "
                f"{right.entry}, expected them at least 2 apart"
            )
    planter = Planter(config, weights, x, qr)
    planted = tuple(planter.plant(query=p.query, depth=p.depth, strength=p.strength, lines=lines) for p in plans)
    return planter.x, planted


def default_needles(
    length: int, k: int, *, count: int = 8, strengths: Sequence[float] = DEFAULT_STRENGTHS
) -> tuple[NeedlePlan, ...]:
    """The needles of a synthetic run: queries near the end of `length` tokens, depths spread evenly,
    strengths in turn.

    k is index_topk. All queries differ, lie in the last sixteenth of the text (so all have a depth below 1
    and no needle overlaps a query), and see more than k entries. There are fewer than `count` when the text
    is too short for that many. Raises InputError when even the last token sees no more than k entries, or
    nothing is asked for.
    """
    visible = length // WINDOW
    if visible <= k:
        raise InputError(f"{length} tokens make {visible} entries, expected more than index_topk {k}: all are selected")
    if count < 1 or not strengths:
        raise InputError(f"count is {count} with {len(strengths)} strengths, expected at least one of each")
    first_query = max(length - 1 - length // 16, WINDOW * (k + 1) - 1)
    room = length - 1 - first_query
    # the deepest needle's window, and the one after it, end before the first query
    deepest = max(0, first_query // WINDOW - 2)
    count = max(1, min(count, room + 1, deepest // 4))
    plans = []
    for i in range(count):
        query = length - 1 - i * room // max(count - 1, 1)
        entry = round((i + 0.5) / count * deepest)
        # the middle of the depths that mean this entry, so that no rounding can move it
        depth = min((entry + 0.5) / max((query + 1) // WINDOW - 1, 1), 1.0)
        plans.append(NeedlePlan(query=query, depth=depth, strength=strengths[i % len(strengths)]))
    return tuple(plans)


class Planter:
    """Plants needles into one sequence; `x` is its bf16 [T, hidden] so far (a copy of what was given).

    Raises InputError for x, qr or weights that do not fit the config.
    """

    def __init__(self, config: IndexerConfig, weights: IndexerWeights, x: Tensor, qr: Tensor) -> None:
        self.ideal = IdealSequence(config, weights, x, qr)

    @property
    def x(self) -> Tensor:
        """The hidden states with every needle planted so far."""
        return self.ideal.x

    def measure(self, query: int, entry: int) -> tuple[float, int]:
        """(ideal score, rank) of an entry in a query row of the present x; see `IdealSequence.measure`."""
        with torch.no_grad(), exact_matmul():
            return self.ideal.measure(query, entry)

    def plant(self, *, query: int, depth: float, strength: float, lines: int = 1) -> PlantedNeedle:
        """Plant a needle for token position `query` at `depth` (0 first entry, 1 last visible) in self.x.

        lines: how many straight lines may be tried in a row; 1 is the definition. Raises InputError when the
        row sees no more than index_topk entries (vacuous), the depth is outside 0..1, or the row's other
        scores leave no room (max = tau), and its subclass `Unreachable` when the gradient is zero or no alpha
        within LARGEST_STEP times the rows' own length (LINE_STEP for each of several lines) reaches the
        target. self.x is then as before.
        """
        plan = NeedlePlan(query=query, depth=depth, strength=strength)
        plan.check(self.x.shape[0], self.ideal.config.index_topk)
        if lines < 1:
            raise InputError(f"lines is {lines}, expected at least 1")
        with torch.no_grad(), exact_matmul():
            return self._plant(plan, lines)

    def _plant(self, plan: NeedlePlan, lines: int) -> PlantedNeedle:
        query, entry, k = plan.query, plan.entry, self.ideal.config.index_topk
        place = f"needle of query {query} at depth {plan.depth:g} (entry {entry})"
        part = slice(WINDOW * entry, WINDOW * (entry + 1))
        in_own_window = part.start <= query < part.stop
        others = self.ideal.active(query)
        others = torch.cat((others[:, :entry], others[:, entry + 1 :]), dim=1)

        def bar(gates: Tensor) -> tuple[float, float]:
            best = (gates @ others).topk(k).values
            return float(best[-1]), float(best[0])

        tau, maximum = bar(self.ideal.gates(self.x[query]))
        if not maximum > tau:
            raise InputError(f"{place}: the best other score equals the {k}-th, expected a spread (index_topk > 1)")
        before = rows = self.x[part].double()
        size, reach, taken, found = float(before.norm()), LARGEST_STEP if lines == 1 else LINE_STEP, 0, False
        while not found:
            if taken == lines:
                raise Unreachable(
                    f"{place}: no change up to {reach:g} times its rows reaches strength "
                    f"{plan.strength:g} in {lines} line(s), expected less, another depth or more lines"
                )
            direction = self.ideal.gradient(query, entry, rows)
            length = float(direction.norm())
            if length == 0:
                raise Unreachable(f"{place}: the gradient of its score is zero, expected another depth or query")
            along = _Line(self.ideal, plan, rows, direction)

            def excess(alpha: float, along: _Line = along) -> float:
                score, gates = along.at(alpha)
                low, high = bar(gates) if in_own_window else (tau, maximum)
                return score - (low + plan.strength * (high - low))

            alpha, found = find_crossing(excess, SMALLEST_STEP * size / length, reach * size / length)
            rows, taken = rows + alpha * direction, taken + 1
        self.x[part] = rows.bfloat16()
        self.ideal.refresh(entry)
        # a rounded row has gates, and if the query is in its own window also a bar, of its own
        gates = self.ideal.gates(self.x[query])
        tau, maximum = bar(gates)
        key = self.ideal.key(entry, self.ideal.windows(entry, self.x[part].double()))
        score = float(gates @ (self.ideal.query(query) @ key).relu())
        return PlantedNeedle(
            x=self.x,
            query=query,
            entry=entry,
            alpha=alpha,
            lines=taken,
            change=float((self.x[part].double() - before).norm()) / size,
            strength=plan.strength,
            target=tau + plan.strength * (maximum - tau),
            unrounded=along.at(alpha)[0],
            score=score,
            reached=(score - tau) / (maximum - tau),
            tau=tau,
            maximum=maximum,
            rank=self.ideal.measure(query, entry)[1],
        )


class _Line:
    """The score of a needle along rows + alpha * direction (both fp64 [4, hidden])."""

    def __init__(self, ideal: IdealSequence, plan: NeedlePlan, rows: Tensor, direction: Tensor) -> None:
        self.ideal, self.entry, self.q = ideal, plan.entry, ideal.query(plan.query)
        self.start, moved = ideal.windows(plan.entry, rows), ideal.windows(plan.entry, rows + direction)
        # everything up to the softmax is linear in alpha; an absent window is -inf on both sides: no step
        self.kv_step = moved.kv - self.start.kv
        self.gate_step = (moved.gate - self.start.gate).nan_to_num(nan=0.0)
        own = plan.query - WINDOW * plan.entry
        inside = 0 <= own < WINDOW
        self.gates = ideal.gates(rows[own] if inside else ideal.x[plan.query])
        self.gates_step = ideal.gates(direction[own]) if inside else torch.zeros_like(self.gates)

    def at(self, alpha: float) -> tuple[float, Tensor]:
        """(ideal score, head gates fp64 [H]) at alpha."""
        gates = self.gates + alpha * self.gates_step
        windows = Windows(self.start.kv + alpha * self.kv_step, self.start.gate + alpha * self.gate_step)
        return float(gates @ (self.q @ self.ideal.key(self.entry, windows)).relu()), gates


def find_crossing(excess: Callable[[float], float], smallest: float, largest: float) -> tuple[float, bool]:
    """(alpha, True): the first change of sign of `excess` that doubling alpha meets, refined by bisection.

    The search goes from `smallest` to `largest` and runs along the direction that raises the score when it is too low
    (alpha > 0), against it when it is too high. `excess` must be continuous; it need not be monotone. Without
    a change of sign the answer is (alpha, False) with the smallest alpha that gains nine tenths of the most
    that any tried one does: scores level off, and the rows should not grow for nothing.
    """
    at_zero = excess(0.0)
    if at_zero == 0:
        return 0.0, True
    sign = 1.0 if at_zero < 0 else -1.0
    inside, outside = 0.0, smallest
    gains = [(0.0, 0.0)]
    while ((value := excess(sign * outside)) < 0) == (at_zero < 0):
        gains.append((abs(at_zero) - abs(value), sign * outside))
        inside, outside = outside, 2 * outside
        if outside > largest:
            enough = 0.9 * max(gain for gain, _ in gains)
            return next(alpha for gain, alpha in gains if gain >= enough), False
    for _ in range(BISECTIONS):
        middle = (inside + outside) / 2
        if (excess(sign * middle) < 0) == (at_zero < 0):
            inside = middle
        else:
            outside = middle
    return sign * outside, True
