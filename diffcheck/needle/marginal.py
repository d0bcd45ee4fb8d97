"""Marginal needles: how strong a needle must be to be selected half of the time.

The same needles are planted again and again, weaker and stronger: strength 0 ties with the k-th place by the ideal
score, 1 with the best one, a negative one is lost. P(selected) rises from 0 to 1 with the strength; where it crosses
one half is the *strength at 50 %*. A deployment whose arithmetic hides weak signals needs a stronger needle, so the
shift of that point against the reference says what a precision costs where it matters: at the margin.

Intervals are bootstrapped over the needles (trials), the same resamples for the deployment and the reference, so that
the shift's interval knows that both saw the same needles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cases import Case
from ..inputs.needles import Planter, Unreachable, default_needles
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerConfig, IndexerWeights

DEFAULT_STRENGTHS = (-0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LINES = 16
RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One layer: `selected` bool [strengths, trials] by case name, `planted` bool of the same shape."""

    strengths: tuple[float, ...]
    planted: Tensor
    selected: dict[tuple[str, str], Tensor]


def sweep(
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    qr: Tensor,
    cases: Sequence[Case],
    *,
    trials: int = 32,
    strengths: Sequence[float] = DEFAULT_STRENGTHS,
    device: str = "cpu",
) -> Sweep:
    """Plant `trials` needles at each strength into x bf16 [T, hidden] and see which recipes select them.

    The needles' entries and queries are the same at every strength; one that cannot be had at some strength is left out
    there. Planting runs on the CPU, where x, qr and weights must be, the recipes on `device`. Raises InputError where
    the text is too short for a selection.
    """
    length, k, reference = x.shape[0], config.index_topk, Recipe.reference(config)
    recipes = {("reference", "checkpoint"): reference}
    recipes |= {(c.precision, c.theta.label): c.recipe for c in cases if c.recipe.differences(reference)}
    planted: list[list[bool]] = []
    selected: dict[tuple[str, str], list[list[bool]]] = {name: [] for name in recipes}
    for strength in strengths:
        plans = default_needles(length, k, count=trials, strengths=(strength,))
        planter, entries = Planter(config, weights, x, qr), []
        for plan in plans:
            try:
                needle = planter.plant(query=plan.query, depth=plan.depth, strength=strength, lines=LINES)
                entries.append(needle.entry)
            except Unreachable:
                entries.append(-1)
        planted.append([entry >= 0 for entry in entries])
        order = torch.tensor([plan.query for plan in plans]).argsort()
        queries = torch.tensor([plan.query for plan in plans])[order].to(device)
        pipeline = Pipeline(config, weights.to(device), planter.x.to(device), qr.to(device), queries=queries)
        row_of = order.argsort()
        for name, recipe in recipes.items():
            kept = pipeline.stage(recipe, "topk").cpu()[row_of]
            selected[name].append([entry in row for entry, row in zip(entries, kept.tolist(), strict=True)])
    return Sweep(
        strengths=tuple(strengths),
        planted=torch.tensor(planted),
        selected={name: torch.tensor(rows) for name, rows in selected.items()},
    )


def strength_at_half(strengths: Sequence[float], found: np.ndarray, planted: np.ndarray) -> float | None:
    """Where P(selected) crosses one half, by linear interpolation; None if it does not within the strengths.

    found, planted: [strengths, trials]; P is taken over the trials planted at that strength and made to rise by the
    pool adjacent violators rule (Ayer et al. 1955), weighted with their number.
    """
    weights = planted.sum(1).astype(float)
    known = weights > 0
    levels = np.asarray(strengths, dtype=float)[known]
    p = rising((found & planted).sum(1)[known] / weights[known], weights[known])
    if not len(p) or p[0] > 0.5 or p[-1] < 0.5:
        return None
    above = int(np.argmax(p >= 0.5))
    if above == 0 or p[above] == p[above - 1]:
        return float(levels[above])
    step = (0.5 - p[above - 1]) / (p[above] - p[above - 1])
    return float(levels[above - 1] + step * (levels[above] - levels[above - 1]))


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The rising sequence closest to `values` in weighted squares."""
    blocks: list[list[float]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            v2, w2, n2 = blocks.pop()
            v1, w1, n1 = blocks.pop()
            blocks.append([(v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2])
    return np.concatenate([np.full(int(n), v) for v, _, n in blocks]) if blocks else np.zeros(0)


def evaluate_sweep(found: Sweep, *, seed: int = 0) -> list[dict[str, Any]]:
    """A record for each case: P(selected) at each strength, strength at 50 %, its shift, and 95 % intervals.

    An interval is None when the crossing lies outside the strengths in more than one resample of forty.
    """
    planted = found.planted.numpy()
    trials = planted.shape[1]
    draws = np.random.default_rng(seed).integers(trials, size=(RESAMPLES, trials))
    reference = found.selected["reference", "checkpoint"].numpy()
    base = [strength_at_half(found.strengths, reference[:, d], planted[:, d]) for d in draws]
    base_half = strength_at_half(found.strengths, reference, planted)
    records = []
    for (precision, theta), selected in found.selected.items():
        mine = selected.numpy()
        half = strength_at_half(found.strengths, mine, planted)
        resampled = [strength_at_half(found.strengths, mine[:, d], planted[:, d]) for d in draws]
        shifts = [None if a is None or b is None else a - b for a, b in zip(resampled, base, strict=True)]
        count = planted.sum(1)
        p = [float((m & q).sum() / n) if n else None for m, q, n in zip(mine, planted, count, strict=True)]
        records.append(
            {
                "precision": precision,
                "theta_setting": theta,
                "strengths": list(found.strengths),
                "trials": count.tolist(),
                "p_selected": p,
                "strength_50": half,
                "strength_50_ci": _interval(resampled),
                "shift": None if half is None or base_half is None else half - base_half,
                "shift_ci": _interval(shifts),
            }
        )
    return records


def _interval(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    if len(known) < 0.975 * len(values):
        return None
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)
