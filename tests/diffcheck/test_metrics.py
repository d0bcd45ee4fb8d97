"""Each metric against numbers worked out by hand, a plain loop over small inputs, and a property."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffcheck import metrics as m

INF, NAN = math.inf, math.nan
BF16 = torch.bfloat16
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=150, deadline=None)


def ints(*lists: list[int]) -> Tensor:
    return torch.tensor(lists)


def floats(*lists: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(lists, dtype=dtype)


@dataclass
class Case:
    """Small tensors in which most scores tie, nearly tie in bf16, or are NaN."""

    selected: Tensor
    target_selected: Tensor
    scores: Tensor
    other: Tensor
    visible: Tensor
    k: int

    @staticmethod
    def draw(seed: int) -> Case:
        rng = np.random.default_rng(seed)
        n, entries, k = rng.integers(1, 7), int(rng.integers(1, 14)), int(rng.integers(1, 7))
        # steps of half a bf16 ulp above 1 and of a whole one below
        scores = (256 + rng.integers(-5, 9, (2, n, entries))) / 256
        scores[rng.random(scores.shape) < rng.choice([0, 0.1, 0.6])] = NAN
        visible = rng.integers(0, entries + 1, n)
        scores[:, np.arange(entries) >= visible[:, None]] = -INF
        dtype = [torch.float32, torch.float64][int(rng.integers(2))]
        return Case(
            selected=torch.from_numpy(rng.integers(-1, entries, (n, int(rng.integers(1, 9))))),
            target_selected=torch.from_numpy(rng.integers(-1, entries, (n, k))).int(),
            scores=torch.from_numpy(scores[0]).to(dtype),
            other=torch.from_numpy(scores[1]).to(dtype),
            visible=torch.from_numpy(visible).int(),
            k=k,
        )

    def rows(self) -> range:
        return range(len(self.visible))

    def counted(self) -> list[int]:
        return [row for row in self.rows() if int(self.visible[row]) > self.k]

    def seen(self, row: int) -> list[float]:
        """The row's visible scores, NaN as -inf."""
        return [-INF if math.isnan(x) else x for x in self.scores[row, : int(self.visible[row])].tolist()]

    def tau(self, row: int) -> float:
        ordered = sorted(self.seen(row), reverse=True)
        return ordered[self.k - 1] if len(ordered) >= self.k else -INF


def a_set(index: Tensor, row: int) -> set[int]:
    return {i for i in index[row].tolist() if i != -1}


def naive_band(tau: float) -> float:
    """The bf16 spacing at a tau between 0.5 and 2."""
    return 0.0 if math.isinf(tau) else 2**-7 if tau >= 1 else 2**-8


def naive_ranks(scores: list[float]) -> list[int]:
    return [sum(other > own for other in scores) for own in scores]


def a_top(scores: Tensor, visible: Tensor, k: int, rng: np.random.Generator) -> Tensor:
    """The top k of each row, ties broken at random."""
    shuffle = torch.from_numpy(rng.permutation(scores.shape[1]))
    keys = scores.nan_to_num(nan=-1e30, neginf=-1e30)  # NaN above what the row cannot see
    keys = keys.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -INF)
    order = keys[:, shuffle].sort(dim=1, descending=True, stable=True).indices
    return shuffle[order][:, :k]


# --- rows and sets


def test_rows() -> None:
    # of 2, 3, 4, 9 visible entries those above k = 3 count
    assert m.rows(torch.tensor([2, 9, 3, 4]), 3) == m.Rows(queries=2, visible=9, visible_min=4, vacuous=False)
    assert m.counted_rows(torch.tensor([2, 9, 3, 4]), 3).tolist() == [False, True, False, True]
    assert m.rows(torch.tensor([3]), 3) == m.Rows(queries=0, visible=None, visible_min=None, vacuous=True)
    assert m.rows(torch.zeros(0, dtype=torch.int32), 3).vacuous
    with pytest.raises(ValueError, match="at least 1"):
        m.rows(torch.tensor([3]), 0)


def test_membership() -> None:
    got = m.membership(ints([2, -1, 2], [-1, -1, -1], [0, 3, 1]).int(), 4)
    assert got.tolist() == [[False, False, True, False], [False] * 4, [True, True, False, True]]
    assert m.membership(torch.zeros(2, 0, dtype=torch.int64), 3).tolist() == [[False] * 3] * 2
    for bad in (ints([0, 4]), ints([-2, 0])):
        with pytest.raises(AssertionError):
            m.membership(bad, 4)
    with pytest.raises(ValueError, match="int32 or int64"):
        m.membership(torch.zeros(1, 1), 4)


