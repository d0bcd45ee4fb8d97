"""What the records say together: estimates with intervals, paired differences, chances of being best, mixed formats.

A `Sample` holds one number for each recipe, layer and row (recall of a query row, or 0 and 1 for a needle or an answer;
NaN where it was not measured). A recipe's estimate is the mean over layers of the mean over the rows of a layer.

Rows are resampled in groups (`statistics.resampling_groups`: sequences where there are several, else blocks of rows),
and a resample draws the same groups in every layer and for every recipe. So what makes a text, or a place in it, hard
is common to all and cancels in differences, and the share of resamples in which a recipe is the best one is the
probability of that. The intervals are the percentile bootstrap's, as in `statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..statistics import LEVEL, RESAMPLES
from .halving import best_chances, front

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """values float [recipes, layers, rows], NaN where not measured; groups int [rows], what is resampled together."""

    values: Array = field(repr=False)
    groups: NDArray[np.int64] = field(repr=False)
    seed: int = 0
    resamples: int = RESAMPLES

    @cached_property
    def _sums(self) -> tuple[Array, Array]:
        """Sums and numbers of rows by group: [recipes, layers, groups] each."""
        _, number = np.unique(self.groups, return_inverse=True)
        members = np.eye(int(number.max(initial=-1)) + 1)[number]
        known = ~np.isnan(self.values)
        return np.where(known, self.values, 0.0) @ members, known @ members

    @cached_property
    def _draws(self) -> Array:
        """How often each resample draws each group: [resamples, groups]."""
        count = self._sums[0].shape[-1]
        drawn = np.random.default_rng(self.seed).multinomial(count, np.full(count, 1 / count), size=self.resamples)
        return drawn.astype(np.float64)

    @property
    def group_count(self) -> int:
        """How many groups there are; with one there is no interval."""
        return int(self._sums[0].shape[-1])

    @cached_property
    def by_layer(self) -> Array:
        """Means over the rows of each layer: [recipes, layers], NaN where nothing was measured."""
        sums, counts = (part.sum(-1) for part in self._sums)
        return _ratio(sums, counts)

    @cached_property
    def estimates(self) -> Array:
        """Mean over layers: [recipes]."""
        return _mean(self.by_layer)

    @cached_property
    def _layers_resampled(self) -> Array:
        sums, counts = self._sums
        return _ratio(np.einsum("bg,rlg->brl", self._draws, sums), np.einsum("bg,rlg->brl", self._draws, counts))

    @cached_property
    def resampled(self) -> Array:
        """The estimates of each resample: [resamples, recipes]."""
        return _mean(self._layers_resampled)

    def interval(self, recipe: int, level: float = LEVEL) -> tuple[float, float] | None:
        """Of a recipe's estimate; None with fewer than two groups."""
        return self._between(self.resampled[:, recipe], level)

    def layer_interval(self, recipe: int, layer: int, level: float = LEVEL) -> tuple[float, float] | None:
        """Of a recipe's mean in one layer."""
        return self._between(self._layers_resampled[:, recipe, layer], level)

    def difference(
        self, first: int, second: int, level: float = LEVEL
    ) -> tuple[float, tuple[float, float] | None] | None:
        """first - second, paired: over the rows on which both were measured. None if there are none."""
        paired = self.values[first] - self.values[second]
        if np.isnan(paired).all():
            return None
        sample = Sample(values=paired[None], groups=self.groups, seed=self.seed, resamples=self.resamples)
        return float(sample.estimates[0]), sample.interval(0, level)

    def chances(self, costs: Sequence[float]) -> Array:
        """Probability of each recipe that none of at most its cost has a better estimate; equals are best together."""
        resampled = self.estimates[None] if self.group_count < 2 else self.resampled
        return best_chances(costs, np.where(np.isnan(resampled), -np.inf, resampled))

    def _between(self, resampled: Array, level: float) -> tuple[float, float] | None:
        known = resampled[~np.isnan(resampled)]
        if self.group_count < 2 or not known.size:
            return None
        low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def _ratio(sums: Array, counts: Array) -> Array:
    found: Array = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return found


def _mean(layers: Array) -> Array:
    """Mean over the last axis, of what is known."""
    known = ~np.isnan(layers)
    return _ratio(np.where(known, layers, 0.0).sum(-1), known.sum(-1).astype(np.float64))


def wilson(kept: int, total: int, level: float = LEVEL) -> tuple[float, float] | None:
    """Interval of a share kept / total of independent trials (Wilson, 1927); it has a width also at 0 and 1."""
    if not total:
        return None
    from statistics import NormalDist

    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = kept / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / total + spread / (4 * total)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A format for each layer: recipe numbers by layer, which layers stay below the floor, mean bytes and mean gain."""

    choice: tuple[int, ...]
    below: tuple[int, ...]
    bytes: float
    estimate: float


def cheapest_per_layer(sample: Sample, costs: Sequence[float], floor: float) -> Mixed:
    """For each layer the cheapest recipe whose interval there lies above the floor, the better one among equals.

    Where none does, the best one; its layer is listed in `below`. Without intervals the estimate must reach the floor.
    """
    recipes, layers = sample.by_layer.shape
    choice, below = [], []
    for layer in range(layers):
        means = np.where(np.isnan(sample.by_layer[:, layer]), -np.inf, sample.by_layer[:, layer])
        sure = [r for r in range(recipes) if least(sample, r, layer) >= floor]
        if sure:
            choice.append(min(sure, key=lambda r: (costs[r], -means[r])))
        else:
            choice.append(min(range(recipes), key=lambda r: (-means[r], costs[r])))
            below.append(layer)
    return Mixed(
        choice=tuple(choice),
        below=tuple(below),
        bytes=float(np.mean([costs[r] for r in choice])),
        estimate=float(np.mean([sample.by_layer[r, layer] for layer, r in enumerate(choice)])),
    )


def least(sample: Sample, recipe: int, layer: int) -> float:
    """The lower end of a recipe's interval in a layer, or its estimate without one; -inf where not measured."""
    mean = sample.by_layer[recipe, layer]
    if np.isnan(mean):
        return -np.inf
    interval = sample.layer_interval(recipe, layer)
    return float(mean) if interval is None else interval[0]


def cheapest_uniform(sample: Sample, costs: Sequence[float], floor: float) -> int | None:
    """The cheapest recipe that lies above the floor in every layer, as `cheapest_per_layer` asks; None without one."""
    layers = range(sample.by_layer.shape[1])
    sure = [r for r in range(len(costs)) if all(least(sample, r, layer) >= floor for layer in layers)]
    return min(sure, key=lambda r: (costs[r], -sample.estimates[r]), default=None)


def pareto(costs: Sequence[float], gains: ArrayLike) -> list[int]:
    """Recipes that nothing dominates, by rising cost; those without a gain are not among them."""
    known = [float(gain) if not np.isnan(gain) else -np.inf for gain in np.asarray(gains, np.float64)]
    return front(costs, known)


def as_list(interval: tuple[float, float] | None) -> Any:
    """An interval as JSON."""
    return None if interval is None else list(interval)
