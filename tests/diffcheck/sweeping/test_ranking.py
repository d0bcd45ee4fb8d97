"""Statistics of a sweep: against scipy, against sums done by hand, and by simulating what intervals promise."""

import numpy as np
import pytest
from scipy import stats

from diffcheck.statistics import bootstrap, paired_difference, resampling_groups
from diffcheck.sweeping.halving import LEAST_ROWS, best_chances, front, rungs, survivors
from diffcheck.sweeping.ranking import (
    Sample,
    cheapest_per_layer,
    cheapest_uniform,
    least,
    pareto,
    wilson,
)
from diffcheck.sweeping.search import needle_groups

NAN = np.nan


def sample(values, groups=None, **options):
    values = np.asarray(values, np.float64)
    groups = np.arange(values.shape[-1]) if groups is None else np.asarray(groups)
    return Sample(values=values, groups=groups, **options)


def clustered(rng, sequences=12, rows=8, recipes=3, layers=2):
    """Recall-like values: a sequence's own level, common to all recipes, and a little noise of each row."""
    level = rng.normal(0, 0.05, (1, 1, sequences, 1))
    noise = rng.normal(0, 0.01, (recipes, layers, sequences, rows))
    gain = np.array([0.0, 0.02, 0.021])[:recipes].reshape(-1, 1, 1, 1)
    values = 0.8 + gain + level + noise
    return values.reshape(recipes, layers, -1), np.repeat(np.arange(sequences), rows)


def test_estimates_by_hand():
    s = sample([[[1, 0, NAN], [1, 1, 1]], [[0.5, NAN, NAN], [NAN, NAN, NAN]]])
    assert s.by_layer.tolist()[0] == [0.5, 1.0]
    assert s.estimates.tolist() == [0.75, 0.5]  # the mean over layers, not over rows; an unmeasured layer is left out
    assert np.isnan(s.by_layer[1, 1])


def test_one_layer_is_the_bootstrap_of_statistics():
    """Same draws, same seed: the intervals of the package's own bootstrap."""
    values, groups = clustered(np.random.default_rng(0), layers=1)
    s = sample(values, groups)
    for r in range(3):
        assert s.interval(r) == pytest.approx(bootstrap(values[r, 0], groups=groups).ci, abs=1e-14)
    want = paired_difference(first=values[1, 0], second=values[0, 0], groups=groups)
    got = s.difference(1, 0)
    assert got[0] == pytest.approx(want.estimate, abs=1e-15)
    assert got[1] == pytest.approx(want.ci, abs=1e-15)


def test_standard_errors_agree_with_scipy():
    """Equal clusters: resampling clusters is resampling their means."""
    values, groups = clustered(np.random.default_rng(1), sequences=30)
    s = sample(values, groups, resamples=20_000)
    means = values.mean(1).reshape(3, 30, 8).mean(2)
    for r in range(3):
        want = stats.bootstrap((means[r],), np.mean, n_resamples=20_000, method="percentile", random_state=2)
        assert s.resampled[:, r].std() == pytest.approx(want.standard_error, rel=0.03)
        assert s.interval(r) == pytest.approx(tuple(want.confidence_interval), abs=0.1 * want.standard_error)


def test_intervals_cover_what_they_promise_and_single_rows_would_not():
    """200 sweeps with 24 sequences: the true level lies in about 95 % of the intervals that resample sequences."""
    rng = np.random.default_rng(3)
    covered = naive = differences = 0
    trials = 200
    for trial in range(trials):
        values, groups = clustered(rng, sequences=24, recipes=2)
        s = sample(values, groups, seed=trial, resamples=400)
        low, high = s.interval(0)
        covered += low <= 0.8 <= high
        low, high = sample(values, seed=trial, resamples=400).interval(0)
        naive += low <= 0.8 <= high
        low, high = s.difference(1, 0)[1]
        differences += low <= 0.02 <= high
    assert 0.88 <= covered / trials <= 0.98
    assert 0.88 <= differences / trials <= 0.98
    assert naive / trials < 0.6