def test_overlap() -> None:
    # row 0: S = R = {0,1}: 1, 1. row 1: S = {0,2} (0 twice), R = {0,1}: one of three, one of two. row 2: S =
    # {0}, R = {0,1}: 1/2, 1/2. row 3 sees only k entries and would be 0. jaccard (1 + 1/3 + 1/2) / 3 = 11/18;
    # recall 1, .5, .5: mean 2/3; all at or below the 1st percentile are .5
    case = {
        "selected": ints([0, 1, -1], [0, 0, 2], [-1, 0, -1], [3, 4, -1]),
        "target_selected": ints([1, 0], [0, 1], [0, 1], [0, 1]),
        "entries": 5,
    }
    visible = torch.tensor([5, 4, 3, 2])
    got = m.overlap(**case, visible=visible, k=2)
    assert dataclasses.astuple(got) == pytest.approx((11 / 18, 2 / 3, 0.5, 0.5), abs=1e-15)
    assert m.jaccards(**case).tolist() == pytest.approx([1, 1 / 3, 1 / 2, 0])
    assert m.recalls(**case).tolist() == [1, 0.5, 0.5, 0]
    assert dataclasses.astuple(m.overlap(**case, visible=visible, k=5)) == (None,) * 4


def test_recall_is_of_the_target_not_of_k_and_its_percentile_is_interpolated() -> None:
    # |R| = 4, 2 and 1: recalls 3/4, 1/2 and 1; sorted .5 .75 1, the 1st percentile is .02 steps up: .505
    got = m.overlap(
        selected=ints([0, 1, 2, 9], [0, 8, 9, -1], [0, -1, -1, -1]),
        target_selected=ints([0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]),
        entries=10,
        visible=torch.tensor([10, 10, 10]),
        k=4,
    )
    assert (got.recall_mean, got.recall_worst) == (0.75, 0.5)
    assert got.recall_p1 == pytest.approx(0.505)


def test_overlap_refuses() -> None:
    one, two = ints([0]), ints([0], [1])
    with pytest.raises(ValueError, match="rows are compared"):
        m.jaccards(selected=one, target_selected=two, entries=3)
    with pytest.raises(ValueError, match="does not have a row"):
        m.overlap(selected=one, target_selected=two, entries=3, visible=torch.tensor([3]), k=1)
    with pytest.raises(AssertionError, match="target selected nothing"):
        m.overlap(selected=one, target_selected=ints([-1]), entries=3, visible=torch.tensor([3]), k=1)
    assert m.jaccards(selected=ints([-1]), target_selected=ints([-1]), entries=3).isnan().all()


@examples
@given(seeds)
def test_overlap_against_a_loop(seed: int) -> None:
    c = Case.draw(seed)
    entries = c.scores.shape[1]
    sets = {"selected": c.selected, "target_selected": c.target_selected, "entries": entries}
    held = m.membership(c.selected, entries)
    jaccards, recalls = m.jaccards(**sets).tolist(), m.recalls(**sets).tolist()
    for row in c.rows():
        own, target = a_set(c.selected, row), a_set(c.target_selected, row)
        assert set(held[row].nonzero()[:, 0].tolist()) == own
        if own | target:
            assert jaccards[row] == len(own & target) / len(own | target)
        if target:
            assert recalls[row] == len(own & target) / len(target)
    turned = m.jaccards(selected=c.target_selected, target_selected=c.selected, entries=entries)
    assert torch.equal(m.jaccards(**sets).nan_to_num(), turned.nan_to_num())
    counted = c.counted()
    if counted and all(a_set(c.target_selected, row) for row in counted):
        got = m.overlap(**sets, visible=c.visible, k=c.k)
        assert got.jaccard == pytest.approx(np.mean([jaccards[row] for row in counted]))
        assert got.recall_p1 == pytest.approx(np.percentile([recalls[row] for row in counted], 1))


# --- the k-th place


def test_ulp() -> None:
    # fraction bits and smallest normal: fp32 23, 2^-126; bf16 7, 2^-126; fp64 52, 2^-1022; fp16 10, 2^-14
    cases = [
        (1.0, torch.float32, 2**-23),
        (-1.5, torch.float32, 2**-23),
        (2 - 2**-23, torch.float32, 2**-23),
        (2.0, torch.float32, 2**-22),
        (0.0, torch.float32, 2**-149),
        (2.0**-127, torch.float32, 2**-149),
        (1.0, BF16, 2**-7),
        (255.0, BF16, 1.0),
        (256.0, BF16, 2.0),
        (0.0, BF16, 2**-133),
        (0.0, torch.float64, 5e-324),
        (5e-324, torch.float64, 5e-324),
        (1e300, torch.float64, math.ulp(1e300)),
        (1.0, torch.float16, 2**-10),
        (2.0**-15, torch.float16, 2**-24),
        (-INF, torch.float32, INF),
    ]
    for x, dtype, expected in cases:
        assert m.ulp(torch.tensor(x, dtype=torch.float64), dtype).item() == expected, (x, dtype)
    assert m.ulp(torch.tensor(NAN), BF16).isnan()
    with pytest.raises(ValueError, match="no unit"):
        m.ulp(torch.ones(2), torch.int32)


