"""The recall grid: a table a precision, lengths down, depths across, and what it means in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .grid import Cell, summarise


def render(console: Console, cells: Sequence[Cell]) -> None:
    """Print the grids, the reference's own first, then the ranks layer by layer."""
    needles = len(cells[0].placed)
    if needles > 1:
        console.print(f"{needles} needles: {SEVERAL}", highlight=False)
        console.print()
    rows = [row for cell in cells for row in summarise(cell)]
    for precision, theta in dict.fromkeys((r["precision"], r["theta_setting"]) for r in rows):
        mine = [r for r in rows if (r["precision"], r["theta_setting"]) == (precision, theta)]
        depths, lengths = ({r[name] for r in mine} for name in ("depth", "length"))
        title = _title(precision, theta)
        table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        table.add_column("tokens", justify="right")
        for depth in sorted(depths):
            table.add_column(f"depth {depth:g}", justify="right")
        for length in sorted(lengths):
            cells_of = {r["depth"]: r for r in mine if r["length"] == length}
            table.add_row(str(length), *(_cell(cells_of[depth], precision, theta) for depth in sorted(depths)))
        console.print(table)
        console.print(words(title, mine), highlight=False)
        console.print()
    if ranks := layer_ranks(cells):
        console.print(_layers(ranks))
        console.print()
    console.print(LEGEND, highlight=False, style="dim")


SEVERAL = "the first lies at the depth named, the others evenly spaced behind it, wrapping around."
LEGEND = (
    "reference: (layer, needle) pairs in which some token of the question selects the needle.\n"
    "others: share of (layer, needle, question token) that find the needle under the reference and still do; and\n"
    "after the slash how many (layer, needle) pairs lose it for every token of the question.\n"
    "layers: rank (0 is best) of the needle's best entry for the question token that ranks it best, median over the\n"
    "texts; after the slash in how many texts no token of the question selects it. --json has every token's rank."
)


Ranks = dict[tuple[int, int], dict[tuple[str, str], tuple[float, int]]]


def layer_ranks(cells: Sequence[Cell]) -> Ranks:
    """By (layer, needle number from 1) and (precision, theta): median best rank, and the texts that do not find it.

    Rows that see no more than k entries do not count; a needle without any other row is left out.
    """
    best: dict[tuple[int, int], dict[tuple[str, str], list[tuple[int, bool]]]] = {}
    for cell in cells:
        for record in cell.records:
            case = (record["precision"], record["theta_setting"])
            for number, needle in enumerate(record["needles"], 1):
                tokens = zip(needle["rank"], needle["selected"], needle["counted"], strict=True)
                counted = [(rank, selected) for rank, selected, counts in tokens if counts and rank is not None]
                if counted:
                    found = (min(rank for rank, _ in counted), any(selected for _, selected in counted))
                    best.setdefault((record["layer"], number), {}).setdefault(case, []).append(found)
    return {
        place: {
            case: (statistics.median(rank for rank, _ in texts), sum(not selected for _, selected in texts))
            for case, texts in cases.items()
        }
        for place, cases in sorted(best.items())
    }


def _layers(ranks: Ranks) -> Table:
    table = Table(title="layers", title_justify="left", box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    cases = list(dict.fromkeys(case for found in ranks.values() for case in found))
    table.add_column("layer", justify="right")
    table.add_column("needle", justify="right")
    for precision, theta in cases:
        table.add_column(_title(precision, theta), justify="right")
    for (layer, needle), found in ranks.items():
        shown = (f"{found[case][0]:g} / {found[case][1]}" if case in found else "-" for case in cases)
        table.add_row(str(layer), str(needle), *shown)
    return table


def _title(precision: str, theta: str) -> str:
    return precision if theta == "checkpoint" else f"{precision}, theta {theta}"


def _cell(row: dict[str, Any], precision: str, theta: str) -> str:
    if row["vacuous"]:
        return "vacuous"
    if (precision, theta) == ("reference", "checkpoint"):
        return str(row["found"])
    return "-" if row["kept"] is None else f"{row['kept']:.3f} / {row['lost']}"


def words(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line for a precision over all of its cells."""
    real = [r for r in rows if not r["vacuous"]]
    if not real:
        return f"{title}: vacuous, every row sees so few entries that all are selected."
    found, lost = sum(r["found"] for r in real), sum(r["lost"] for r in real)
    tokens = sum(r["tokens"] for r in real)
    if not tokens:
        return f"{title}: the reference finds the needle in no layer, so there is nothing to lose."
    kept = sum(r["kept"] * r["tokens"] for r in real if r["kept"] is not None) / tokens
    if (rows[0]["precision"], rows[0]["theta_setting"]) == ("reference", "checkpoint"):
        return f"{title}: finds the needle in {found} (layer, needle) pairs of all texts."
    layers = sorted({layer for r in real for layer in r["lost_layers"]})
    where = f" (layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))})" if layers else ""
    chance = max(r["chance"] for r in real)
    return (
        f"{title}: keeps {kept:.1%} of the tokens that find it (blind choice: up to {chance:.1%}), "
        f"loses it in {lost} of {found} pairs{where}."
    )


def document(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """All cells as JSON values: positions, records and summary."""
    return [
        {
            "length": cell.length,
            "depth": cell.depth,
            "needles": [asdict(place) for place in cell.placed],
            "summary": summarise(cell),
            "records": cell.records,
        }
        for cell in cells
    ]
