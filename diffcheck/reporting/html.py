"""One self-contained page about a run: style, scripts, charts and numbers inside, nothing fetched from anywhere.

At the top the verdict in a sentence, then layer x precision as a heat map, and for each theta and length the curves and
the stage ladder over all layers. Up to ALL_CASES cases stand in the table one by one, more only by precision; the
numbers of every single case are in the page, compressed, and are unfolded for the one that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..probes import describe
from . import aggregate, charts
from .charts import Chart
from .details import details, packed
from .sections import HEAT_EDGES, LADDER_EDGES, sections
from .words import (
    HEAD_BINS,
    TAIL_BIN,
    Record,
    differences,
    error,
    is_measured,
    number,
    regression_words,
    step_lines,
    survival_below,
)

ALL_CASES = 400
STATUS = {"fault": "Fault", "failed": "Failed", "differs": "Differs", "same": "Same", "untested": "Not tested"}
WRONG = ("kernel", "config", "failed")
CASE_COLUMNS = (
    "layer", "precision", "theta", "tokens", "verdict", "first stage", "lost", "mass", "rank", "head", "tail", "J",
    "J tied", "J ideal", "recall", "worst", "score", "format", "kernel", "B",
)  # fmt: skip
GROUP_COLUMNS = (
    "precision", "theta", "tokens", "layers", "verdict", "first stage", "lost", "mass", "head", "tail", "J tied",
    "J tied, mean", "J kernel", "score", "format", "kernel",
)  # fmt: skip


def page(document: Record) -> str:
    """The page of a run's document (or of a merged one)."""
    cases, k = document["cases"], document["checkpoint"]["config"]["index_topk"]
    environment = Environment(
        loader=PackageLoader("diffcheck.reporting", "page"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    single = len(cases) <= ALL_CASES
    template = environment.get_template("page.html.j2")
    return template.render(
        document=document,
        k=k,
        status=STATUS[document["headline"]["status"]],
        lengths=sorted({case["length"] for case in cases}),
        length_chart=_length_chart(cases, k),
        sections=sections(cases, k),
        heat_edges=HEAT_EDGES,
        ladder_edges=LADDER_EDGES,
        single=single,
        columns=CASE_COLUMNS if single else GROUP_COLUMNS,
        rows=_rows(cases, single),
        recipes=_recipes(document),
        steps=step_lines(document),
        regressions=[regression_words(found) for found in document.get("baseline", {}).get("regressions", ())],
        moved=_moved(document),
        probes=[describe(probe) for probe in document["probes"]],
        details=packed(details(cases)),
        chart=charts,
    )


def _rows(cases: Sequence[Record], single: bool) -> list[tuple[str, list[str]]]:
    """(a class for rows that are wrong, cells) of each case, or of each precision; a what-if is never wrong."""
    what_if = {case["theta_setting"] for case in cases if case["what_if"]}
    if single:
        named = [(case["theta_setting"], case["verdict"], _case_row(case)) for case in cases]
    else:
        named = [(group.theta, group.verdict, _group_row(group)) for group in aggregate.groups(cases)]
    return [(verdict if verdict in WRONG and theta not in what_if else "", row) for theta, verdict, row in named]


def _case_row(case: Record) -> list[str]:
    head = [str(case["layer"]), case["precision"], case["theta_setting"], str(case["length"]), case["verdict"]]
    if not is_measured(case):
        return head + [""] * (len(CASE_COLUMNS) - len(head))
    ranks = [case["needle_rank_reference_median"], case["needle_rank_median"]]
    return [
        *head,
        case["first_stage"] or "-",
        f"{case['needles_lost']} of {case['needles_selected_reference']}" if case["needles"] else "-",
        number(case["attention_mass_lost"]),
        " to ".join("-" if rank is None else f"{rank:g}" for rank in ranks) if case["needles"] else "-",
        number(survival_below(case, HEAD_BINS)),
        number(case["survival"][TAIL_BIN]["p"]),
        *(number(case[name]) for name in ("jaccard", "jaccard_tied", "jaccard_ideal", "recall_mean", "recall_worst")),
        *(error(case[name]) for name in ("score_rel_error", "format_error", "kernel_error")),
        f"{case['bytes_per_entry']:g}",
    ]


def _group_row(group: aggregate.Group) -> list[str]:
    head = [group.precision, group.theta, str(group.length), str(group.layers), group.verdict]
    if group.jaccard_tied is None:
        return head + [""] * (len(GROUP_COLUMNS) - len(head))
    return [
        *head,
        group.first_stage or "-",
        f"{group.needles_lost} of {group.needles_selected_reference}",
        number(group.attention_mass_lost),
        *(number(v) for v in (group.head, group.tail, group.jaccard_tied, group.jaccard_tied_mean)),
        number(group.jaccard_kernel),
        *(error(v) for v in (group.score_rel_error, group.format_error, group.kernel_error)),
    ]


def _moved(document: Record) -> list[list[str]]:
    """Every number that moved against the baseline: case, field, before, after."""
    return [
        [f"layer {c['layer']} {c['precision']} theta {c['theta_setting']}", name, *(f"{v:.4g}" if v is not None else "-"
         for v in (change["before"], change["after"]))]
        for c in document.get("baseline", {}).get("cases", ()) for name, change in c["fields"].items()
    ]  # fmt: skip


def _recipes(document: Record) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(precision @ theta, its differences from the reference) of each recipe; a what-if theta only for the first."""
    first = next(iter(document["recipes"]), "").rpartition(" @ ")[0]
    return [
        (name, differences(recipe["replaced"], document["reference"]))
        for name, recipe in document["recipes"].items()
        if name.endswith("@ checkpoint") or name.startswith(f"{first} @ ")
    ]


def _length_chart(cases: Sequence[Record], k: int) -> Chart | None:
    """Mean overlap of each whole text against its length, where the cases have several lengths."""
    lengths = sorted({case["length"] for case in cases})
    if len(lengths) < 2:
        return None
    theta = cases[0]["theta_setting"]
    x, y = charts.x_axis(2.0 * k, float(max(lengths[-1], 8 * k)), log=True), charts.y_axis()
    lines: list[charts.Line] = []
    rows: list[tuple[str, list[str]]] = []
    for place, name in enumerate(dict.fromkeys(case["precision"] for case in cases)):
        found = aggregate.by_length(aggregate.select(cases, precision=name, theta_setting=theta))
        if found:
            lines.append(charts.line(place, name, [(x(length), y(mean)) for length, mean in found]))
            means: dict[int, Any] = dict(found)
            rows.append((name, [number(means.get(length)) for length in lengths]))
    return Chart(
        name="lengths", title=f"Overlap of whole texts by their length, theta {theta}",
        words="Mean tie-tolerant Jaccard over layers; a text of up to 4 k tokens is all selected and tests nothing.",
        x_label="tokens", y_label="Jaccard", lines=lines,
        x_ticks=charts.ticks(x, [4.0 * k * 2**i for i in range(-1, 24)], charts.tokens), y_ticks=charts.shares(),
        shades=[charts.shade(x, 2.0 * k, 4.0 * k, "all selected")],
        columns=[str(length) for length in lengths], rows=rows,
    )  # fmt: skip