def test_ulp_of_every_bf16() -> None:
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    codes = codes[codes.isfinite() & (codes.abs() < torch.finfo(BF16).max)]
    above = torch.nextafter(codes.abs(), torch.tensor(INF, dtype=BF16))
    assert torch.equal(m.ulp(codes, BF16), above.double() - codes.abs().double())


@examples
@given(st.floats(-(2.0**127), 2.0**127, width=32), st.floats(allow_nan=False))
def test_ulp_of_fp32_and_fp64(single: float, double: float) -> None:
    exact = abs(float(np.spacing(np.float32(single))))
    assert m.ulp(torch.tensor(single), torch.float32).item() == exact
    assert m.ulp(torch.tensor(double, dtype=torch.float64), torch.float64).item() == math.ulp(double)


def tied(selected: list[int], scores: Tensor, k: int, **more: torch.dtype) -> tuple[int, float]:
    visible = torch.tensor([scores.shape[1]])
    hits, bands = m.tied_hits(selected=ints(selected), target_scores=scores, visible=visible, k=k, **more)
    return int(hits), float(bands)


def test_tied_hits() -> None:
    # k = 3, tau = 1 (the third largest): A = {0}, B = {1,2,3} in any order, entry 4 is out
    scores = floats([2, 1, 1, 1, 0.5])
    band = 2**-23
    assert tied([0, 1, 2], scores, 3) == (3, band)
    assert tied([3, 0, 2], scores, 3) == (3, band)
    assert tied([1, 2, 3], scores, 3) == (2, band)  # 0 of A, and B fills two places only
    assert tied([0, 4, 1], scores, 3) == (2, band)
    assert tied([0, 0, 1], scores, 3) == (2, band)
    assert tied([1, 1, -1], scores, 3) == (1, band)
    assert tied([0, 1, 2, 3, 4], scores, 3) == (3, band)


def test_tied_hits_one_ulp_off() -> None:
    # bf16 steps by 2^-7 from 1 on and by 2^-8 below. k = 2, tau = 1 + 2^-7, e = 2^-7: entries 0 … 3 are
    # within e (1 + 2^-6, 1 + 2^-7, 1 and 1), 4 is 1.5 e lower and out. So A is empty.
    step = 2**-7
    scores = floats([1 + 2 * step, 1 + step, 1, 1, 1 - step / 2], dtype=BF16)
    assert tied([2, 3], scores, 2) == (2, step)
    assert tied([3, 4], scores, 2) == (1, step)
    # The same numbers known to be fp32: tau's neighbours are no longer ties.
    assert tied([2, 3], scores.float(), 2) == (0, 2**-23)
    assert tied([2, 3], scores.float(), 2, score_dtype=BF16) == (2, step)
    # 1 + 3 steps is above tau + e: it is in A and must be there.
    higher = floats([1 + 3 * step, 1 + step, 1, 1], dtype=BF16)
    assert tied([2, 3], higher, 2) == (1, step)


def test_tied_hits_with_too_few_numbers() -> None:
    # one number, k = 2: tau is -inf, the band 0, both NaN tie for the second place; entry 3 is not visible
    scores = floats([NAN, 5, NAN, 7])
    args = {"target_scores": scores, "visible": torch.tensor([3]), "k": 2}
    for selected, hits in (([1, 0], 2), ([1, 2], 2), ([0, 2], 1), ([1, 3], 1)):
        got, band = m.tied_hits(selected=ints(selected), **args)
        assert (int(got), float(band)) == (hits, 0)
    assert m.thresholds(**args).tolist() == [-INF]
    assert m.thresholds(target_scores=scores, visible=torch.tensor([4]), k=2).tolist() == [5]


def test_tied_overlap() -> None:
    # k = 2. row 0: hit 2: 1 and 1. row 1: hit 1: 1/2 and 1/(4-1). row 2 sees two entries only.
    # taus 1 and 4: bands 2^-23 and 2^-21.
    args = {
        "selected": ints([0, 2], [0, 3], [3, 3]),
        "target_scores": floats([2, 1, 1, 0], [5, 4, 3, 2], [9, 8, -INF, -INF]),
        "visible": torch.tensor([4, 4, 2]),
    }
    assert dataclasses.astuple(m.tied_overlap(**args, k=2)) == pytest.approx((2 / 3, 3 / 4, 2**-21))
    assert dataclasses.astuple(m.tied_overlap(**args, k=4)) == (None, None, None)
    with pytest.raises(ValueError, match="at least 1"):
        m.tied_hits(**args, k=0)


