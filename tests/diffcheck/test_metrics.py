"""Each metric against numbers worked out by hand, a plain loop over small inputs, and a property."""

from __future__ import annotations

import dataclasses
import json
import math
from types import ModuleType

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


def naive_band(tau: float) -> float:
    """The bf16 spacing at a tau between 0.5 and 2."""
    return 0.0 if math.isinf(tau) else 2**-7 if tau >= 1 else 2**-8


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
def test_overlap_against_a_loop(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    entries = c.scores.shape[1]
    sets = {"selected": c.selected, "target_selected": c.target_selected, "entries": entries}
    held = m.membership(c.selected, entries)
    jaccards, recalls = m.jaccards(**sets).tolist(), m.recalls(**sets).tolist()
    for row in c.rows():
        own, target = c.own(row), c.target(row)
        assert set(held[row].nonzero()[:, 0].tolist()) == own
        if own | target:
            assert jaccards[row] == len(own & target) / len(own | target)
        if target:
            assert recalls[row] == len(own & target) / len(target)
    turned = m.jaccards(selected=c.target_selected, target_selected=c.selected, entries=entries)
    assert torch.equal(m.jaccards(**sets).nan_to_num(), turned.nan_to_num())
    counted = c.counted()
    if counted and all(c.target(row) for row in counted):
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
def test_tied_hits_against_a_loop(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    args = {"target_scores": c.scores, "visible": c.visible, "k": c.k}
    hits, _ = m.tied_hits(selected=c.selected, **args, score_dtype=BF16)
    assert m.thresholds(**args).tolist() == [c.tau(row) for row in c.rows()]
    expected = []
    for row in c.rows():
        tau, own = c.tau(row), c.own(row)
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
def test_misses_against_a_loop(score_cases: ModuleType, seed: int, noise: float) -> None:
    c = score_cases.Case.draw(seed)
    args = {"selected": c.selected, "target_scores": c.scores, "visible": c.visible, "k": c.k}
    noises = torch.full(c.visible.shape, noise)
    got = m.misses(**args, target_selected=c.target_selected, noise=noises, score_dtype=BF16)
    ties = near = real = 0
    for row in c.counted():
        tau = c.tau(row)
        for entry in c.target(row) - c.own(row):
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
def test_margin_against_a_loop_and_scaled(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
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
def test_errors_against_a_loop(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
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
    noise = m.row_noise(emulation_scores=empty, target_scores=empty, visible=visible)
    missed = m.misses(**c, target_selected=selected, target_scores=empty, noise=noise)
    assert missed == m.Misses(ties=0, near_ties=0, real=0)
    assert m.margin(target_scores=empty, visible=visible, k=2, noise=noise) is None


@examples
@given(seeds)
def test_what_a_row_cannot_see_changes_nothing(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    hidden = torch.arange(c.scores.shape[1]) >= c.visible[:, None]

    def everything(scores: Tensor, other: Tensor) -> str:
        noise = m.row_noise(emulation_scores=other, target_scores=scores, visible=c.visible)
        s = {"target_scores": scores, "visible": c.visible, "k": c.k}
        results = [
            m.tied_overlap(selected=c.selected, **s),
            m.misses(selected=c.selected, target_selected=c.target_selected, noise=noise, **s),
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
