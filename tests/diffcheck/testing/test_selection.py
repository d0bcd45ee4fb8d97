"""assert_selection: right exactly when a loop in plain Python says so, and what its messages name."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcheck.metrics import tied_hits
from diffcheck.testing import assert_selection, strategies

NAN, INF = math.nan, math.inf
SCORES = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 9.0]])
VISIBLE = torch.tensor([5])  # the 9 is not visible; the best three are 0, 2, 3


def right(selected, scores, visible, k, allowed):
    """Once more, a row at a time, from the definition."""
    for row, seen in enumerate(visible.tolist()):
        values = [-INF if math.isnan(x) else x for x in scores[row, :seen].tolist()]
        taken = [entry for entry in selected[row].tolist() if entry != -1]
        wanted = min(k, seen)
        if len(taken) != wanted or len(set(taken)) != wanted or not all(0 <= entry < seen for entry in taken):
            return False
        if wanted == 0:
            continue
        tau = sorted(values, reverse=True)[wanted - 1]
        if any(values[entry] < tau - allowed for entry in taken):
            return False
        if any(value > tau + allowed and entry not in taken for entry, value in enumerate(values)):
            return False
    return True


def accepted(*arguments, **options):
    try:
        assert_selection(*arguments, **options)
    except AssertionError:
        return False
    return True


@settings(max_examples=300)
@given(strategies.scores(max_entries=12, max_k=8), st.data())
def test_right_exactly_when_the_definition_says_so(made, data):
    scores, visible, k = made.scores, made.visible, made.k
    entries = scores.shape[1]
    allowed = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    rows = []
    for row, seen in enumerate(visible.tolist()):
        values = [-INF if math.isnan(x) else x for x in scores[row, :seen].tolist()]
        best = sorted(range(seen), key=lambda j, v=values: -v[j])[:k]
        best += [-1] * (k - len(best))
        for _ in range(data.draw(st.integers(0, 2))):
            best[data.draw(st.integers(0, k - 1))] = data.draw(st.integers(-1, entries - 1))
        rows.append(data.draw(st.permutations(best)))
    selected = torch.tensor(rows)
    want = right(selected, scores, visible, k, allowed)
    assert accepted(selected, scores=scores, k=k, visible=visible, tolerance=allowed) is want
    assert accepted(selected.int(), scores=scores.double(), k=k, visible=visible, tolerance=allowed) is want
    if allowed == 0 and want:
        hits, _ = tied_hits(selected=selected, target_scores=scores, visible=visible, k=k)
        assert (hits[visible > k] == k).all(), "the metric forgives what the assertion forgives"


def test_all_are_visible_by_default():
    assert_selection(torch.tensor([[5, 0, 2]]), scores=SCORES, k=3)
    assert not accepted(torch.tensor([[0, 2, 3]]), scores=SCORES, k=3)


def test_order_and_empty_places_do_not_matter():
    assert_selection(torch.tensor([[3, -1, 0, 2, -1]]), scores=SCORES, k=3, visible=VISIBLE)


def test_ulps_are_of_the_scores_dtype_at_the_kth():
    scores = torch.tensor([[1.0, 1.0078125, 1.015625, 0.5]]).bfloat16()  # steps of one bf16 ulp
    near, far = torch.tensor([[1]]), torch.tensor([[0]])
    assert not accepted(near, scores=scores, k=1)
    assert accepted(near, scores=scores, k=1, ulps=1)
    assert not accepted(far, scores=scores, k=1, ulps=1)
    assert accepted(far, scores=scores, k=1, ulps=2)
    assert not accepted(near, scores=scores.float(), k=1, ulps=1), "an fp32 ulp is smaller"
    assert accepted(torch.tensor([[1, 0]]), scores=torch.tensor([[-INF, INF]]), k=2, ulps=1)


def test_tolerance_may_differ_by_row_and_adds_to_ulps():
    scores = torch.tensor([[1.0, 0.9]]).repeat(2, 1)
    wrong = torch.tensor([[1], [1]])
    assert accepted(wrong, scores=scores, k=1, tolerance=torch.tensor([0.11, 0.11]))
    with pytest.raises(AssertionError, match=r"wrong in 1 of 2 rows.*first in row 1"):
        assert_selection(wrong, scores=scores, k=1, tolerance=torch.tensor([0.11, 0.09]))
    scores = torch.tensor([[1.0, 0.9]]).bfloat16()
    assert accepted(wrong[:1], scores=scores, k=1, tolerance=0.0995, ulps=1)
    assert not accepted(wrong[:1], scores=scores, k=1, tolerance=0.0995)


def message(selected, **options):
    with pytest.raises(AssertionError) as caught:
        assert_selection(torch.tensor(selected), **({"scores": SCORES, "k": 3, "visible": VISIBLE} | options))
    return str(caught.value)


def test_a_dropped_winner_is_explained():
    assert message([[0, 2, 4]]).splitlines() == [
        "selection is wrong in 1 of 1 rows (top 3), first in row 0, which sees 5 entries:",
        "  drops entry 3: score 3, rank 2",
        "  keeps entry 4: score 2, rank 3",
        "  k-th score 3, next lower 2 (margin 1); allowed at a tie: 0",
    ]
    assert message([[1, 4, 3]], positions=torch.tensor([77])).splitlines() == [
        "selection is wrong in 1 of 1 rows (top 3), first in row 0 (position 77), which sees 5 entries:",
        "  drops entry 0: score 5, rank 0",
        "  keeps entry 1: score 1, rank 4",
        "  k-th score 3, next lower 2 (margin 1); allowed at a tie: 0",
        "  in all it drops 2 that are better than the k-th: entries 0, 2",
    ]


@pytest.mark.parametrize(
    ("selected", "line"),
    [
        ([[0, 2, 5]], "selects entry 5, which it must not see"),
        ([[0, 2, 6]], "selects entry 6, of 6 (0 to 5, or -1 for none)"),
        ([[0, 2, -7]], "selects entry -7, of 6 (0 to 5, or -1 for none)"),
        ([[0, 2, 2]], "selects entry 2 more than once"),
        ([[0, 2, -1]], "fills 2 places, expected 3"),
        ([[0, 2, 3, 4]], "fills 4 places, expected 3"),
        ([[5, 5, -1]], "selects entry 5 more than once"),
    ],
)
def test_impossible_selections_are_named(selected, line):
    assert f"  {line}\n" in message(selected)


def test_an_empty_place_names_what_is_missing():
    assert "drops entry 3: score 3, rank 2" in message([[0, 2, -1]])
    assert "drops entry 1: score 1, rank 1" in message([[0, -1, -1]], visible=torch.tensor([2]))


def test_other_wrong_rows_are_listed():
    scores = torch.arange(4.0).repeat(12, 1)
    selected = torch.full((12, 1), 3)
    selected[2:] = 0
    text = message(selected.tolist(), scores=scores, k=1, visible=None)
    assert "wrong in 10 of 12 rows (top 1), first in row 2" in text
    assert "also wrong: rows 3, 4, 5, 6, 7, 8, … (9 in all)" in text


def test_nan_and_infinity():
    scores = torch.tensor([[NAN, 1.0, -INF, INF]])
    assert_selection(torch.tensor([[3, 1]]), scores=scores, k=2)
    for last in (0, 2):  # NaN is level with -inf
        assert_selection(torch.tensor([[3, 1, last]]), scores=scores, k=3)
    assert "keeps entry 0: score nan, rank 2" in message([[3, 0]], scores=scores, k=2, visible=None)


def test_nothing_to_select():
    assert_selection(torch.full((2, 3), -1), scores=torch.randn(2, 5), k=3, visible=torch.zeros(2).int())
    assert_selection(torch.full((2, 3), -1), scores=torch.empty(2, 0), k=3)
    assert_selection(torch.empty(0, 3).long(), scores=torch.empty(0, 5), k=3)
    assert "fills 1 places, expected 0" in message([[0]], visible=torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 0}, "k is 0"),
        ({"ulps": -1}, "expected numbers of at least 0"),
        ({"tolerance": NAN}, "expected numbers of at least 0"),
        ({"scores": SCORES[0]}, "scores must be float"),
        ({"scores": SCORES.int()}, "scores must be float"),
        ({"visible": torch.tensor([7])}, r"visible must lie in 0 … 6"),
        ({"selected": torch.tensor([[0.0]])}, "expected int32 or int64"),
        ({"selected": torch.tensor([[0], [1]])}, "does not have a row for each"),
    ],
)
def test_wrong_arguments(options, text):
    arguments = {"selected": torch.tensor([[0, 2, 3]]), "scores": SCORES, "k": 3, "visible": VISIBLE} | options
    with pytest.raises(ValueError, match=text):
        assert_selection(arguments.pop("selected"), **arguments)