@examples
@given(seeds)
def test_tied_hits_against_a_loop(seed: int) -> None:
    c = Case.draw(seed)
    args = {"target_scores": c.scores, "visible": c.visible, "k": c.k}
    hits, _ = m.tied_hits(selected=c.selected, **args, score_dtype=BF16)
    assert m.thresholds(**args).tolist() == [c.tau(row) for row in c.rows()]
    expected = []
    for row in c.rows():
        tau, own = c.tau(row), a_set(c.selected, row)
        e = naive_band(tau)
        above = {i for i, s in enumerate(c.seen(row)) if s > tau + e}
        level = {i for i, s in enumerate(c.seen(row)) if s == tau or abs(s - tau) <= e}
        expected.append(len(above & own) + min(c.k - len(above), len(level & own)))
    assert hits.tolist() == expected
    counted = c.counted()
    got = m.tied_overlap(selected=c.selected, **args, score_dtype=BF16)
    if counted:
        assert got.recall_tied == pytest.approx(np.mean([expected[row] / c.k for row in counted]))
        assert got.jaccard_tied == pytest.approx(
            np.mean([expected[row] / (2 * c.k - expected[row]) for row in counted])
        )
        assert got.tie_band == max(naive_band(c.tau(row)) for row in counted)
    top = a_top(c.scores, c.visible, c.k, np.random.default_rng(seed)) if c.k <= c.scores.shape[1] else None
    if counted and top is not None:
        assert m.tied_overlap(selected=top, **args).jaccard_tied == 1  # however it broke its ties


def test_row_noise() -> None:
    # differences 3 and -4 of two visible: sqrt(25/2); NaN on both sides or the same infinity differ by
    # nothing
    args = {
        "emulation_scores": floats([4, -4, 100], [NAN, -INF, 2], [1, NAN, 0], [0, 0, 0]),
        "target_scores": floats([1, 0, -INF], [NAN, -INF, 0], [1, 1, 0], [0, 0, 0]),
        "visible": torch.tensor([2, 3, 3, 0]),
    }
    got = m.row_noise(**args).tolist()
    assert got[:2] == pytest.approx([math.sqrt(12.5), math.sqrt(4 / 3)])
    assert all(map(math.isnan, got[2:]))


def test_misses() -> None:
    # k = 3, tau = 4, e = 2^-21, noise 1/3 puts near-ties at 5 and nearer. R = {0,1,2}, of which S has none:
    # 4 is tau, 5 is exactly 1 away, 6 is not near. Row 1 has lost only its tie, row 2 counts for nothing.
    args = {
        "target_selected": ints([0, 1, 2], [0, 1, 2], [0, 1, 2]),
        "target_scores": floats([6, 5, 4, 4, 0], [6, 5, 4, 4, 0], [3, 2, 1, -INF, -INF]),
        "visible": torch.tensor([5, 5, 3]),
        "k": 3,
    }
    selected = ints([3, 4, 4], [0, 1, 3], [-1, -1, -1])
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert m.misses(selected=selected, **args, noise=third) == m.Misses(ties=2, near_ties=1, real=1)
    less = third * 0.999
    assert m.misses(selected=selected, **args, noise=less) == m.Misses(ties=2, near_ties=0, real=2)
    for none in (NAN, INF):
        assert m.misses(selected=selected, **args, noise=third * none).near_ties == 0
    wide = m.misses(selected=selected, **args, noise=third * 0, score_dtype=torch.float8_e5m2)
    assert wide == m.Misses(ties=3, near_ties=0, real=1)  # two fraction bits: e = 1


@examples
@given(seeds, st.sampled_from([0.0, 2**-9, 2**-8, 1.0]))
def test_misses_against_a_loop(seed: int, noise: float) -> None:
    c = Case.draw(seed)
    args = {"selected": c.selected, "target_scores": c.scores, "visible": c.visible, "k": c.k}
    noises = torch.full(c.visible.shape, noise)
    got = m.misses(**args, target_selected=c.target_selected, noise=noises, score_dtype=BF16)
    ties = near = real = 0
    for row in c.counted():
        tau = c.tau(row)
        for entry in a_set(c.target_selected, row) - a_set(c.selected, row):
            own = dict(enumerate(c.seen(row))).get(entry, -INF)
            away = 0 if own == tau else abs(own - tau)
            if away <= naive_band(tau):
                ties += 1
            elif away <= 3 * noise:
                near += 1
            else:
                real += 1
    assert got == m.Misses(ties=ties, near_ties=near, real=real)
    if c.counted():
        top = a_top(c.scores, c.visible, c.k, np.random.default_rng(seed))
        got = m.misses(**args, target_selected=top, noise=noises)
        hits, _ = m.tied_hits(**args)
        assert sum(dataclasses.astuple(got)) >= sum(c.k - int(hits[row]) for row in c.counted())


