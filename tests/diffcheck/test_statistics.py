"""Intervals: resamples worked out by hand, properties, and how often an interval holds the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from diffcheck.statistics import (
    SEVERAL,
    Interval,
    bootstrap,
    holm,
    paired_difference,
    resampling_groups,
    sign_flip_test,
)

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


# ---------------------------------------------------------------------------------------------------------- sign flips


def by_scipy(sums: np.ndarray, resamples: float = np.inf) -> float:
    """p of a one-sample permutation test on the groups' sums: scipy flips the signs of paired observations."""
    return float(
        stats.permutation_test(
            (sums,), lambda x, axis: np.sum(x, axis=axis), permutation_type="samples", n_resamples=resamples,
            alternative="two-sided", vectorized=True,
        ).pvalue
    )  # fmt: skip


@pytest.mark.parametrize("groups", [2, 3, 7, 12])
@pytest.mark.parametrize("shift", [0.0, 0.4, 3.0])
def test_sign_flips_are_scipys(groups: int, shift: float) -> None:
    difference = np.random.default_rng(groups).standard_normal(5 * groups) + shift
    number = np.repeat(np.arange(groups), 5)
    found = sign_flip_test(difference, groups=number)
    assert found.p == pytest.approx(by_scipy(np.bincount(number, difference)))
    assert found.groups == groups
    assert found.smallest == 2.0 ** (1 - groups)
    assert found.p >= found.smallest


def test_random_flips_come_near_the_exact_p() -> None:
    """17 groups: 2^17 flips, and 2^16 drawn ones."""
    difference = np.random.default_rng(3).standard_normal(17) + 0.6
    found = sign_flip_test(difference, groups=np.arange(17))
    exact = by_scipy(difference)
    assert 0.05 < exact < 0.5
    assert found.p == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 2**16))
    assert found.smallest == 2.0**-16
    assert sign_flip_test(np.ones(40), groups=np.arange(40)).p == 2.0**-16


def test_flips_are_of_groups_and_not_of_rows() -> None:
    """Rows that agree inside two blocks are two observations, whatever their number."""
    assert sign_flip_test(np.ones(100), groups=np.repeat([0, 1], 50)).p == 0.5
    assert sign_flip_test(np.zeros(9), groups=resampling_groups(9)).p == 1.0


@examples
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=10))
def test_p_does_not_depend_on_sign_or_order(differences: list[int]) -> None:
    tenths = np.array(differences) / 10  # sums that differ in their last bits between orders
    groups = np.arange(len(tenths))
    p = sign_flip_test(tenths, groups=groups).p
    assert p == sign_flip_test(-tenths, groups=groups).p == sign_flip_test(tenths[::-1], groups=groups).p
    assert p == pytest.approx(by_scipy(np.array(differences, np.float64)))


def test_sign_flips_need_rows() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        sign_flip_test([], groups=[])
    with pytest.raises(ValueError, match="not one equal"):
        sign_flip_test([1.0], groups=[0, 1])


def test_a_true_null_is_rejected_as_often_as_promised() -> None:
    rng = np.random.default_rng(5)
    found = [sign_flip_test(rng.standard_normal(8), groups=np.arange(8)).p for _ in range(1000)]
    assert stats.binomtest(sum(p <= 0.05 for p in found), 1000, 0.05, alternative="greater").pvalue > 0.01


def test_holm_by_hand() -> None:
    # 0.01*4, 0.02*3, then 0.03*2 = 0.06, and 0.5
    assert holm([0.02, 0.5, 0.01, 0.03]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert holm([0.04, 0.02, 0.03]) == pytest.approx([0.06, 0.06, 0.06])
    assert holm([0.7, 0.8]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


@examples
@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=12))
def test_holm_rejects_step_by_step(p: list[float]) -> None:
    """The procedure as it is stated: go up the sorted p while p_i <= level / (m - i)."""
    adjusted = holm(p)
    for level in (0.01, 0.05, 0.3):
        rejected: set[int] = set()
        for i, test in enumerate(sorted(range(len(p)), key=p.__getitem__)):
            if p[test] * (len(p) - i) > level:
                break
            rejected.add(test)
        assert {i for i, value in enumerate(adjusted) if value <= level} == rejected
