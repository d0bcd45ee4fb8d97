"""Invariants of a selection: hand-made violations of each, an independent loop, and the true selection."""

import pytest
import torch
from hypothesis import given, settings

from diffcheck.invariants import check_selection
from diffcheck.probes import WIDTHS, describe, probe_topk
from diffcheck.refimpl.scoring import select_topk
from diffcheck.testing import assert_selection, strategies

SCORES = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 9.0]])
VISIBLE = torch.tensor([5])  # the 9 is not visible; the best three are 0, 2, 3


def check(selected, scores=SCORES, visible=VISIBLE, k=3, again=()):
    return check_selection(torch.tensor([selected]), scores, visible, k, again=[torch.tensor([a]) for a in again])


def test_right():
    found = check([3, 0, 2])
    assert found.causes == []
    assert found.wrong_rows == 0
    assert found.unrepeatable is None
    assert found.tied == 0


@pytest.mark.parametrize(
    ("selected", "causes", "failing"),
    [
        ([0, 2, -1], ["topk_slots"], {"count"}),
        ([0, 2, 2], ["topk_slots"], {"unique"}),
        ([0, 2, 6], ["topk_slots"], {"in_range"}),
        ([0, 2, 5], ["mask"], {"causal"}),
        ([0, 2, 4], ["topk_drop"], {"order"}),
    ],
)
def test_each_violation_is_named(selected, causes, failing):
    found = check(selected)
    assert found.causes == causes
    fields = ("count", "unique", "in_range", "causal", "order")
    assert {name for name in fields if getattr(found, name)} == failing


def test_wrong_values_counts_the_dropped_winners():
    assert check([0, 1, 4]).wrong_values == 1  # 4.0 must be kept; 3.0 is the k-th score itself
    assert check([1, 4, 3]).wrong_values == 2


def test_ties_leave_a_choice():
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    for other in (0, 2, 3):
        found = check([1, other], scores, torch.tensor([4]), k=2)
        assert found.causes == []
        assert found.tied == 1


def test_fewer_visible_than_k():
    assert check([1, 0, -1], visible=torch.tensor([2])).causes == []
    assert check([-1, -1, -1], visible=torch.tensor([0])).causes == []
    assert check([0, 1, 2], visible=torch.tensor([2])).causes == ["topk_slots", "mask"]


def test_nan_ranks_last():
    scores = torch.tensor([[torch.nan, 1.0, 2.0]])
    assert check([1, 2], scores, torch.tensor([3]), k=2).causes == []
    assert check([0, 2], scores, torch.tensor([3]), k=2).causes == ["topk_drop"]


def test_repeats():
    assert check([0, 2, 3], again=[[3, 2, 0]]).unrepeatable == 0
    assert check([0, 2, 3], again=[[3, 2, 4]]).unrepeatable == 1


@settings(max_examples=60, deadline=None)
@given(strategies.scores(max_entries=90, max_k=40))
def test_true_selection_passes_and_swaps_do_not(made):
    scores, visible, k = made.scores, made.visible, made.k
    selected = select_topk(scores, visible, k)
    assert_selection(selected, scores=scores, visible=visible, k=k)
    assert check_selection(selected, scores, visible, k).causes == []
    for row in range(len(scores)):  # swap the worst kept entry for one that scores strictly less
        kept = [j for j in selected[row].tolist() if j >= 0]
        worse = [j for j in range(int(visible[row])) if kept and scores[row, j] < scores[row, kept[-1]]]
        if worse:
            swapped = selected.clone()
            swapped[row, len(kept) - 1] = worse[0]
            found = check_selection(swapped, scores, visible, k)
            assert (found.causes, found.order) == (["topk_drop"], 1)


class Coarse:
    """A top-k that sorts by coarse bins and keeps at most 2048 of the last one, as real kernels do."""

    name = "coarse"

    def topk(self, scores, visible, k):
        bins = (scores * 2).floor()
        width = torch.arange(scores.shape[1])
        out = []
        for row in range(len(scores)):
            edge = bins[row].topk(k).values[-1]
            sure = width[bins[row] > edge]
            pool = width[bins[row] == edge][:2048]
            rest = pool[scores[row, pool].topk(k - len(sure)).indices]
            out.append(torch.cat((sure, rest)))
        return torch.stack(out)


def test_probe_exposes_a_bucket_overflow_and_clears_the_short_row():
    short, long = probe_topk(Coarse(), 512, "cpu")
    assert (short["entries"], long["entries"]) == WIDTHS
    assert short["causes"] == []
    assert long["causes"] == ["topk_drop"]
    assert "right" in describe(short)
    assert "top-k drops winners" in describe(long)