def test_margin() -> None:
    # k = 2. row 0: tau 5, next 3, noise 1/2: 4. row 1: tau 5 ties at the place, next lower 1: 4/2 = 2. row 2:
    # everything ties. row 3: tau 7, next 6 (NaN is not a score), noise 0: infinite. row 4 does not count.
    scores = floats([9, 5, 3, 1], [5, 5, 5, 1], [2, 2, 2, 2], [8, 7, 6, NAN], [9, 1, 0, 0])
    args = {"target_scores": scores, "visible": torch.tensor([4, 4, 4, 4, 2]), "k": 2}
    noise = torch.tensor([0.5, 2, 1, 0, 1])
    got = m.margins(**args, noise=noise).tolist()
    assert got[:2] == [4, 2]
    assert math.isnan(got[2])
    assert got[3] == INF
    assert m.margin(**args, noise=noise) == 4
    assert m.margin(**{**args, "visible": torch.tensor([4, 4, 4, 2, 2])}, noise=noise) == 3
    assert m.margin(**{**args, "k": 4}, noise=noise) is None
    assert math.isnan(m.margin(**args, noise=noise * NAN) or 0)


@examples
@given(seeds)
def test_margin_against_a_loop_and_scaled(seed: int) -> None:
    c = Case.draw(seed)
    args = {"visible": c.visible, "k": c.k}
    noise = m.row_noise(emulation_scores=c.other, target_scores=c.scores, visible=c.visible)
    got = m.margins(target_scores=c.scores, noise=noise, **args).tolist()
    for row in c.rows():
        tau = c.tau(row)
        lower = [s for s in c.seen(row) if -INF < s < tau]
        if not lower:
            assert math.isnan(got[row])
        elif noise[row] > 0:
            assert got[row] == (tau - max(lower)) / float(noise[row])
    scaled = m.row_noise(emulation_scores=c.other * 8, target_scores=c.scores * 8, visible=c.visible)
    assert m.margins(target_scores=c.scores * 8, noise=scaled, **args).tolist() == pytest.approx(got, nan_ok=True)


# --- ranks


def test_ranks() -> None:
    # larger than 7: nothing; than 5 (twice): one; than 1: three; NaN is below the four numbers; the last is
    # unseen
    scores = floats([5, 7, 5, 1, NAN, 99], dtype=BF16)
    got = m.ranks(scores=scores, visible=torch.tensor([5]), entries=ints([0, 1, 2, 3, 4, 5, -1]))
    assert got.tolist() == [[1, 0, 1, 3, 4, -1, -1]]
    with pytest.raises(AssertionError):
        m.ranks(scores=scores, visible=torch.tensor([5]), entries=ints([6]))
    close = floats([1, 1 + 2**-40], dtype=torch.float64)  # the same in fp32
    assert m.ranks(scores=close, visible=torch.tensor([2]), entries=ints([0, 1])).tolist() == [[1, 0]]


@examples
@given(seeds)
def test_ranks_against_a_loop_and_permuted(seed: int) -> None:
    c = Case.draw(seed)
    entries = torch.arange(c.scores.shape[1]).expand_as(c.scores)
    got = m.ranks(scores=c.scores, visible=c.visible, entries=entries)
    for row in c.rows():
        unseen = [-1] * (len(got[row]) - int(c.visible[row]))
        assert got[row].tolist() == naive_ranks(c.seen(row)) + unseen
    everything = torch.full_like(c.visible, c.scores.shape[1])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(c.scores.shape[1]))
    before = m.ranks(scores=c.scores, visible=everything, entries=entries)
    after = m.ranks(scores=c.scores[:, order], visible=everything, entries=entries)
    assert torch.equal(before[:, order], after)


def test_needle_entries() -> None:
    # entry 1 has tokens 4 … 7
    assert list(m.needle_entries(4, 7)) == [1]
    assert list(m.needle_entries(3, 8)) == [0, 1, 2]
    assert list(m.needle_entries(0, 0)) == [0]
    for first, last in ((-1, 0), (5, 4)):
        with pytest.raises(ValueError, match="no needle"):
            m.needle_entries(first, last)


def test_needles() -> None:
    # scores rank 3 0 1 2 4. needle 0, entries 2 and 3: best rank 1, entry 3 selected. needle 1, entry 4: 4,
    # lost. needle 2, entries 3 and 4 of 3 visible: no rank, and a selection of what cannot be seen finds
    # nothing. needle 3, entries 2 and 3 of 3 visible: scores rank 2 0 1. Median of 1, 4, 1 is 1.
    args = {
        "scores": floats([1, 9, 8, 7, 0]).expand(4, 5),
        "selected": ints([3, 1], [1, 2], [3, 4], [3, -1]),
        "visible": torch.tensor([5, 5, 3, 3]),
    }
    spans = [range(2, 4), range(4, 5), range(3, 5), range(2, 4)]
    got = m.needles(**args, spans=spans)
    assert got == m.Needles(ranks=[1, 4, None, 1], selected=[True, False, False, False], rank_median=1)
    half = m.needles(**{name: x[:2] for name, x in args.items()}, spans=spans[:2])
    assert half.rank_median == 2.5
    none = {name: x[:0] for name, x in args.items()}
    assert m.needles(**none, spans=[]) == m.Needles(ranks=[], selected=[], rank_median=None)
    with pytest.raises(ValueError, match="needles for"):
        m.needles(**args, spans=spans[:2])
    for bad in (range(4, 6), range(2, 2)):
        with pytest.raises(ValueError, match="needle 0 lies"):
            m.needles(**args, spans=[bad, *spans[1:]])


