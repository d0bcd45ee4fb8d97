"""Confidence intervals for means over query rows.

Neighbouring query rows of one sequence look at almost the same entries, so they are not independent: an
interval that resampled single rows would be far too narrow. What is resampled is therefore a *group* of rows.
Where there are several sequences (at least `SEVERAL`) a group is a sequence; otherwise it is a block of
consecutive rows of one sequence, about sqrt(rows) long, which keeps the correlation inside a block and still
leaves sqrt(rows) blocks.

The estimate is a ratio of sums, sum(values) / sum(weights): with unit weights the mean over rows, with counts
in both a pooled share ("of the n entries in this bin, over all rows, this part was selected"). A resample
draws as many groups as there are, with replacement, and forms the ratio again; the interval is the central
`level` part of those ratios (the percentile bootstrap of Efron, 1979). A resample without any weight has no
ratio and is left out.

What the interval does not know: with few groups it is somewhat too narrow, and where all groups agree (a
share of exactly 0 or 1) it has no width. With one group there is no interval at all, only an estimate.

Two recipes measured on the same rows are compared by the difference *in each row* (`paired_difference`): what
makes a row hard is common to both and cancels.

Whether such a difference could be chance is asked by flipping signs (`sign_flip_test`): were the two recipes
alike, each group's difference might as well have had the other sign. With up to `EXACT_GROUPS` groups all flips are
tried, with more of them 2^16 random ones. n groups cannot give a p below 2^(1-n), however large the difference.
Where many cases are tested, some p are small by chance; `holm` raises them so that the chance of one false alarm among
all of them stays at the level asked for (Holm, 1979).

Everything is numpy on the host and seeded: the same input gives the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
RESAMPLES = 2000
EXACT_GROUPS = 16
SEVERAL = 5  # fewer sequences than this have too few distinct resamples to say anything about their spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate, its interval (None with fewer than two groups) and the number of groups resampled."""

    estimate: float
    ci: tuple[float, float] | None
    groups: int


def resampling_groups(rows: int, *, sequences: ArrayLike | None = None, block: int | None = None) -> NDArray[np.int64]:
    """Divide rows into the groups that are resampled together.

    Args:
        rows: number of rows, in the order of their positions.
        sequences: int [rows], which sequence each row belongs to; None if all belong to one. The rows of one
            sequence stand together.
        block: rows in a block where blocks are used; ceil(sqrt(rows)) by default.

    Returns:
        int64 [rows], group numbers 0, 1, …: one for each sequence if there are at least `SEVERAL`, else one
        for each block of consecutive rows. A block never crosses from one sequence into the next.

    Raises:
        ValueError: `sequences` has another length or its sequences are not contiguous, or `block` is below 1.
    """
    if block is not None and block < 1:
        raise ValueError(f"a block needs at least one row, not {block}")
    sequence = np.zeros(rows, np.int64) if sequences is None else np.asarray(sequences)
    if sequence.shape != (rows,):
        raise ValueError(f"sequences has shape {sequence.shape}, expected ({rows},)")
    if rows == 0:
        return np.zeros(0, np.int64)
    first = np.concatenate([[True], sequence[1:] != sequence[:-1]])
    number = np.cumsum(first) - 1
    count = int(number[-1]) + 1
    if count != len(np.unique(sequence)):
        raise ValueError("the rows of a sequence must stand together")
    if count >= SEVERAL:
        return number.astype(np.int64)
    length = int(np.ceil(np.sqrt(rows))) if block is None else block
    within = np.arange(rows) - np.flatnonzero(first)[number]
    starts = within % length == 0
    return (np.cumsum(starts) - 1).astype(np.int64)


