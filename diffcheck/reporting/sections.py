"""The parts of the page that are drawn for each theta and length: heat map, charts and stage ladder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from . import aggregate, charts
from .charts import Chart
from .words import Record, error, is_measured, number

HEAT_EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Classes of the heat map by tie-tolerant Jaccard; from the last edge on a case is `same`."""
LADDER_EDGES = (1e-6, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Classes of the stage ladder by relative error."""
NEEDLE_LIMITS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Ranks of the needle table, in units of k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A coloured cell: its class, its number in words, and a remark beside it."""

    style: str
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of coloured cells: (row label, cells)."""

    name: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Everything about one theta at one length."""

    name: str
    title: str
    theta: str
    length: int
    what_if: bool
    open: bool
    heat: Grid
    charts: list[Chart]
    ladder: Grid


def sections(cases: Sequence[Record], k: int) -> list[Section]:
    """One section for each theta and length; the checkpoint's theta at the largest length is open."""
    precisions = list(dict.fromkeys(case["precision"] for case in cases))
    thetas = list(dict.fromkeys(case["theta_setting"] for case in cases))
    lengths = sorted({case["length"] for case in cases}, reverse=True)
    found: list[Section] = []
    for theta in thetas:
        for length in lengths:
            mine = aggregate.select(cases, theta_setting=theta, length=length)
            if mine:
                title = f"theta {theta}" + (f", {length} tokens" if len(lengths) > 1 else "")
                name = f"s{len(found)}"
                found.append(
                    Section(
                        name=name, title=title, theta=theta, length=length,
                        what_if=all(case["what_if"] for case in mine), open=not found,
                        heat=heat_map(f"{name}-heat", mine, precisions),
                        ladder=ladder(f"{name}-ladder", mine, precisions),
                        charts=[chart for chart in _charts(name, mine, precisions, k) if chart.lines],
                    )
                )  # fmt: skip
    return found


def heat_map(name: str, cases: Sequence[Record], precisions: Sequence[str]) -> Grid:
    """Tie-tolerant Jaccard, layers down and precisions across."""
    by_place = {(case["layer"], case["precision"]): case for case in cases}
    layers = sorted({case["layer"] for case in cases})
    rows = [(str(layer), [_heat(by_place.get((layer, name))) for name in precisions]) for layer in layers]
    return Grid(name=name, columns=list(precisions), rows=rows)


def _heat(case: Record | None) -> Cell:
    if case is None:
        return Cell(style="none", text="")
    if not is_measured(case):
        return Cell(style="none", text=case["verdict"])
    value, lost = case["jaccard_tied"], case["needles_lost"]
    notes = ["kernel"] if case["verdict"] == "kernel" else []
    notes += [f"{lost} lost"] if lost else []
    return Cell(style=f"h{sum(value >= edge for edge in HEAT_EDGES)}", text=number(value), note=", ".join(notes))


def ladder(name: str, cases: Sequence[Record], precisions: Sequence[str]) -> Grid:
    """Relative error of each stage, format part and kernel part, the largest of any layer; precisions down."""
    columns: list[str] = []
    rows = []
    for precision in precisions:
        rungs = aggregate.ladder(aggregate.select(cases, precision=precision))
        columns = [rung.stage for rung in rungs] or columns
        if rungs:
            rows.append((f"{precision}: format", [_rung(rung.format, rung.first_in) for rung in rungs]))
            if any(rung.kernel for rung in rungs):
                rows.append((f"{precision}: kernel", [_rung(rung.kernel, 0) for rung in rungs]))
    return Grid(name=name, columns=columns, rows=rows)


def _rung(value: float | None, first_in: int) -> Cell:
    note = f"first in {first_in}" if first_in else ""
    if value is None:
        return Cell(style="none", text="-", note=note)
    return Cell(style=f"h{8 - sum(value >= edge for edge in LADDER_EDGES)}", text=error(value), note=note)


def _charts(name: str, cases: Sequence[Record], precisions: Sequence[str], k: int) -> list[Chart]:
    by_name = {precision: aggregate.select(cases, precision=precision) for precision in precisions}
    return [
        overlap_chart(f"{name}-overlap", by_name, k),
        survival_chart(f"{name}-survival", by_name),
        needle_chart(f"{name}-needles", by_name, k),
        margin_chart(f"{name}-margins", by_name),
    ]


def overlap_chart(name: str, by_name: dict[str, list[Record]], k: int) -> Chart:
    """Overlap against what a row sees, in tokens; below 4 k everything is selected."""
    found = {label: aggregate.pooled_overlap(cases) for label, cases in by_name.items()}
    bins = sorted({(lo, hi) for pooled in found.values() for lo, hi, _, _ in pooled})
    x, y = charts.x_axis(2.0 * k, max([4.0 * hi for _, hi in bins], default=8.0 * k), log=True), charts.y_axis()
    lines, rows = [], []
    for place, (label, pooled) in enumerate(found.items()):
        if pooled:
            points = [(x(4 * math.sqrt(lo * hi)), y(mean)) for lo, hi, mean, _ in pooled]
            lines.append(charts.line(place, label, points))
            means = {(lo, hi): mean for lo, hi, mean, _ in pooled}
            rows.append((label, [number(means.get(b)) for b in bins]))
    powers = [4.0 * k * 2**i for i in range(-1, 24)]
    return Chart(
        name=name, title="Overlap against length",
        words="Mean tie-tolerant Jaccard of the rows at each position; more of a text's entries compete further on.",
        x_label="position in the text, tokens", y_label="Jaccard", lines=lines,
        x_ticks=charts.ticks(x, powers, charts.tokens), y_ticks=charts.shares(),
        shades=[charts.shade(x, 2.0 * k, 4.0 * k, "all selected")],
        columns=[f"to {4 * hi}" for _, hi in bins], rows=rows,
    )  # fmt: skip


def survival_chart(name: str, by_name: dict[str, list[Record]]) -> Chart:
    """Share still selected by reference rank."""
    x, y = charts.x_axis(0.0, 1.5), charts.y_axis()
    lines, rows, columns = [], [], []
    for place, (label, cases) in enumerate(by_name.items()):
        pooled = aggregate.pooled_survival(cases)
        if pooled:
            columns = [f"{lo:g} to {hi:g}" for lo, hi, _, _ in pooled]
            points = [(x((lo + hi) / 2), y(share)) for lo, hi, share, _ in pooled if share is not None]
            lines.append(charts.line(place, label, points))
            rows.append((label, [number(share) for _, _, share, _ in pooled]))
    return Chart(
        name=name, title="Survival by rank",
        words="Share still selected of the entries at each reference rank; beyond k these are false admissions.",
        x_label="rank by the reference's scores, in units of k", y_label="share selected", lines=lines,
        x_ticks=charts.ticks(x, [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5], "{:g}".format), y_ticks=charts.shares(),
        marks=[charts.mark(x, 1.0, "k")], columns=columns, rows=rows,
    )  # fmt: skip


def needle_chart(name: str, by_name: dict[str, list[Record]], k: int) -> Chart:
    """Share of needles that rank below r, for the reference and each precision."""
    everything = [case for cases in by_name.values() for case in cases]
    entries = max([case["visible"] for case in aggregate.measured(everything)], default=2 * k)
    first = next((cases for cases in by_name.values() if aggregate.measured(cases)), [])
    ranks = {"reference's own": aggregate.needle_ranks(first, "needle_rank_reference")}
    ranks |= {label: aggregate.needle_ranks(cases) for label, cases in by_name.items()}
    x, y = charts.x_axis(1.0, max(float(entries), 2.0 * k), log=True), charts.y_axis()
    grid = [2 ** (i / 2) for i in range(2 * math.ceil(math.log2(x.high)) + 1)]
    lines, rows = [], []
    for place, (label, found) in enumerate(ranks.items(), -1):
        if found:
            places = [(x(r), y(s)) for r, s in zip(grid, aggregate.share_below(found, grid), strict=True)]
            lines.append(charts.line(max(place, 0) if place >= 0 else charts.COLOURS * 3 - 1, label, places))
            rows.append((label, [number(s) for s in aggregate.share_below(found, [u * k for u in NEEDLE_LIMITS])]))
    return Chart(
        name=name, title="Needle ranks",
        words=f"Share of needles whose rank is below r; those left of k = {k} are selected.",
        x_label="rank r", y_label="share of needles", lines=lines,
        x_ticks=charts.ticks(x, [4.0**i for i in range(14)], charts.tokens), y_ticks=charts.shares(),
        marks=[charts.mark(x, float(k), "k")], columns=[f"below {u:g} k" for u in NEEDLE_LIMITS], rows=rows,
    )  # fmt: skip


def margin_chart(name: str, by_name: dict[str, list[Record]]) -> Chart:
    """Histogram of margins at the k-th place as outlines, in shares of all rows that have one."""
    found = {label: aggregate.pooled_margins(cases) for label, cases in by_name.items()}
    found = {label: (edges, counts, free) for label, (edges, counts, free) in found.items() if sum(counts)}
    edges = next((edges for edges, _, _ in found.values()), [0.0, 1.0])
    low, high = edges[1] / 3, edges[-1] * 3  # the first bin begins at 0 and the last one is open
    bounds = [low, *edges[1:], high]
    tallest = max([max(counts) / sum(counts) for _, counts, _ in found.values()], default=1.0)
    top = next(t for t in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if tallest <= t)
    x, y = charts.x_axis(low, high, log=True), charts.y_axis(top)
    lines, rows = [], []
    for place, label in enumerate(by_name):
        if label in found:
            _, counts, free = found[label]
            heights = [y(count / sum(counts)) for count in counts]
            lines.append(charts.outline(place, label, [x(bound) for bound in bounds], heights))
            rows.append((label, [str(count) for count in counts] + [str(free)]))
    names = [f"{a:g} to {b:g}" for a, b in pairwise(edges)] + [f"from {edges[-1]:g}", "no noise"]
    return Chart(
        name=name, title="Margins at the k-th place",
        words="Rows by (k-th score - next lower score) / the recipe's score noise; below 1 noise picks the last place.",
        x_label="margin", y_label="share of rows", lines=lines, x_ticks=charts.ticks(x, edges[1:], "{:g}".format),
        y_ticks=charts.shares(top), marks=[charts.mark(x, 1.0, "noise")], columns=names, rows=rows,
    )  # fmt: skip
