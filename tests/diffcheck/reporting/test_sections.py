"""Colour classes and lines: what is drawn is what the tables beside it say."""

import re

import pytest

from diffcheck.reporting import charts, sections


@pytest.fixture(scope="module")
def first(run_document):
    return sections.sections(run_document["cases"], 64)[0]


def heat(value, **fields):
    case = {
        "layer": 2, "precision": "fp8", "jaccard_tied": value, "needles_lost": 0, "verdict": "format",
    }  # fmt: skip
    grid = sections.heat_map("x", [case | fields], ["fp8", "fp4"])
    ((_, (cell, absent)),) = grid.rows
    assert (absent.style, absent.text) == ("none", "")
    return cell


def test_heat_classes():
    """A class begins at its edge; only from 0.995 on is a cell like `same`."""
    values = [0.0, 0.2999, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.9949, 0.995, 1.0]
    assert [heat(value).style for value in values] == [
        "h0", "h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7", "h7", "h8", "h8",
    ]  # fmt: skip
    assert heat(0.5, needles_lost=3, verdict="kernel").note == "kernel, 3 lost"
    assert heat(None, verdict="vacuous").text == "vacuous"


def test_ladder_classes(run_document):
    values = [0.0, 9e-7, 1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0]
    styles = [sections._rung(value, 0).style for value in values]
    assert styles == ["h8", "h8", "h7", "h6", "h5", "h4", "h3", "h2", "h1", "h0", "h0"]
    assert (sections._rung(None, 2).style, sections._rung(None, 2).note) == ("none", "first in 2")


def points(line):
    return [tuple(map(float, place.split())) for place in line.path[1:].split("L")]


def height(y):
    bottom = charts.HEIGHT - charts.BOTTOM
    return (bottom - y) / (bottom - charts.TOP)


def test_lines_are_the_numbers_beside_them(first):
    overlap, survival, needles, margins = first.charts
    for chart in (overlap, survival):
        assert [line.label for line in chart.lines] == [label for label, _ in chart.rows]
        for line, (_, cells) in zip(chart.lines, chart.rows, strict=True):
            drawn = [height(y) for _, y in points(line)]
            assert drawn == pytest.approx([float(cell) for cell in cells if cell != "-"], abs=0.002)
    for line, (_, cells) in zip(margins.lines, margins.rows, strict=True):
        counts = [int(cell) for cell in cells[:-1]]
        top = float(margins.y_ticks[-1][1])
        drawn = [top * height(float(y)) for y in re.findall(r"V([\d.]+)", line.path)]
        assert drawn == pytest.approx([count / sum(counts) for count in counts], abs=0.002)
    # at k the needle curve has the share of ranks below k, and k = 64 is a place of its grid
    for line, (label, cells) in zip(needles.lines, needles.rows, strict=True):
        at_k = {round(x): height(y) for x, y in points(line)}[round(needles.marks[0].x)]
        assert at_k == pytest.approx(float(cells[2]), abs=0.002), label


def test_places_across(run_document):
    numbers = {"queries": 4, "jaccard": 0.9, "jaccard_tied": 0.9, "jaccard_worst": 0.5}
    bins = [{"lo": lo, "hi": hi} | numbers for lo, hi in ((64, 90), (724, 1024))]
    cases = [case | {"by_visible": bins} for case in run_document["cases"]]
    overlap, survival, needles, margins = sections.sections(cases, 64)[0].charts
    x = charts.x_axis(128.0, 4096.0, log=True)
    (shade,) = overlap.shades
    assert (shade.x, shade.x + shade.width) == (charts.LEFT, pytest.approx(x(256)))  # all selected up to 4 k tokens
    assert {text: place for place, text in overlap.x_ticks}["1k"] == pytest.approx(x(1024))
    assert points(overlap.lines[0])[0][0] == pytest.approx(x(4 * (64 * 90) ** 0.5), abs=0.06)
    assert survival.marks[0].x == pytest.approx(charts.LEFT + (charts.WIDTH - charts.LEFT - charts.RIGHT) / 1.5)
    assert points(survival.lines[0])[0][0] == pytest.approx(charts.x_axis(0, 1.5)(0.05), abs=0.06)
    seen = max(case["visible"] for case in cases)
    assert needles.marks[0].x == pytest.approx(charts.x_axis(1, seen, log=True)(64))
    assert margins.marks[0].words == "noise"


def test_what_is_open_and_what_is_a_what_if(run_document):
    found = sections.sections(run_document["cases"], 64)
    assert [(s.title, s.open, s.what_if) for s in found] == [
        ("theta checkpoint", True, False), ("theta 10000", False, True),
    ]  # fmt: skip
    assert len({line.colour for line in found[0].charts[0].lines}) == 4
    assert found[0].charts[2].lines[0].label == "reference's own"
    assert [chart.title for chart in found[0].charts] == [
        "Overlap against length", "Survival by rank", "Needle ranks", "Margins at the k-th place",
    ]  # fmt: skip


def test_charts_without_data_are_left_out(run_document):
    cases = [
        case | {"needles": 0, "needle_rank": None, "needle_rank_reference": None} for case in run_document["cases"]
    ]
    titles = [chart.title for chart in sections.sections(cases, 64)[0].charts]
    assert "Needle ranks" not in titles
    assert len(titles) == 3
