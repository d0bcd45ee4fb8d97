"""Needles: one window of tokens changed so that its entry scores exactly what you ask for.

A query row t sees V = (t + 1) // 4 entries, of which k are kept. A needle at depth f is entry j = floor(f * (V - 1)).
Its tokens 4j .. 4j+3 get alpha * d added, where d is the gradient of the *ideal* score (t, j) with respect to those
four rows of x, and alpha is found by bisection so that

    ideal score (t, j) = tau + strength * (max - tau)

Strength 0 is marginal (it ties with the k-th place), 1 is strong (it ties with the best), a negative one is lost. Then
x is rounded to bf16 once, and what is reached after the rounding is reported beside what was asked for.

Decided here, because the formula leaves it open:

- *tau and max are those of the other visible entries of the row before planting*: the bar that the needle has to
  clear, wherever it stood itself. Entry j + 1 pools the same tokens through its overlap, so planting moves it too; its
  old value stays in the bar (otherwise a neighbour that rises with the needle could put strength 1 out of reach), and
  the rank that is reported is counted in the row as it is after planting.
- *A query inside its own window* (t = 4j + 3) has its head gates changed by the planting, and with them the whole row.
  The bar is then that of the other entries under the changed gates.
- *Ideal* is the reference's formulas without any rounding and without both quantisations: fp32 for the keys of the
  whole sequence, fp64 for whatever a needle changes. Weights are the stored values, dequantised; the RoPE table is the
  reference's. The Hadamard rotation is left out, since it cancels from an exact dot product.

The score of an entry depends on alpha only through rows that are linear in alpha before the softmax and the norm, so a
step of the bisection costs a pooled window and one key, whatever the hidden size. It need not grow steadily with
alpha: the bracket comes from doubling alpha until the target is passed, and bisection keeps the first crossing.
`Planter` computes the keys of a sequence once and plants any number of needles one after another.

Letters: T tokens, E entries, V visible entries, H heads, D index head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffcheck.refimpl.compressor import WINDOW, pool_windows, rms_norm, softmax_pool, window_slots
from diffcheck.refimpl.config import IndexerConfig
from diffcheck.refimpl.errors import InputError
from diffcheck.refimpl.indexer import check_inputs
from diffcheck.refimpl.linear import exact_matmul, row_tiled_product
from diffcheck.refimpl.rotation import inverse_frequencies, rope_table
from diffcheck.refimpl.weights import IndexerWeights, dequantise_weight

SMALLEST_STEP = 2.0**-10
LARGEST_STEP = 2.0**6
"""The bracket runs from this share of the rows' own length to this multiple of it."""
BISECTIONS = 60
DEFAULT_STRENGTHS = (1.0, 0.25, 0.5)


class Unreachable(InputError):
    """No alpha gives the needle the strength that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlePlan:
    """A needle to plant: query position, depth in 0..1 over the visible entries, strength."""

    query: int
    depth: float
    strength: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedNeedle:
    """A planted needle; scores are ideal ones.

    x: bf16 [T, hidden], the hidden states after planting (not a copy when several were planted: all of those share
    the final one). entry: its number j; tokens 4j .. 4j+3 changed. alpha: factor of the gradient. change: length of
    what was added as a multiple of the four rows' own length. strength: asked for; target: the score that means;
    unrounded: score that bisection found; score: after x was rounded to bf16; reached: the strength that `score`
    means. tau, maximum: the bar, see the module. rank: visible entries that score strictly more, after planting.
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
) -> PlantedNeedle:
    """Plant one needle in x [T, hidden] bf16 (left as it is), qr [T, q_lora] bf16; see the module and `Planter.plant`.

    Raises InputError as `Planter` and `Planter.plant` do.
    """
    return Planter(config, weights, x, qr).plant(query=query, depth=depth, strength=strength)