@examples
@given(seeds)
def test_needles_against_a_loop(seed: int) -> None:
    c = Case.draw(seed)
    rng = np.random.default_rng(seed)
    entries = c.scores.shape[1]
    spans = []
    for _ in c.rows():
        start = int(rng.integers(entries))
        spans.append(range(start, int(rng.integers(start + 1, entries + 1))))
    got = m.needles(scores=c.scores, selected=c.selected, visible=c.visible, spans=spans)
    for row in c.rows():
        seen = [i for i in spans[row] if i < int(c.visible[row])]
        order = naive_ranks(c.seen(row))
        assert got.ranks[row] == (min(order[i] for i in seen) if seen else None)
        assert got.selected[row] == any(i in a_set(c.selected, row) for i in seen)


# --- survival


def test_survival() -> None:
    # k = 20, ranks 0 … 39: edges 2, 5, 10, 15, 18, 20, 30. Lost: ranks 0, 7, 12, 13, 19. Kept beyond: 20, 29,
    # 30.
    kept = [r for r in range(20) if r not in (0, 7, 12, 13, 19)] + [20, 29, 30]
    scores = -torch.arange(40.0)[None]
    got = m.survival(selected=ints(kept), target_scores=scores, visible=torch.tensor([40]), k=20)
    assert [(b.lo, b.hi) for b in got] == [
        (0, 0.1), (0.1, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.9), (0.9, 1), (1, 1.5),
    ]  # fmt: skip
    assert [b.n for b in got] == [2, 3, 5, 5, 3, 2, 10]
    assert [b.p for b in got] == [1 / 2, 1, 4 / 5, 3 / 5, 1, 1 / 2, 2 / 10]
    assert all(b.ci is None for b in got)  # one row is one group