def test_pairing_makes_differences_sharp():
    """The level of a text is common to both: the difference is known ten times better than either."""
    values, groups = clustered(np.random.default_rng(4))
    s = sample(values, groups)
    low, high = s.interval(0)
    estimate, (dlow, dhigh) = s.difference(1, 0)
    assert dhigh - dlow < (high - low) / 10
    assert dlow < 0.02 < dhigh
    assert estimate == pytest.approx((values[1] - values[0]).mean())
    assert s.difference(0, 0) == (0.0, (0.0, 0.0))


def test_a_difference_needs_common_rows():
    s = sample([[[1, 1, NAN, NAN]], [[NAN, 0, 0, NAN]], [[NAN, NAN, 0, 0]]])
    assert s.difference(0, 1)[0] == 1  # over the one row that both have
    assert s.difference(0, 2) is None


def test_chances_by_hand_and_by_simulation():
    resampled = np.array([[3.0, 2, 1], [1, 2, 3], [2, 2, 2], [1, 3, 2]])
    # all cost the same: of four resamples the first is best, or level with the best, in two
    assert best_chances([1, 1, 1], resampled).tolist() == [0.5, 0.5, 0.5]
    # nothing cheaper than the first; the second against the first; the third against both
    assert best_chances([1, 2, 3], resampled).tolist() == [1.0, 0.75, 0.5]
    # two estimates with independent errors of 0.01 each: the better by 0.01 wins with P(N(0.01, 0.02**.5 ...) > 0)
    rng = np.random.default_rng(5)
    won = []
    for _ in range(40):
        values = rng.normal([[[0.0]], [[0.02]]], 0.1, (2, 1, 100))
        won.append(sample(values, resamples=1000).chances([1, 1])[1])
    # the chance seen from a sample scatters, its mean over samples is Phi(d / (sqrt 2 * se of the difference))
    assert np.mean(won) == pytest.approx(stats.norm.cdf(0.02 / (2**0.5 * 0.1 * (2 / 100) ** 0.5)), abs=0.08)


def test_one_group_has_an_estimate_and_no_interval():
    s = sample([[[0.5, 0.7]], [[0.6, 0.9]]], groups=[0, 0])
    assert s.estimates.tolist() == [0.6, 0.75]
    assert s.interval(0) is None
    assert s.chances([1, 1]).tolist() == [0, 1]
    assert s.difference(1, 0)[1] is None


@pytest.mark.parametrize(("kept", "total"), [(0, 1), (0, 20), (20, 20), (7, 22), (499, 500)])
def test_wilson_against_scipy(kept, total):
    want = stats.binomtest(kept, total).proportion_ci(method="wilson")
    assert wilson(kept, total) == pytest.approx((want.low, want.high), abs=1e-12)
    assert wilson(0, 0) is None


def test_needles_of_several_texts_are_resampled_by_text():
    assert needle_groups(np.repeat(np.arange(5), 3)).tolist() == np.repeat(np.arange(5), 3).tolist()
    assert needle_groups(np.repeat(np.arange(4), 2)).tolist() == list(range(8))


def test_rows_of_several_texts_are_resampled_by_text():
    owners = np.repeat(np.arange(6), 16)
    assert resampling_groups(96, sequences=owners, block=4).tolist() == owners.tolist()
    few = np.repeat(np.arange(2), 16)
    assert len(np.unique(resampling_groups(32, sequences=few, block=4))) == 8


def dominated(costs, gains, i):
    return any(
        costs[j] <= costs[i] and gains[j] >= gains[i] and (costs[j] < costs[i] or gains[j] > gains[i])
        for j in range(len(costs))
    )