def bootstrap(
    values: ArrayLike,
    *,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Estimate sum(values) / sum(weights) with a percentile bootstrap interval over groups.

    Args:
        values: float or int [rows].
        groups: int [rows], the group of each row, from `resampling_groups`.
        weights: float or int [rows], not negative; all 1 by default, for a mean.
        level: the share of resamples inside the interval, between 0 and 1.
        resamples: number of resamples.
        seed: seed of the generator.

    Returns:
        The interval, or None if there are no rows or no weight. A NaN in `values` makes the whole result NaN.

    Raises:
        ValueError: shapes differ, a weight is negative, or `level` or `resamples` is out of range.
    """
    value = np.asarray(values, np.float64)
    weight = np.ones_like(value) if weights is None else np.asarray(weights, np.float64)
    group = np.asarray(groups)
    if value.ndim != 1 or not value.shape == weight.shape == group.shape:
        raise ValueError(f"shapes {value.shape}, {weight.shape} and {group.shape} are not one equal [rows]")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level {level} must lie between 0 and 1 and resamples {resamples} be at least 1")
    if (weight < 0).any():
        raise ValueError("weights must not be negative")
    if weight.sum() == 0:
        return None
    _, number = np.unique(group, return_inverse=True)
    value_sums, weight_sums = np.bincount(number, value), np.bincount(number, weight)
    count = len(value_sums)
    estimate = float(value_sums.sum() / weight_sums.sum())
    if count < 2:
        return Interval(estimate=estimate, ci=None, groups=count)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    drawn_values, drawn_weights = draws @ value_sums, draws @ weight_sums
    kept = drawn_weights > 0
    ratios = drawn_values[kept] / drawn_weights[kept]
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate=estimate, ci=(float(low), float(high)), groups=count)


def paired_difference(
    *,
    first: ArrayLike,
    second: ArrayLike,
    groups: ArrayLike,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Estimate the mean over rows of first - second, the same rows measured twice, with its interval.

    Args:
        first: float [rows], a metric of one recipe in each row.
        second: float [rows], the same metric of another recipe in the same rows.
        groups: int [rows], from `resampling_groups`.
        level: see `bootstrap`.
        resamples: see `bootstrap`.
        seed: see `bootstrap`.

    Returns:
        The interval, or None without rows. The two differ by more than their noise if it does not contain 0.

    Raises:
        ValueError: the shapes differ, or as in `bootstrap`.
    """
    left, right = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if left.shape != right.shape:
        raise ValueError(f"a paired difference needs the same rows twice, not {left.shape} and {right.shape}")
    return bootstrap(left - right, groups=groups, level=level, resamples=resamples, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignFlip:
    """p of a mean difference, two-sided, the number of groups, and the smallest p that so many groups can give."""

    p: float
    groups: int
    smallest: float


def sign_flip_test(difference: ArrayLike, *, groups: ArrayLike, seed: int = 0) -> SignFlip:
    """Test whether a mean difference is zero by flipping the signs of whole groups of rows.

    Args:
        difference: float [rows], one recipe minus the other in each row; at least one row.
        groups: int [rows], from `resampling_groups`.
        seed: seed of the random flips, where there are too many to try all.

    Returns:
        The share of sign flips whose mean is at least as far from 0 as the one that was measured.

    Raises:
        ValueError: shapes differ or there is no row.
    """
    value, group = np.asarray(difference, np.float64), np.asarray(groups)
    if value.ndim != 1 or value.shape != group.shape or not len(value):
        raise ValueError(f"shapes {value.shape} and {group.shape} are not one equal [rows] of at least one row")
    _, number = np.unique(group, return_inverse=True)
    sums = np.bincount(number, value)
    count = len(sums)
    exact = count <= EXACT_GROUPS
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(1 << count)[:, None] >> np.arange(count)) & 1)
    else:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(1 << EXACT_GROUPS, count))
        signs[0] = 1.0  # what was measured is one of the flips, so p is never 0
    measured = abs(float(sums.sum()))
    # sums of the same numbers in another order differ in their last bits
    extreme = np.abs(signs @ sums) >= measured - 1e-12 * float(np.abs(sums).sum())
    return SignFlip(p=float(extreme.mean()), groups=count, smallest=(2.0 if exact else 1.0) / len(signs))


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Adjust p values of several tests by Holm's step-down method: fp64, the same order, at most 1."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * factors))
    return adjusted
