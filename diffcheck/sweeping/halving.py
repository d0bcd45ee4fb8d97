"""Multi-fidelity: every recipe on a few rows, the better ones on more (successive halving, for two objectives).

With h halvings the rows come in h + 1 rungs, each adding up to four times the rows of the one before. After a rung, in
each layer by itself, these stay:

- the better half, by Pareto ranks of (bytes, objective): the whole front, then the front of what is left, …;
- and every recipe that could still be the best one for its bytes (probability of at least CHANCE, by resampling): few
  rows say little, and what is not told apart is not dropped.

(Successive halving: Jamieson and Talwalkar, 2016; ranks of fronts: Deb et al., 2002.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FACTOR = 4
LEAST_ROWS = 8
CHANCE = 0.05


def rungs(rows: int, halvings: int) -> list[int]:
    """Rows in all after each rung, the last one being `rows`; fewer rungs where the first would have too few."""
    sizes = [rows]
    while len(sizes) <= halvings and sizes[0] // FACTOR >= LEAST_ROWS:
        sizes.insert(0, sizes[0] // FACTOR)
    return sizes


def front(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Indices of what nothing dominates, by rising cost: no other costs at most as much, gains at least as much, and
    differs in one of both. Equals stay together."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    kept: list[int] = []
    best = -np.inf
    for i in order:
        if gains[i] > best:
            best = gains[i]
            kept.append(i)
        elif kept and gains[i] == gains[kept[-1]] and costs[i] == costs[kept[-1]]:
            kept.append(i)
    return kept


def survivors(costs: Sequence[float], gains: Sequence[float], chances: Sequence[float]) -> list[int]:
    """Indices, ascending, of what is measured on more rows; NaN gains rank last."""
    gains = [-np.inf if np.isnan(gain) else gain for gain in gains]
    left, kept = list(range(len(costs))), set[int]()
    while left and 2 * len(kept) < len(costs):
        peeled = {left[i] for i in front([costs[i] for i in left], [gains[i] for i in left])}
        if kept:  # of a later front only what is needed, the best first
            room = -(-len(costs) // 2) - len(kept)
            peeled = set(sorted(peeled, key=lambda i: -gains[i])[:room])
        kept |= peeled
        left = [i for i in left if i not in kept]
        if not peeled:
            break
    return sorted(kept | {i for i, chance in enumerate(chances) if chance >= CHANCE})


def best_chances(costs: Sequence[float], resampled: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of each that nothing of at most its cost is better. resampled: [resamples, n]."""
    cost = np.asarray(costs)
    tops = {c: resampled[:, cost <= c].max(axis=1) for c in set(costs)}
    return np.array([np.mean(resampled[:, i] == tops[c]) for i, c in enumerate(costs)])