def plant_needles(
    config: IndexerConfig, weights: IndexerWeights, x: Tensor, qr: Tensor, plans: Sequence[NeedlePlan]
) -> tuple[Tensor, tuple[PlantedNeedle, ...]]:
    """Plant several needles one after another: (x bf16 [T, hidden] with all of them, the needles in order).

    Each needle reports its score at its own planting; a later one may move it by the little that the changed rows
    mean to another query. Raises InputError as `plant_needle`, and when two of them would share a token or stand in
    neighbouring entries, which pool the same tokens.
    """
    for plan in plans:
        _check_plan(config, x.shape[0], plan.query, plan.depth, plan.strength)
    entries = sorted((entry_at(plan.query, plan.depth), plan.query) for plan in plans)
    for (left, first), (right, second) in zip(entries, entries[1:], strict=False):
        if right - left < 2:
            raise InputError(
                f"needles of queries {first} and {second} are at entries {left} and {right}, expected them 2 apart"
            )
    planter = Planter(config, weights, x, qr)
    planted = tuple(planter.plant(query=p.query, depth=p.depth, strength=p.strength) for p in plans)
    return planter.x, planted


def default_needles(
    length: int, k: int, *, count: int = 8, strengths: Sequence[float] = DEFAULT_STRENGTHS
) -> tuple[NeedlePlan, ...]:
    """The needles of a synthetic run: queries near the end of `length` tokens, depths spread evenly, strengths in turn.

    k is index_topk. There are fewer than `count` when the visible entries do not hold that many apart. Raises
    InputError when even the last token sees no more than k entries, or when there is no strength.
    """
    visible = length // WINDOW
    if visible <= k:
        raise InputError(
            f"{length} tokens give {visible} entries, expected more than index_topk {k}: a needle cannot be lost there"
        )
    if count < 1 or not strengths:
        raise InputError(f"count is {count} with {len(strengths)} strengths, expected at least one of each")
    # queries no further back than a sixteenth of the text, and all of them with more than k visible entries
    room = min(length - 1 - (WINDOW * (k + 1) - 1), length // 16)
    # a query row's own window, and its neighbours', stay out of reach: the deepest needle ends before the queries
    deepest = (length - 1 - room) // WINDOW - 2
    count = max(1, min(count, deepest // 4, room + 1))
    plans = []
    for i in range(count):
        query = length - 1 - i * room // max(count, 1)
        entry = max(0, min(round((i + 0.5) / count * deepest), deepest))
        # the middle of the range of depths that floor to this entry
        depth = (entry + 0.5) / max((query + 1) // WINDOW - 1, 1)
        plans.append(NeedlePlan(query=query, depth=min(depth, 1.0), strength=strengths[i % len(strengths)]))
    return tuple(plans)


def entry_at(query: int, depth: float) -> int:
    """Entry number at `depth` for a query position: floor(depth * (visible - 1))."""
    return math.floor(depth * ((query + 1) // WINDOW - 1))


def _check_plan(config: IndexerConfig, length: int, query: int, depth: float, strength: float) -> None:
    if not 0 <= query < length:
        raise InputError(f"needle query is {query}, expected a token position in 0..{length - 1}")
    visible = (query + 1) // WINDOW
    if visible <= config.index_topk:
        raise InputError(
            f"query {query} sees {visible} entries, expected more than index_topk {config.index_topk}: "
            "everything is selected there, a needle would be vacuous"
        )
    if not 0 <= depth <= 1:
        raise InputError(f"needle depth is {depth}, expected 0..1 (beyond 1 the entry is not visible to the query)")
    if not math.isfinite(strength):
        raise InputError(f"needle strength is {strength}, expected a finite number")


@dataclass(frozen=True, slots=True)
class _Window:
    """What two windows give, fp64 [8, 2D]: kv and gate + ape of tokens 4j-4 .. 4j+3 (absent ones: kv 0, gate -inf)."""

    kv: Tensor
    gate: Tensor


class Planter:
    """The ideal scores of one sequence, and needles planted into it; `x` is its bf16 [T, hidden] so far.

    Computing the keys takes 4 * D * hidden multiplications a token, once. Raises InputError for x, qr or weights that
    do not fit the config.
    """

    def __init__(self, config: IndexerConfig, weights: IndexerWeights, x: Tensor, qr: Tensor) -> None:
        weights.check(config)
        check_inputs(config, x, qr, 0, None, None)
        self.config, self.weights, self.qr = config, weights, qr
        self.x = x.clone()
        inv_freq = inverse_frequencies(config.compress_rope_theta, config.rope_head_dim, config.yarn)
        cos, sin = rope_table(torch.arange(x.shape[0]), inv_freq)
        self._table = (cos.double().to(x.device), sin.double().to(x.device))
        # kv and gate columns together, so that every product reads x once
        self._project = torch.cat((weights.wkv, weights.wgate)).double()
        self._ape = weights.ape.double()
        self._wq_b = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block)
        with torch.no_grad(), exact_matmul():
            self._keys = self._all_keys()

    def _all_keys(self) -> Tensor:
        """Ideal keys fp32 [E, D]."""
        entries = self.x.shape[0] // WINDOW
        projected = row_tiled_product(self.x[: WINDOW * entries], self._project.float())
        kv, gate = projected.unflatten(0, (entries, WINDOW)).chunk(2, dim=-1)
        gate = gate + self._ape.float()
        before = torch.zeros_like(kv[:1]), torch.full_like(kv[:1], -torch.inf)
        pooled = pool_windows(torch.cat((before[0], kv)), torch.cat((before[1], gate)))
        normed = rms_norm(pooled, self.weights.norm, self.config.rms_norm_eps)
        return self._rotate(normed, WINDOW * torch.arange(entries, device=self.x.device))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on the last dims of x [n, ..., D] in x's own precision; `apply_rope` of the reference is fp32 only."""
        cos, sin = (table[positions].to(x.dtype) for table in self._table)
        shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
        cos, sin = cos.view(shape), sin.view(shape)
        head, tail = x.split((x.shape[-1] - self.config.rope_head_dim, self.config.rope_head_dim), dim=-1)
        a, b = tail.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        return torch.cat((head, turned), dim=-1)

    def query_vectors(self, query: int) -> Tensor:
        """Ideal query of one row, rotated: fp64 [H, D]."""
        flat = self._wq_b.double() @ self.qr[query].double()
        q = flat.view(1, self.config.index_n_heads, self.config.index_head_dim)
        return self._rotate(q, torch.tensor([query], device=q.device))[0]

    def head_gates(self, row: Tensor) -> Tensor:
        """Ideal gates of one row of x: fp64 [H], times head_dim^-0.5 * heads^-0.5."""
        return self.weights.weights_proj.double() @ row.double() * self.config.gate_scale

    def row_scores(self, query: int) -> Tensor:
        """Ideal scores of a query row over its visible entries, fp64 [V] (the keys in it are fp32)."""
        active = self._active(self.query_vectors(query), (query + 1) // WINDOW)
        return self.head_gates(self.x[query]) @ active

    def _active(self, q: Tensor, visible: int) -> Tensor:
        """relu(q . k) fp64 [H, V]."""
        return (q @ self._keys[:visible].double().T).relu()

    def measure(self, query: int, entry: int) -> tuple[float, int]:
        """(ideal score, rank) of an entry in a query row of the present x; rank 0 is best.

        Raises InputError when the query is outside the sequence or does not see the entry.
        """
        if not 0 <= query < self.x.shape[0] or not 0 <= entry < (query + 1) // WINDOW:
            raise InputError(f"entry {entry} is not visible to query {query} of {self.x.shape[0]} tokens")
        scores = self.row_scores(query)
        return float(scores[entry]), int((scores > scores[entry]).sum())

    def window(self, entry: int, rows: Tensor) -> _Window:
        """Projections of the entry's own rows (fp64 [4, hidden]) and of the window before it, as it is in x."""
        columns = self._project.shape[0] // 2
        kv = torch.zeros(2 * WINDOW, columns, dtype=torch.float64, device=rows.device)
        gate = torch.full_like(kv, -torch.inf)
        first = WINDOW * entry
        tokens = [(WINDOW, rows)]
        if entry:
            tokens.append((0, self.x[first - WINDOW : first].double()))
        for at, own in tokens:
            kv[at : at + WINDOW], gate[at : at + WINDOW] = (own @ self._project.T).chunk(2, dim=-1)
            gate[at : at + WINDOW] += self._ape
        return _Window(kv, gate)

    def key(self, entry: int, window: _Window) -> Tensor:
        """Ideal key fp64 [D] from an entry's two windows."""
        windows = (t.unflatten(0, (2, WINDOW)) for t in (window.kv, window.gate))
        kv, gate = (window_slots(t) for t in windows)
        normed = rms_norm(softmax_pool(kv, gate), self.weights.norm, self.config.rms_norm_eps)
        return self._rotate(normed, torch.tensor([WINDOW * entry], device=normed.device))[0]

    def gradient(self, query: int, entry: int, rows: Tensor | None = None) -> Tensor:
        """Gradient fp64 [4, hidden] of the ideal score (query, entry) with respect to the entry's own four rows of x.

        rows: where it is taken, fp64 [4, hidden]; as they are in x by default. The head gates count when the query is
        one of those rows. Where a head's dot is zero its relu has slope 0.
        """
        first = WINDOW * entry
        rows = self.x[first : first + WINDOW].double() if rows is None else rows
        with torch.enable_grad():
            rows = rows.detach().clone().requires_grad_()
            row = rows[query - first] if first <= query < first + WINDOW else self.x[query].double()
            dots = self.query_vectors(query) @ self.key(entry, self._differentiable(entry, rows))
            score = (self.head_gates(row) * dots.relu()).sum()
            (gradient,) = torch.autograd.grad(score, rows)
        return gradient

    def _differentiable(self, entry: int, rows: Tensor) -> _Window:
        fixed = self.window(entry, rows.detach())
        kv, gate = (rows @ self._project.T).chunk(2, dim=-1)
        return _Window(
            torch.cat((fixed.kv[:WINDOW], kv)), torch.cat((fixed.gate[:WINDOW], gate + self._ape))
        )

    def plant(self, *, query: int, depth: float, strength: float, lines: int = 1) -> PlantedNeedle:
        """Plant a needle for token position `query` at `depth` (0 first entry, 1 last visible one); changes self.x.

        lines: how many straight lines may be tried in a row, each along the gradient at the nearest point of the one
        before; 1 is the definition. Raises InputError when the row sees no more than index_topk entries (vacuous), the
        depth is outside 0..1, or the row's other scores leave no room (max = tau), and its subclass `Unreachable` when
        the gradient is zero or no alpha within LARGEST_STEP times the rows' own length reaches the target.
        """
        _check_plan(self.config, self.x.shape[0], query, depth, strength)
        entry = entry_at(query, depth)
        with torch.no_grad(), exact_matmul():
            return self._plant(query, entry, depth, strength, lines)

    def _plant(self, query: int, entry: int, depth: float, strength: float, lines: int) -> PlantedNeedle:
        first, k = WINDOW * entry, self.config.index_topk
        place = f"needle of query {query} at depth {depth:g} (entry {entry})"
        q = self.query_vectors(query)
        others = self._active(q, (query + 1) // WINDOW)
        others = torch.cat((others[:, :entry], others[:, entry + 1 :]), dim=1)
        own = query - first if first <= query < first + WINDOW else None
        gates = self.head_gates(self.x[query])

        def bar(gates: Tensor) -> tuple[float, float]:
            best = (gates @ others).topk(k).values
            return float(best[-1]), float(best[0])

        fixed = bar(gates)
        if not fixed[1] > fixed[0]:
            raise InputError(f"{place}: the row's best score equals its {k}-th, expected a spread")
        before = rows = self.x[first : first + WINDOW].double()
        shortest = SMALLEST_STEP * float(before.norm())
        for line in range(lines):
            direction = self.gradient(query, entry, rows)
            length = float(direction.norm())
            if not length > 0:
                break
            along = _Line(self, query, entry, rows, direction, q, gates, own)

            def excess(alpha: float, along: _Line = along) -> float:
                score, gates = along.at(alpha)
                tau, top = fixed if own is None else bar(gates)
                return score - (tau + strength * (top - tau))

            alpha, found = find_crossing(excess, shortest / length)
            rows = rows + alpha * direction
            if found:
                return self._settle(query, entry, strength, before, rows, bar, alpha, line + 1, along.at(alpha)[0])
            if alpha == 0:
                break
        raise Unreachable(
            f"{place}: no change up to {LARGEST_STEP:g} times its rows reaches strength {strength:g}, "
            "expected a strength nearer to 0 or another depth"
        )

    def _settle(
        self,
        query: int,
        entry: int,
        strength: float,
        before: Tensor,
        rows: Tensor,
        bar: Callable[[Tensor], tuple[float, float]],
        alpha: float,
        lines: int,
        unrounded: float,
    ) -> PlantedNeedle:
        """Round the found rows into x, refresh the keys, and measure what came of it."""
        own = slice(WINDOW * entry, WINDOW * entry + WINDOW)
        self.x[own] = rows.bfloat16()
        self._refresh(entry)
        # the rounded row has gates, and if the query is in its own window also a bar, of its own
        gates = self.head_gates(self.x[query])
        tau, maximum = bar(gates)
        key = self.key(entry, self.window(entry, self.x[own].double()))
        score = float(gates @ (self.query_vectors(query) @ key).relu())
        return PlantedNeedle(
            x=self.x,
            query=query,
            entry=entry,
            alpha=alpha,
            lines=lines,
            change=float((self.x[own].double() - before).norm() / before.norm()),
            strength=strength,
            target=tau + strength * (maximum - tau),
            unrounded=unrounded,
            score=score,
            reached=(score - tau) / (maximum - tau),
            tau=tau,
            maximum=maximum,
            rank=self.measure(query, entry)[1],
        )

    def _refresh(self, entry: int) -> None:
        """Recompute the keys that pool the window of `entry`: its own and the next one."""
        for number in (entry, entry + 1):
            first = WINDOW * number
            if number < self._keys.shape[0]:
                window = self.window(number, self.x[first : first + WINDOW].double())
                self._keys[number] = self.key(number, window).float()


class _Line:
    """The score (query, entry) along rows + alpha * direction; one pooled window and one key a point."""

    def __init__(
        self,
        planter: Planter,
        query: int,
        entry: int,
        rows: Tensor,
        direction: Tensor,
        q: Tensor,
        gates: Tensor,
        own: int | None,
    ) -> None:
        self.planter, self.entry, self.q = planter, entry, q
        self.start = planter.window(entry, rows)
        moved = planter.window(entry, rows + direction)
        # linear in alpha; an absent previous window is -inf on both sides
        self.kv_step = moved.kv - self.start.kv
        self.gate_step = (moved.gate - self.start.gate).nan_to_num(nan=0.0)
        self.gates = gates if own is None else planter.head_gates(rows[own])
        self.gates_step = torch.zeros_like(gates) if own is None else planter.head_gates(direction[own])

    def at(self, alpha: float) -> tuple[float, Tensor]:
        """(ideal score, head gates fp64 [H]) at alpha."""
        gates = self.gates + alpha * self.gates_step
        window = _Window(self.start.kv + alpha * self.kv_step, self.start.gate + alpha * self.gate_step)
        return float(gates @ (self.q @ self.planter.key(self.entry, window)).relu()), gates


def find_crossing(excess: Callable[[float], float], smallest: float) -> tuple[float, bool]:
    """(alpha, True): the first change of sign of `excess` that doubling alpha meets, refined by bisection.

    The search runs along the direction that raises the score when it is too low (alpha > 0), and against it when it
    is too high. `excess` must be continuous; it need not be monotone. Without a change of sign the answer is
    (alpha, False) with the smallest alpha that gains nine tenths of the most that any tried one does (scores level
    off, and the rows should not grow for nothing).
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
        if outside > smallest * LARGEST_STEP / SMALLEST_STEP:
            enough = 0.9 * max(gains)[0]
            return next(alpha for gain, alpha in gains if gain >= enough), False
    for _ in range(BISECTIONS):
        middle = (inside + outside) / 2
        if (excess(sign * middle) < 0) == (at_zero < 0):
            inside = middle
        else:
            outside = middle
    return sign * outside, True