def test_survival_edges_are_exact() -> None:
    # rank 7 is a tenth of k = 70 exactly and belongs to the second bin
    got = m.survival(selected=ints([7]), target_scores=-torch.arange(71.0)[None], visible=torch.tensor([71]), k=70)
    assert [b.n for b in got] == [7, 11, 17, 18, 10, 7, 1]
    assert [b.p for b in got][:2] == [0, 1 / 11]
    for k in range(1, 4097):  # no product is rounded across a whole number
        percents = [round(100 * edge) for edge in m.BIN_EDGES]
        assert [math.ceil(edge * k) for edge in m.BIN_EDGES] == [-(-percent * k // 100) for percent in percents]


def test_survival_with_ties() -> None:
    # k = 2, edges 1 (0.1, 0.25, 0.5 of 2 all round up to 1), 2, 2, 2, 3. Scores 5 | 4 4 4 | 1: the three 4s
    # share rank 1 and are in [0.5, 0.75); 1 has rank 4, beyond 1.5 k. A correct S holds 5 and one of them.
    args = {"target_scores": floats([5, 4, 4, 4, 1, NAN]), "k": 2}
    got = m.survival(selected=ints([0, 2]), visible=torch.tensor([6]), **args)
    assert [b.n for b in got] == [1, 0, 0, 3, 0, 0, 0]
    assert [b.p for b in got] == [1, None, None, pytest.approx(1 / 3), None, None, None]
    # repeats, empty places and what the row cannot see are not counted
    got = m.survival(selected=ints([2, 2, -1, 4]), visible=torch.tensor([3]), **args)
    assert [(b.n, b.p) for b in got if b.n] == [(1, 0), (2, 1 / 2)]


def test_survival_interval_and_vacuous() -> None:
    # 16 rows make blocks of four. The first two blocks keep both entries of k = 2, the others nothing. All
    # draws are of one kind with a chance of 1/16 each, so the interval is 0 to 1; of single rows it is not.
    scores = -torch.arange(6.0).expand(16, 6)
    selected = ints([0, 1]).repeat(16, 1)
    selected[8:] = -1
    args = {"selected": selected, "target_scores": scores, "k": 2}
    got = m.survival(**args, visible=torch.full((16,), 6))
    assert (got[0].p, got[0].n, got[0].ci) == (0.5, 16, (0, 1))
    assert got == m.survival(**args, visible=torch.full((16,), 6))
    # Five sequences or more are resampled whole, here each a row, and only those that count: 4 … 11.
    visible = torch.tensor([2] * 4 + [6] * 8 + [2] * 4)
    by_row = m.survival(**args, visible=visible, sequences=torch.arange(16))
    assert (by_row[0].p, by_row[0].n, by_row[0].ci) == (0.5, 8, (0.125, 0.875))
    none = m.survival(**args, visible=torch.full((16,), 2))
    assert [(b.p, b.n, b.ci) for b in none] == [(None, 0, None)] * 7


def naive_bins(c: Case, ranks_of: Callable[[int], list[int]]) -> list[tuple[int, int]]:
    percent = [0, 10, 25, 50, 75, 90, 100, 150]
    found = []
    for lo, hi in pairwise(percent):
        inside = [
            i in a_set(c.selected, row)
            for row in c.counted()
            for i, r in enumerate(ranks_of(row))
            if lo * c.k <= 100 * r < hi * c.k
        ]
        found.append((len(inside), sum(inside)))
    return found


@examples
@given(seeds)
def test_survival_against_a_loop(seed: int) -> None:
    c = Case.draw(seed)
    got = m.survival(selected=c.selected, target_scores=c.scores, visible=c.visible, k=c.k)
    expected = naive_bins(c, lambda row: naive_ranks(c.seen(row)))
    assert [(b.n, b.n * (b.p or 0)) for b in got] == [(n, pytest.approx(found)) for n, found in expected]


def test_survival_agrees_with_ranks_on_long_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 20000, generator=generator).to(BF16)  # hundreds of entries share each score
    visible = torch.tensor([20000, 19000, 512])
    noisy = scores.float() + 0.1 * torch.randn(3, 20000, generator=generator)
    noisy[torch.arange(20000) >= visible[:, None]] = -INF
    c = Case(noisy.topk(512).indices, ints(), scores, noisy, visible, 512)
    got = m.survival(selected=c.selected, target_scores=scores, visible=visible, k=512)
    every = m.ranks(scores=scores, visible=visible, entries=torch.arange(20000).expand(3, -1))
    expected = naive_bins(c, lambda row: every[row, : int(visible[row])].tolist())
    assert [(b.n, b.n * (b.p or 0)) for b in got] == [(n, pytest.approx(found)) for n, found in expected]


# --- errors


def test_errors() -> None:
    # visible: a = 3 0 | 2, b = 1 0 | 2 → |a-b|² = 4, |b|² = 5, |a|² = 13: rel 2/sqrt 5, calc_diff 4/18 = 1 -
    # 2*7/18
    a, b = floats([3, 0, 50], [2, 9, 9]), floats([1, 0, -INF], [2, -INF, -INF])
    got = m.errors(scores=a, target_scores=b, visible=torch.tensor([2, 1]))
    assert dataclasses.astuple(got) == (pytest.approx(2 / math.sqrt(5)), pytest.approx(4 / 18), 2, 3)
    none = m.Errors(rel=None, calc_diff=None, max_abs=None, pairs=0)
    assert m.errors(scores=a, target_scores=b, visible=torch.tensor([0, 0])) == none
    assert m.errors(scores=a[:, :0], target_scores=b[:, :0], visible=torch.tensor([0, 0])) == none
    with pytest.raises(ValueError, match="are compared with"):
        m.errors(scores=a, target_scores=b[:, :2], visible=torch.tensor([1, 1]))


def test_errors_are_never_silently_zero() -> None:
    args = {"visible": torch.tensor([2])}
    for odd in (NAN, INF, -INF):
        for a, b in ((floats([odd, 1]), floats([1, 1])), (floats([1, 1]), floats([odd, 1]))):
            got = m.errors(scores=a, target_scores=b, **args)
            assert not any(math.isfinite(x or 0) for x in (got.rel, got.calc_diff, got.max_abs)), (a, b)
    opposite = m.errors(scores=floats([INF, 1]), target_scores=floats([-INF, 1]), **args)
    assert opposite.max_abs == INF
    lost = m.errors(scores=floats([0, 1]), target_scores=floats([0, 0]), **args)
    assert (lost.rel, lost.calc_diff, lost.max_abs) == (INF, 1, 1)
    same = floats([NAN, -INF])
    assert dataclasses.astuple(m.errors(scores=same, target_scores=same.clone(), **args)) == (0, 0, 0, 2)
    zero = torch.zeros(1, 2)
    assert dataclasses.astuple(m.errors(scores=zero, target_scores=zero, **args)) == (0, 0, 0, 2)
    # not lost to cancellation: one fp32 ulp of 1 in 2 gives 2^-46 / 2 / 2
    tiny = m.errors(scores=floats([1 + 2**-23, 1]), target_scores=floats([1, 1]), **args)
    assert tiny.calc_diff == pytest.approx(2**-48, rel=1e-6)


@examples
@given(seeds)
def test_errors_against_a_loop(seed: int) -> None:
    c = Case.draw(seed)
    first, second = c.scores.nan_to_num(nan=0.25), c.other.nan_to_num(nan=0.5)
    pairs = [(float(first[row, i]), float(second[row, i])) for row in c.rows() for i in range(int(c.visible[row]))]
    got = m.errors(scores=first, target_scores=second, visible=c.visible)
    assert got.pairs == len(pairs)
    if pairs:
        distance = sum((a - b) ** 2 for a, b in pairs)
        dot, own, target = (sum(x) for x in zip(*((a * b, a * a, b * b) for a, b in pairs), strict=True))
        assert got.rel == pytest.approx(math.sqrt(distance / target))
        assert got.calc_diff == pytest.approx(1 - 2 * dot / (own + target), abs=1e-14)
        assert got.max_abs == max(abs(a - b) for a, b in pairs)
        assert m.errors(scores=second * 1.5, target_scores=second, visible=c.visible).rel == pytest.approx(0.5)
    noise = m.row_noise(emulation_scores=first, target_scores=second, visible=c.visible)
    square = (noise.nan_to_num() ** 2 * c.visible).sum().item()
    assert square == pytest.approx(sum((a - b) ** 2 for a, b in pairs))


def test_errors_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 9, 40, generator=generator)
    args = {"visible": torch.arange(9) * 5, "target_scores": b}
    whole, noise = m.errors(scores=a, **args), m.row_noise(emulation_scores=a, **args)
    monkeypatch.setattr(m, "BLOCK_ELEMENTS", 90)
    assert dataclasses.astuple(m.errors(scores=a, **args)) == pytest.approx(dataclasses.astuple(whole))
    assert torch.equal(m.row_noise(emulation_scores=a, **args).nan_to_num(), noise.nan_to_num())
    a[8, 3] = NAN  # in the last block
    assert math.isnan(m.errors(scores=a, **args).max_abs or 0)
    a[8, 3], a[0:2, 3] = 0, NAN  # in the first
    assert math.isnan(m.errors(scores=a, **args).max_abs or 0)


