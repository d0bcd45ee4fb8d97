"""Many cases as one, by hand; charts keep their points inside the axes."""

import pytest

from diffcheck.reporting import aggregate, charts


def made(**fields):
    return {
        "layer": 2, "precision": "fp8", "theta_setting": "checkpoint", "length": 4096, "verdict": "format",
        "jaccard_tied": 0.9, "jaccard_kernel": 1.0, "needles": 2, "needles_lost": 1, "needles_selected_reference": 2,
        "needle_rank": [3, None], "attention_mass_lost": None, "score_rel_error": 0.1, "format_error": 0.1,
        "kernel_error": 0.0, "first_stage": "q_quant",
        "survival": [{"lo": 0.0, "hi": 0.1, "p": 1.0, "n": 10}, {"lo": 0.1, "hi": 1.0, "p": 0.5, "n": 20}] * 3,
        "by_visible": [{"lo": 64, "hi": 90, "queries": 1, "jaccard_tied": 1.0}],
        "margins": {"edges": [0.0, 1.0], "counts": [2, 3], "noiseless": 1},
        "stages": [{"stage": "q", "format": 0.0, "kernel": None}, {"stage": "q_quant", "format": 0.2, "kernel": 0.01}],
    } | fields  # fmt: skip


VACUOUS = {"layer": 6, "precision": "fp8", "theta_setting": "checkpoint", "length": 4096, "verdict": "vacuous"}
OTHER = made(
    layer=4, jaccard_tied=0.5, needles_lost=0, needle_rank=[0, 70], attention_mass_lost=0.01, kernel_error=0.3,
    survival=[{"lo": 0.0, "hi": 0.1, "p": 0.4, "n": 30}, {"lo": 0.1, "hi": 1.0, "p": None, "n": 0}] * 3,
    by_visible=[
        {"lo": 64, "hi": 90, "queries": 3, "jaccard_tied": 0.6},
        {"lo": 90, "hi": 128, "queries": 2, "jaccard_tied": 0.5},
    ],
    margins={"edges": [0.0, 1.0], "counts": [1, 0], "noiseless": 0}, first_stage="topk", verdict="kernel",
    stages=[{"stage": "q", "format": None, "kernel": None}, {"stage": "q_quant", "format": 0.1, "kernel": 0.02}],
)  # fmt: skip
CASES = [made(), OTHER, VACUOUS]


def test_survival_is_pooled_by_entries():
    first, second, *_ = aggregate.pooled_survival(CASES)
    assert first == (0.0, 0.1, pytest.approx((1.0 * 10 + 0.4 * 30) / 40), 40)
    assert second == (0.1, 1.0, 0.5, 20)


def test_overlap_is_pooled_by_rows():
    assert aggregate.pooled_overlap(CASES) == [(64, 90, pytest.approx((1.0 + 3 * 0.6) / 4), 4), (90, 128, 0.5, 2)]


def test_margins_and_needles():
    assert aggregate.pooled_margins(CASES) == ([0.0, 1.0], [3, 3], 1)
    assert aggregate.pooled_margins([VACUOUS]) == ([], [], 0)
    ranks = aggregate.needle_ranks([*CASES, made(needles=1, needle_rank=7), made(needles=0, needle_rank=None)])
    assert ranks == [3, None, 0, 70, 7]
    assert aggregate.needle_ranks([made(needles=1, needle_rank=None)]) == [None]
    assert aggregate.share_below(ranks, [0, 1, 3, 3.5, 1000]) == [0, 0.2, 0.2, 0.4, 0.8]


def test_ladder_takes_the_worst_layer():
    q, quant, topk = aggregate.ladder(CASES)
    assert (q.stage, q.format, q.kernel, q.first_in) == ("q", 0.0, None, 0)
    assert (quant.format, quant.kernel, quant.first_in) == (0.2, 0.02, 1)
    assert (topk.stage, topk.format, topk.first_in) == ("topk", None, 1)
    assert aggregate.ladder([VACUOUS]) == []


def test_groups_take_the_worst_layer():
    (group,) = aggregate.groups(CASES)
    assert (group.layers, group.verdict, group.first_stage) == (3, "kernel", "q_quant")
    assert (group.needles_lost, group.needles_selected_reference, group.attention_mass_lost) == (1, 4, 0.01)
    assert (group.jaccard_tied, group.jaccard_tied_mean) == (0.5, pytest.approx(0.7))
    assert (group.kernel_error, group.format_error) == (0.3, 0.1)
    assert group.head == pytest.approx(0.4)
    assert len(aggregate.groups([*CASES, made(theta_setting="10000"), made(length=8192)])) == 3


def test_means_by_length():
    cases = [made(length=8192, jaccard_tied=0.4), *CASES]
    assert aggregate.by_length(cases) == [(4096, pytest.approx(0.7)), (8192, 0.4)]


def test_axes():
    linear = charts.Axis(low=0, high=2, start=10, end=30)
    assert [linear(v) for v in (0, 1, 2, 5, -1)] == [10, 20, 30, 30, 10]
    log = charts.Axis(low=1, high=100, start=0, end=2, log=True)
    assert [log(v) for v in (0, 1, 10, 100, 1e6)] == pytest.approx([0, 0, 1, 2, 2])
    assert charts.y_axis()(1) < charts.y_axis()(0)  # SVG counts from the top


def test_lines_and_ticks():
    assert charts.line(8, "x", [(1, 2.04), (3.55, 4)]).path == "M1 2L3.5 4"
    assert (charts.line(8, "x", [(0, 0)]).colour, charts.line(8, "x", [(0, 0)]).dash) == (1, 1)
    assert charts.outline(0, "x", [0, 1, 2], [5, 6]).path == "M0 5V5H1V6H2"
    axis = charts.x_axis(1, 1000, log=True)
    assert [text for _, text in charts.ticks(axis, [0.5, 1, 1.01, 1000, 2000], "{:g}".format)] == ["1", "1000"]
    assert [charts.tokens(v) for v in (64, 1024, 1536, 1 << 21)] == ["64", "1k", "1.5k", "2M"]
