"""The table of a run, and what is printed around it.

The table leads with what is lost (needles, survival by rank), then the overlap.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..probes import describe
from .words import HEAD_BINS, TAIL_BIN, error, gate_words, number, step_lines, survival_below


def render(console: Console, document: dict[str, Any]) -> None:
    """Print the table, notes, summary and gates of a run's document."""
    length, k = document["inputs"]["length"], document["checkpoint"]["config"]["index_topk"]
    console.print(f"checkpoint {document['checkpoint']['path']}", highlight=False, soft_wrap=True)
    console.print(f"inputs     {document['inputs']['source']}, {length} tokens", highlight=False, soft_wrap=True)
    console.print(f"selection  top {k} of {length // 4} entries; starts above {4 * k} tokens", highlight=False)
    for note in document["notes"]:
        console.print(f"note       {note}", highlight=False, soft_wrap=True)
    console.print(_table(document["cases"], console.width))
    console.print(LEGEND, highlight=False, style="dim")
    console.print()
    for line in document["summary"]:
        console.print(line, highlight=False)
    for line in step_lines(document):
        console.print(line, highlight=False)
    for case in document["cases"]:
        if case["verdict"] == "failed":
            where = f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}"
            console.print(f"FAILED: {where}: {case['reason']}", highlight=False, markup=False, soft_wrap=True)
    for record in document["probes"]:
        console.print(f"probe: {describe(record)}", highlight=False)
    asked, computed = (document["stage_evaluations"][name] for name in ("asked", "computed"))
    interrupted = "interrupted: " if document["partial"] else ""
    console.print(
        f"{interrupted}{len(document['cases'])} cases in {document['seconds']:.1f} s; "
        f"{asked - computed} of {asked} stage evaluations were shared.",
        highlight=False,
    )
    for gate in document["gates"]:
        console.print(gate_words(gate), highlight=False, markup=False, soft_wrap=True)
        for failure in gate["failed"]:
            console.print(f"  {failure}", highlight=False, markup=False)


LEGEND = (
    "lost: needles that the reference selects and this case does not. rank: median needle rank, reference -> case.\n"
    "mass: share of the main attention's weight that falls on entries it drops (only after a forward pass).\n"
    "head, tail: share of the reference's entries of rank below 0.75 k, and from 0.9 k, that is still selected.\n"
    "J, J tied: Jaccard with the reference, plain and tie-tolerant; J ideal: with the unrounded formulas.\n"
    "score, format, kernel: relative score error in all, from the recipe's choices, and beyond them."
)


COLUMNS = (
    "layer", "precision", "theta", "lost", "mass", "rank", "head", "tail", "J", "J tied", "J ideal", "recall", "worst",
    "score", "format", "kernel", "B", "first stage", "verdict",
)  # fmt: skip
NARROW = {150: ("J ideal", "recall", "worst", "B"), 125: ("J", "format", "tail"), 95: ("rank", "score", "kernel")}
"""Columns that are left out on a terminal narrower than this."""


def _table(cases: list[dict[str, Any]], width: int) -> Table:
    left_out = {name for least, names in NARROW.items() if width < least for name in names}
    if all(case.get("attention_mass_lost") is None for case in cases):
        left_out.add("mass")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for name in COLUMNS:
        if name not in left_out:
            left = name in ("precision", "theta", "first stage", "verdict")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
    layer = None
    for case in cases:
        if layer is not None and case["layer"] != layer:
            table.add_row()
        layer = case["layer"]
        cells = zip(COLUMNS, _row(case), strict=True)
        table.add_row(*(cell for name, cell in cells if name not in left_out), style=_STYLES.get(case["verdict"]))
    return table


_STYLES = {
    "kernel": "bold red",
    "config": "yellow",
    "same": "green",
    "vacuous": "dim",
    "refused": "dim",
    "failed": "bold red",
}


def _row(case: dict[str, Any]) -> list[str]:
    head = [str(case["layer"]), case["precision"], case["theta_setting"]]
    if "jaccard_tied" not in case:
        return [*head, *[""] * 14, "-", case["verdict"]]
    needles = case["needles"]
    ranks = [case["needle_rank_reference_median"], case["needle_rank_median"]]
    return [
        *head,
        f"{case['needles_lost']}/{case['needles_selected_reference']}" if needles else "-",
        "-" if case["attention_mass_lost"] is None else f"{case['attention_mass_lost']:.2%}",
        "->".join("-" if r is None else f"{r:g}" for r in ranks) if needles else "-",
        number(survival_below(case, HEAD_BINS)),
        number(case["survival"][TAIL_BIN]["p"]),
        *(number(case[name]) for name in ("jaccard", "jaccard_tied", "jaccard_ideal", "recall_mean", "recall_worst")),
        *(error(case[name]) for name in ("score_rel_error", "format_error", "kernel_error")),
        f"{case['bytes_per_entry']:g}",
        case["first_stage"] or "-",
        case["verdict"],
    ]