# --- all of them


def test_a_case_without_entries() -> None:
    empty, visible = torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64)
    selected = ints([-1, -1], [-1, -1])
    c = {"selected": selected, "visible": visible, "k": 2}
    assert m.rows(visible, 2).vacuous
    assert m.overlap(**c, target_selected=selected, entries=0).jaccard is None
    assert m.tied_overlap(**c, target_scores=empty).recall_tied is None
    assert all(b.n == 0 for b in m.survival(**c, target_scores=empty))
    noise = m.row_noise(emulation_scores=empty, target_scores=empty, visible=visible)
    missed = m.misses(**c, target_selected=selected, target_scores=empty, noise=noise)
    assert missed == m.Misses(ties=0, near_ties=0, real=0)
    assert m.margin(target_scores=empty, visible=visible, k=2, noise=noise) is None
    assert m.ranks(scores=empty, visible=visible, entries=selected).tolist() == [[-1, -1]] * 2


@examples
@given(seeds)
def test_what_a_row_cannot_see_changes_nothing(seed: int) -> None:
    c = Case.draw(seed)
    hidden = torch.arange(c.scores.shape[1]) >= c.visible[:, None]

    def everything(scores: Tensor, other: Tensor) -> str:
        noise = m.row_noise(emulation_scores=other, target_scores=scores, visible=c.visible)
        s = {"target_scores": scores, "visible": c.visible, "k": c.k}
        results = [
            m.tied_overlap(selected=c.selected, **s),
            m.misses(selected=c.selected, target_selected=c.target_selected, noise=noise, **s),
            *m.survival(selected=c.selected, **s),
            m.errors(scores=other, target_scores=scores, visible=c.visible),
        ]
        plain = [dataclasses.asdict(result) for result in results]
        return json.dumps([plain, m.margin(noise=noise, **s), noise.tolist()])

    first = everything(c.scores, c.other)
    assert first == everything(c.scores.masked_fill(hidden, 9), c.other.masked_fill(hidden, NAN))


def test_scores_of_a_wrong_kind_are_refused() -> None:
    seen = torch.tensor([2])
    for scores, visible, message in (
        (torch.zeros(2), seen, "float"),
        (torch.zeros(1, 2, dtype=torch.int64), seen, "float"),
        (torch.zeros(2, 2), seen, "does not have a row"),
        (torch.zeros(1, 1), seen, "visible must lie"),
        (torch.zeros(1, 1), -seen, "visible must lie"),
    ):
        with pytest.raises(ValueError, match=message):
            m.thresholds(target_scores=scores, visible=visible, k=1)
