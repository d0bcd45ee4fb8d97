"""Profiles of a case: hand-computed bins, sums that must agree with the totals, and stage errors against numpy."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffcheck import metrics
from diffcheck.pipeline import Pipeline
from diffcheck.profiles import MARGIN_EDGES, margin_histogram, overlap_by_visible, stage_errors, visible_edges
from diffcheck.recipe import Recipe
from diffcheck.refimpl import STAGES, Trace


def profile(selected, target, scores, visible, k):
    jaccard = metrics.jaccards(selected=selected, target_selected=target, entries=scores.shape[1])
    return overlap_by_visible(jaccard=jaccard, selected=selected, target_scores=scores, visible=visible, k=k)


def test_edges_by_hand():
    assert visible_edges(64, 1000) == [64, 90, 128, 181, 256, 362, 512, 724, 1024]
    assert visible_edges(64, 1024)[-1] == 1024
    assert visible_edges(64, 1025)[-1] == 1448
    assert visible_edges(64, 64) == [64]
    assert visible_edges(1, 6) == [1, 2, 4, 5, 8]  # 1.41 and 2.83 round down to edges that are there


@given(k=st.integers(1, 4096), factor=st.floats(1, 2000))
def test_edges_rise_by_the_root_of_two(k, factor):
    edges = visible_edges(k, int(k * factor))
    assert edges[0] == k
    assert edges[-1] >= int(k * factor)
    assert all(a < b for a, b in pairwise(edges))
    powers = {math.floor(math.sqrt(2**i) * k + 1e-9) for i in range(30)}
    assert set(edges) <= powers


def test_overlap_by_hand():
    """k is 2; row 0 sees too little; rows 1 and 2 see 3 and 4 entries, row 3 six; row 2's miss is a tie."""
    selected = torch.tensor([[0, 1], [0, 1], [0, 3], [4, 5]])
    target = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1]])
    scores = torch.tensor([[9.0, 8, 0, 0, 0, 0], [9, 8, 7, 0, 0, 0], [9, 5, 1, 5, 0, 0], [9, 8, 7, 6, 5, 4]])
    first, second = profile(selected, target, scores, torch.tensor([2, 3, 4, 6]), 2)
    assert (first.lo, first.hi, first.queries) == (2, 4, 2)
    assert first.jaccard == pytest.approx((1 + 1 / 3) / 2)
    assert (first.jaccard_tied, first.jaccard_worst) == (1, pytest.approx(1 / 3))
    assert (second.lo, second.hi, second.queries) == (5, 8, 1)
    assert (second.jaccard, second.jaccard_tied, second.jaccard_worst) == (0, 0, 0)


def test_no_row_that_counts_gives_no_bin():
    selected = torch.tensor([[0, 1]])
    assert profile(selected, selected, torch.ones(1, 4), torch.tensor([2]), 2) == []


@given(seed=st.integers(0, 200), k=st.integers(1, 6))
def test_bins_add_up_to_the_whole(seed, k):
    generator = torch.Generator().manual_seed(seed)
    rows, entries = 17, 24
    scores = torch.randn(rows, entries, generator=generator)
    visible = torch.randint(k, entries + 1, (rows,), generator=generator)
    hidden = torch.arange(entries) >= visible[:, None]
    target = scores.masked_fill(hidden, -torch.inf).topk(k).indices
    noisy = scores + 0.5 * torch.randn(rows, entries, generator=generator)
    selected = noisy.masked_fill(hidden, -torch.inf).topk(k).indices
    bins = profile(selected, target, scores, visible, k)
    whole = metrics.overlap(selected=selected, target_selected=target, entries=entries, visible=visible, k=k)
    tied = metrics.tied_overlap(selected=selected, target_scores=scores, visible=visible, k=k)
    queries = sum(b.queries for b in bins)
    assert queries == metrics.rows(visible, k).queries
    if queries:
        assert sum(b.queries * b.jaccard for b in bins) / queries == pytest.approx(whole.jaccard)
        assert sum(b.queries * b.jaccard_tied for b in bins) / queries == pytest.approx(tied.jaccard_tied)
        assert all(b.jaccard_worst <= b.jaccard <= b.jaccard_tied + 1e-12 for b in bins)


def test_margins_by_hand():
    values = [0.0, 0.0005, 0.001, 0.5, 1.0, 100.0, 1e9, math.inf, math.nan, math.nan]
    found = margin_histogram(torch.tensor(values, dtype=torch.float64))
    assert found.edges == MARGIN_EDGES == (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
    assert found.counts == [2, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 2]
    assert found.noiseless == 1


class TestStages:
    @pytest.fixture
    def layer(self, support):
        config = support.config()
        x, qr = support.inputs(config, 64)
        return Pipeline(config, support.weights(config), x, qr)

    def test_the_emulation_has_no_kernel_part(self, layer):
        config = layer.call.config
        reference, recipe = Recipe.reference(config), Recipe.preset("fp8", config)
        found = {e.stage: e for e in stage_errors(layer, recipe, layer.trace(recipe), reference)}
        assert list(found) == [name for name in STAGES if name != "topk"]
        assert all(e.kernel == 0 and e.total == e.format for e in found.values())
        assert found["q"].format == 0
        assert 0 < found["pool"].format < 0.01  # keys stay in fp32, the reference rounds them to bf16
        ours, target = (layer.stage(r, "k_quant").double().numpy() for r in (recipe, reference))
        assert found["k_quant"].format == pytest.approx(np.linalg.norm(ours - target) / np.linalg.norm(target))
        assert found["k_quant"].format > 0.01

    def test_format_and_kernel_are_told_apart(self, layer):
        config = layer.call.config
        reference, recipe = Recipe.reference(config), Recipe.preset("fp8", config)
        right = layer.trace(recipe)
        wrong = Trace({"k_quant": 2 * right["k_quant"], "scores": right["scores"]})
        found = {e.stage: e for e in stage_errors(layer, recipe, wrong, reference)}
        assert found["k_quant"].kernel == pytest.approx(1)
        assert found["k_quant"].total == pytest.approx(1, abs=0.1)
        assert found["k_quant"].format < 0.2
        assert found["scores"].kernel == 0
        assert (found["q_quant"].total, found["q_quant"].kernel) == (None, None)  # not shown
        assert found["q_quant"].format > 0

    def test_scores_are_compared_where_they_are_visible(self, layer):
        reference = Recipe.reference(layer.call.config)
        scores = layer.stage(reference, "scores").clone()
        hidden = torch.arange(scores.shape[1]) >= ((layer.queries + 1) // 4)[:, None]
        scores[hidden] = 7.0
        (found,) = [
            e for e in stage_errors(layer, reference, Trace({"scores": scores}), reference) if e.stage == "scores"
        ]
        assert found.total == 0

    def test_what_is_no_number_is_none(self, layer):
        reference = Recipe.reference(layer.call.config)
        pool = torch.full_like(layer.stage(reference, "pool"), torch.nan)
        (found,) = [e for e in stage_errors(layer, reference, Trace({"pool": pool}), reference) if e.stage == "pool"]
        assert found.total is None
