"""Intervals: resamples worked out by hand, properties, and how often an interval holds the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from diffcheck.statistics import SEVERAL, Interval, bootstrap, paired_difference, resampling_groups

examples = settings(max_examples=60, deadline=None)
values = st.lists(st.integers(-50, 50), min_size=4, max_size=40)


def test_blocks() -> None:
    # ten rows: ceil(sqrt 10) = 4 rows a block
    assert resampling_groups(10).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert resampling_groups(9).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert resampling_groups(5, block=2).tolist() == [0, 0, 1, 1, 2]
    assert resampling_groups(1).tolist() == [0]
    assert resampling_groups(0).tolist() == []


def test_blocks_stay_within_a_sequence_until_there_are_several() -> None:
    assert resampling_groups(7, sequences=[4, 4, 4, 2, 2, 2, 2], block=2).tolist() == [0, 0, 1, 2, 2, 3, 3]
    few, several = np.repeat(np.arange(SEVERAL - 1), 2), np.repeat(np.arange(SEVERAL), 2)
    assert resampling_groups(len(few), sequences=few, block=1).tolist() == list(range(len(few)))
    assert resampling_groups(len(several), sequences=several, block=1).tolist() == several.tolist()


def test_groups_refuse() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        resampling_groups(3, block=0)
    with pytest.raises(ValueError, match="has shape"):
        resampling_groups(3, sequences=[0, 0])
    with pytest.raises(ValueError, match="stand together"):
        resampling_groups(3, sequences=[0, 1, 0])


def test_bootstrap_of_two_groups() -> None:
    # Rows 1, 3 | 8, 8, 8: the mean is 28/5. A resample is the first group twice (2), one of each, or the
    # second twice (8), with chances 1/4, 1/2, 1/4: the 95 % interval is from 2 to 8, the central 40 % only
    # the middle.
    args = {"values": [1, 3, 8, 8, 8], "groups": [7, 7, 3, 3, 3]}
    assert bootstrap(**args) == Interval(estimate=5.6, ci=(2, 8), groups=2)
    assert bootstrap(**args, level=0.4) == Interval(estimate=5.6, ci=(5.6, 5.6), groups=2)


def test_bootstrap_is_a_ratio_of_sums() -> None:
    # 1 of 1, 0 of 3, and a group without any weight: 1/4 pooled, not the mean of 1 and 0. Drawing only the
    # empty group (chance 1/27) gives no ratio.
    got = bootstrap([1, 0, 0], weights=[1, 3, 0], groups=[0, 1, 2])
    assert got == Interval(estimate=0.25, ci=(0, 1), groups=3)
    assert bootstrap([0.25, 0, 0], weights=[0.25, 0.75, 0], groups=[0, 1, 2]) == got  # only ratios matter
    assert bootstrap([0, 0], weights=[0, 0], groups=[0, 1]) is None
    assert bootstrap([], groups=[]) is None
    assert bootstrap([4, 6], groups=[1, 1]) == Interval(estimate=5, ci=None, groups=1)


def test_bootstrap_keeps_nan() -> None:
    got = bootstrap([1, math.nan, 2, 3], groups=[0, 0, 1, 1])
    assert got is not None
    assert math.isnan(got.estimate)
    assert got.ci is not None
    assert all(map(math.isnan, got.ci))


def test_bootstrap_refuses() -> None:
    for bad, message in (
        ({"values": [1, 2], "groups": [0]}, "shapes"),
        ({"values": [1, 2], "groups": [0, 1], "weights": [1]}, "shapes"),
        ({"values": [[1, 2]], "groups": [[0, 1]]}, "shapes"),
        ({"values": [1, 2], "groups": [0, 1], "weights": [1, -1]}, "negative"),
        ({"values": [1, 2], "groups": [0, 1], "level": 1}, "level"),
        ({"values": [1, 2], "groups": [0, 1], "resamples": 0}, "resamples"),
    ):
        with pytest.raises(ValueError, match=message):
            bootstrap(**bad)
    with pytest.raises(ValueError, match="same rows"):
        paired_difference(first=[1, 2], second=[1], groups=[0, 1])


@examples
@given(values)
def test_bootstrap_properties(rows: list[int]) -> None:
    groups = resampling_groups(len(rows))
    got = bootstrap(rows, groups=groups)
    assert got is not None
    assert got.ci is not None
    assert got.estimate == pytest.approx(np.mean(rows))
    means = [np.mean(np.asarray(rows)[groups == group]) for group in set(groups)]
    assert min(means) - 1e-9 <= got.ci[0] <= got.ci[1] <= max(means) + 1e-9
    assert got == bootstrap(rows, groups=groups)
    moved = bootstrap(2 * np.asarray(rows) + 5, groups=groups)
    assert moved is not None
    assert moved.ci == pytest.approx([2 * end + 5 for end in got.ci])
    narrow = bootstrap(rows, groups=groups, level=0.5)
    assert narrow is not None
    assert narrow.ci is not None
    assert got.ci[0] <= narrow.ci[0] <= narrow.ci[1] <= got.ci[1]


@examples
@given(values, st.integers(-9, 9))
def test_a_paired_difference_cancels_what_is_common(rows: list[int], shift: int) -> None:
    groups = resampling_groups(len(rows))
    got = paired_difference(first=np.asarray(rows) + shift, second=rows, groups=groups)
    assert got == Interval(estimate=shift, ci=(shift, shift), groups=len(set(groups)))


def test_paired_difference() -> None:
    # 5-1, 5-3 | 9-1: mean 14/3, group means 3 and 8
    got = paired_difference(first=[5, 5, 9], second=[1, 3, 1], groups=[0, 0, 1])
    assert got == Interval(estimate=pytest.approx(14 / 3), ci=(3, 8), groups=2)


def test_bootstrap_agrees_with_scipy() -> None:
    rows = np.random.default_rng(0).normal(size=200)
    got = bootstrap(rows, groups=np.arange(200), level=0.9, resamples=10000)
    theirs = stats.bootstrap(
        (rows,), np.mean, confidence_level=0.9, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert got is not None
    assert got.ci == pytest.approx((theirs.low, theirs.high), abs=0.006)


def test_blocks_hold_the_truth_where_single_rows_do_not() -> None:
    # A moving average of eight: neighbouring rows share seven eighths of what they are. True mean 0.
    rng = np.random.default_rng(0)
    held = {"blocks": 0, "rows": 0}
    for _ in range(200):
        noise = np.convolve(rng.normal(size=407), np.ones(8) / 8, mode="valid")
        for name, groups in (("blocks", resampling_groups(400)), ("rows", np.arange(400))):
            got = bootstrap(noise, groups=groups, resamples=400)
            assert got is not None
            assert got.ci is not None
            held[name] += got.ci[0] <= 0 <= got.ci[1]
    assert held["blocks"] / 200 > 0.85
    assert held["rows"] / 200 < 0.6