def test_front_is_what_nothing_dominates():
    rng = np.random.default_rng(6)
    for _ in range(300):
        n = int(rng.integers(1, 12))
        costs, gains = rng.integers(0, 5, n).tolist(), (rng.integers(0, 5, n) / 4).tolist()
        found = front(costs, gains)
        assert sorted(found) == [i for i in range(n) if not dominated(costs, gains, i)]
        assert [costs[i] for i in found] == sorted(costs[i] for i in found)
    assert pareto([1, 2], [NAN, 0.1]) == [1]


def test_rungs():
    assert rungs(256, 2) == [16, 64, 256]
    assert rungs(256, 0) == [256]
    assert rungs(40, 2) == [10, 40]
    assert rungs(5, 3) == [5]
    assert min(rungs(100_000, 20)) >= LEAST_ROWS


def test_survivors_are_the_better_half_and_whatever_could_be_best():
    costs, gains = [1, 1, 2, 2, 3, 3], [0.5, 0.1, 0.6, 0.2, 0.7, 0.3]
    assert survivors(costs, gains, [0] * 6) == [0, 2, 4]
    assert survivors(costs, gains, [0, 0, 0, 0.06, 0, 0.04]) == [0, 2, 3, 4]
    # the front is smaller than half: the best of the next one fill up
    assert survivors([1, 2, 3, 4], [0.9, 0.5, 0.6, 0.7], [0] * 4) == [0, 3]
    # equals stay together, even beyond half
    assert survivors([1, 1, 1], [1.0, 1.0, 0.2], [0] * 3) == [0, 1]
    assert survivors([1, 1], [NAN, NAN], [0, 0]) == []
    assert survivors([1, 1], [NAN, 0.1], [0, 0]) == [1]


def test_the_best_recipe_survives_few_rows():
    """Halving on 16 of 256 rows keeps the truly best recipe of each price in nearly all sweeps."""
    rng = np.random.default_rng(7)
    lost = 0
    for _ in range(60):
        truth = rng.uniform(0.85, 1.0, 40)
        costs = rng.choice([66, 68, 100, 132, 256], 40).tolist()
        rows = truth[:, None] + rng.normal(0, 0.03, (1, 16)) + rng.normal(0, 0.02, (40, 16))
        s = sample(rows[:, None], resamples=300)
        kept = survivors(costs, s.estimates.tolist(), s.chances(costs).tolist())
        lost += sum(i not in kept for i in front(costs, truth.tolist()))
    assert lost <= 2


def test_mixed_formats_by_hand():
    """Layer 0 needs the dear format, layer 1 is served by the cheap one, in layer 2 nothing is good enough."""
    rows = 40
    noise = np.linspace(-0.01, 0.01, rows)
    levels = np.array([[0.80, 0.97, 0.5], [0.99, 0.98, 0.6], [0.999, 0.999, 0.9]])
    s = sample(np.clip(levels[:, :, None] + noise, 0, 1))
    costs = [68.0, 132.0, 256.0]
    mixed = cheapest_per_layer(s, costs, floor=0.95)
    assert mixed.choice == (1, 0, 2)
    assert mixed.below == (2,)
    assert mixed.bytes == pytest.approx((132 + 68 + 256) / 3)
    assert mixed.estimate == pytest.approx(np.mean([s.by_layer[1, 0], s.by_layer[0, 1], s.by_layer[2, 2]]))
    assert cheapest_uniform(s, costs, 0.95) is None
    assert cheapest_uniform(s, costs, 0.85) == 2
    # the estimate reaches 0.97, its interval does not: the floor asks for the interval
    assert s.by_layer[0, 1] == pytest.approx(0.97)
    assert least(s, 0, 1) < 0.97 < s.by_layer[0, 1] + 1e-9
    assert cheapest_per_layer(s, costs, floor=0.97).choice[1] == 1


def test_mixed_ignores_what_was_not_measured():
    s = sample([[[1.0, 1.0], [NAN, NAN]], [[0.9, 0.9], [0.9, 0.9]]])
    assert cheapest_per_layer(s, [1.0, 2.0], floor=0.5).choice == (0, 1)
