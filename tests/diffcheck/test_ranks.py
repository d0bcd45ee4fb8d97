"""Ranks, needles and survival against numbers worked out by hand, plain loops over small inputs, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffcheck.ranks import BIN_EDGES, Needles, needle_entries, needles, ranks, survival

INF, NAN = math.inf, math.nan
BF16 = torch.bfloat16
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=150, deadline=None)


def ints(*lists: list[int]) -> Tensor:
    return torch.tensor(lists)


def floats(*lists: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(lists, dtype=dtype)


def naive_ranks(scores: list[float]) -> list[int]:
    return [sum(other > own for other in scores) for own in scores]


# --- ranks


def test_ranks() -> None:
    # larger than 7: nothing; than 5 (twice): one; than 1: three; NaN is below the four numbers; the last is
    # unseen
    scores = floats([5, 7, 5, 1, NAN, 99], dtype=BF16)
    got = ranks(scores=scores, visible=torch.tensor([5]), entries=ints([0, 1, 2, 3, 4, 5, -1]))
    assert got.tolist() == [[1, 0, 1, 3, 4, -1, -1]]
    with pytest.raises(AssertionError):
        ranks(scores=scores, visible=torch.tensor([5]), entries=ints([6]))
    close = floats([1, 1 + 2**-40], dtype=torch.float64)  # the same in fp32
    assert ranks(scores=close, visible=torch.tensor([2]), entries=ints([0, 1])).tolist() == [[1, 0]]


@examples
@given(seeds)
def test_ranks_against_a_loop_and_permuted(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    entries = torch.arange(c.scores.shape[1]).expand_as(c.scores)
    got = ranks(scores=c.scores, visible=c.visible, entries=entries)
    for row in c.rows():
        unseen = [-1] * (len(got[row]) - int(c.visible[row]))
        assert got[row].tolist() == naive_ranks(c.seen(row)) + unseen
    everything = torch.full_like(c.visible, c.scores.shape[1])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(c.scores.shape[1]))
    before = ranks(scores=c.scores, visible=everything, entries=entries)
    after = ranks(scores=c.scores[:, order], visible=everything, entries=entries)
    assert torch.equal(before[:, order], after)


def test_needle_entries() -> None:
    # entry 1 has tokens 4 … 7
    assert list(needle_entries(4, 7)) == [1]
    assert list(needle_entries(3, 8)) == [0, 1, 2]
    assert list(needle_entries(0, 0)) == [0]
    for first, last in ((-1, 0), (5, 4)):
        with pytest.raises(ValueError, match="no needle"):
            needle_entries(first, last)


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
    got = needles(**args, spans=spans)
    assert got == Needles(ranks=[1, 4, None, 1], selected=[True, False, False, False], rank_median=1)
    half = needles(**{name: x[:2] for name, x in args.items()}, spans=spans[:2])
    assert half.rank_median == 2.5
    none = {name: x[:0] for name, x in args.items()}
    assert needles(**none, spans=[]) == Needles(ranks=[], selected=[], rank_median=None)
    with pytest.raises(ValueError, match="needles for"):
        needles(**args, spans=spans[:2])
    for bad in (range(4, 6), range(2, 2)):
        with pytest.raises(ValueError, match="needle 0 lies"):
            needles(**args, spans=[bad, *spans[1:]])


@examples
@given(seeds)
def test_needles_against_a_loop(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    rng = np.random.default_rng(seed)
    entries = c.scores.shape[1]
    spans = []
    for _ in c.rows():
        start = int(rng.integers(entries))
        spans.append(range(start, int(rng.integers(start + 1, entries + 1))))
    got = needles(scores=c.scores, selected=c.selected, visible=c.visible, spans=spans)
    for row in c.rows():
        seen = [i for i in spans[row] if i < int(c.visible[row])]
        order = naive_ranks(c.seen(row))
        assert got.ranks[row] == (min(order[i] for i in seen) if seen else None)
        assert got.selected[row] == any(i in c.own(row) for i in seen)


# --- survival


def test_survival() -> None:
    # k = 20, ranks 0 … 39: edges 2, 5, 10, 15, 18, 20, 30. Lost: ranks 0, 7, 12, 13, 19. Kept beyond: 20, 29,
    # 30.
    kept = [r for r in range(20) if r not in (0, 7, 12, 13, 19)] + [20, 29, 30]
    scores = -torch.arange(40.0)[None]
    got = survival(selected=ints(kept), target_scores=scores, visible=torch.tensor([40]), k=20)
    assert [(b.lo, b.hi) for b in got] == [
        (0, 0.1), (0.1, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.9), (0.9, 1), (1, 1.5),
    ]  # fmt: skip
    assert [b.n for b in got] == [2, 3, 5, 5, 3, 2, 10]
    assert [b.p for b in got] == [1 / 2, 1, 4 / 5, 3 / 5, 1, 1 / 2, 2 / 10]
    assert all(b.ci is None for b in got)  # one row is one group


def test_survival_edges_are_exact() -> None:
    # rank 7 is a tenth of k = 70 exactly and belongs to the second bin
    got = survival(selected=ints([7]), target_scores=-torch.arange(71.0)[None], visible=torch.tensor([71]), k=70)
    assert [b.n for b in got] == [7, 11, 17, 18, 10, 7, 1]
    assert [b.p for b in got][:2] == [0, 1 / 11]
    for k in range(1, 4097):  # no product is rounded across a whole number
        percents = [round(100 * edge) for edge in BIN_EDGES]
        assert [math.ceil(edge * k) for edge in BIN_EDGES] == [-(-percent * k // 100) for percent in percents]


def test_survival_with_ties() -> None:
    # k = 2, edges 1 (0.1, 0.25, 0.5 of 2 all round up to 1), 2, 2, 2, 3. Scores 5 | 4 4 4 | 1: the three 4s
    # share rank 1 and are in [0.5, 0.75); 1 has rank 4, beyond 1.5 k. A correct S holds 5 and one of them.
    args = {"target_scores": floats([5, 4, 4, 4, 1, NAN]), "k": 2}
    got = survival(selected=ints([0, 2]), visible=torch.tensor([6]), **args)
    assert [b.n for b in got] == [1, 0, 0, 3, 0, 0, 0]
    assert [b.p for b in got] == [1, None, None, pytest.approx(1 / 3), None, None, None]
    # repeats, empty places and what the row cannot see are not counted
    got = survival(selected=ints([2, 2, -1, 4]), visible=torch.tensor([3]), **args)
    assert [(b.n, b.p) for b in got if b.n] == [(1, 0), (2, 1 / 2)]


def test_survival_interval_and_vacuous() -> None:
    # 16 rows make blocks of four. The first two blocks keep both entries of k = 2, the others nothing. All
    # draws are of one kind with a chance of 1/16 each, so the interval is 0 to 1; of single rows it is not.
    scores = -torch.arange(6.0).expand(16, 6)
    selected = ints([0, 1]).repeat(16, 1)
    selected[8:] = -1
    args = {"selected": selected, "target_scores": scores, "k": 2}
    got = survival(**args, visible=torch.full((16,), 6))
    assert (got[0].p, got[0].n, got[0].ci) == (0.5, 16, (0, 1))
    assert got == survival(**args, visible=torch.full((16,), 6))
    # Five sequences or more are resampled whole, here each a row, and only those that count: 4 … 11.
    visible = torch.tensor([2] * 4 + [6] * 8 + [2] * 4)
    by_row = survival(**args, visible=visible, sequences=torch.arange(16))
    assert (by_row[0].p, by_row[0].n, by_row[0].ci) == (0.5, 8, (0.125, 0.875))
    none = survival(**args, visible=torch.full((16,), 2))
    assert [(b.p, b.n, b.ci) for b in none] == [(None, 0, None)] * 7


def naive_bins(c: Any, ranks_of: Callable[[int], list[int]]) -> list[tuple[int, int]]:
    percent = [0, 10, 25, 50, 75, 90, 100, 150]
    found = []
    for lo, hi in pairwise(percent):
        inside = [
            i in c.own(row)
            for row in c.counted()
            for i, r in enumerate(ranks_of(row))
            if lo * c.k <= 100 * r < hi * c.k
        ]
        found.append((len(inside), sum(inside)))
    return found


@examples
@given(seeds)
def test_survival_against_a_loop(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    got = survival(selected=c.selected, target_scores=c.scores, visible=c.visible, k=c.k)
    expected = naive_bins(c, lambda row: naive_ranks(c.seen(row)))
    assert [(b.n, b.n * (b.p or 0)) for b in got] == [(n, pytest.approx(found)) for n, found in expected]


def test_survival_agrees_with_ranks_on_long_rows(score_cases: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 20000, generator=generator).to(BF16)  # hundreds of entries share each score
    visible = torch.tensor([20000, 19000, 512])
    noisy = scores.float() + 0.1 * torch.randn(3, 20000, generator=generator)
    noisy[torch.arange(20000) >= visible[:, None]] = -INF
    c = score_cases.Case(noisy.topk(512).indices, ints(), scores, noisy, visible, 512)
    got = survival(selected=c.selected, target_scores=scores, visible=visible, k=512)
    every = ranks(scores=scores, visible=visible, entries=torch.arange(20000).expand(3, -1))
    expected = naive_bins(c, lambda row: every[row, : int(visible[row])].tolist())
    assert [(b.n, b.n * (b.p or 0)) for b in got] == [(n, pytest.approx(found)) for n, found in expected]


# --- all of them


def test_a_case_without_entries() -> None:
    empty, visible = torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64)
    selected = ints([-1, -1], [-1, -1])
    assert all(b.n == 0 for b in survival(selected=selected, visible=visible, k=2, target_scores=empty))
    assert ranks(scores=empty, visible=visible, entries=selected).tolist() == [[-1, -1]] * 2


@examples
@given(seeds)
def test_what_a_row_cannot_see_changes_nothing(score_cases: ModuleType, seed: int) -> None:
    c = score_cases.Case.draw(seed)
    hidden = torch.arange(c.scores.shape[1]) >= c.visible[:, None]
    args = {"selected": c.selected, "visible": c.visible, "k": c.k}
    first = survival(**args, target_scores=c.scores)
    assert first == survival(**args, target_scores=c.scores.masked_fill(hidden, 9))
