"""What `diffcheck compare` prints: the cases that moved, what can be chance in that, and the regressions."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .words import Record, regression_words

SHOWN = 3
"""How many of the cases that only one report has are named."""


def render_comparison(console: Console, found: Record) -> None:
    """Print a comparison as `compare_reports` gives it."""
    for label in ("before", "after"):
        console.print(f"{label:6s} {found[label]}", highlight=False, markup=False, soft_wrap=True)
    for note in found["notes"]:
        console.print(f"note   {note}", highlight=False, markup=False, soft_wrap=True)
    for label in ("before", "after"):
        if names := found[f"only_{label}"]:
            more = f", … ({len(names)} cases)" if len(names) > SHOWN else ""
            line = f"note   only {label}: {', '.join(names[:SHOWN])}{more}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    moved = [case for case in found["cases"] if case["moved"]]
    if moved:
        console.print(_table(moved, found["level"]))
    still = len(found["cases"]) - len(moved)
    console.print(f"{len(moved)} cases moved, {still} did not.", highlight=False)
    for line in _significance(found):
        console.print(line, highlight=False, soft_wrap=True)
    for regression in found["regressions"]:
        console.print(f"REGRESSION: {regression_words(regression)}", highlight=False, markup=False, soft_wrap=True)
    if not found["regressions"]:
        allowed = ", ".join(f"{name}={value:g}" for name, value in found["tolerance"].items())
        console.print(f"no regression within {allowed}", highlight=False, soft_wrap=True)


def _table(moved: list[Record], level: float) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for name in ("layer", "precision", "theta", "J tied", "change [95 %]", "p", "lost", "mass", "score", "kernel"):
        left = name in ("precision", "theta")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for case in moved:
        fields, tests = case["fields"], {test["field"]: test for test in case["tests"]}
        test = tests.get("jaccard_tied") if "jaccard_tied" in fields else None
        table.add_row(
            str(case["layer"]),
            case["precision"],
            case["theta_setting"],
            _change(fields, "jaccard_tied", ".3f"),
            _interval(test),
            "" if test is None else f"{test['p_holm']:.2g}{'*' if test['p_holm'] < level else ''}",
            _change(fields, "needles_lost", "g"),
            _change(fields, "attention_mass_lost", ".2%"),
            _change(fields, "score_rel_error", ".2g"),
            _change(fields, "kernel_error", ".2g"),
            _verdicts(case["verdict"]),
        )
    return table


def _change(fields: Record, name: str, form: str) -> str:
    if name not in fields:
        return ""
    before, after = (_value(fields[name][side], form) for side in ("before", "after"))
    return f"{before} -> {after}"


def _value(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(test: Record | None) -> str:
    if test is None:
        return ""
    ci = "" if test["ci"] is None else f" [{test['ci'][0]:+.3f}, {test['ci'][1]:+.3f}]"
    return f"{test['difference']:+.3f}{ci}"


def _verdicts(verdict: Record) -> str:
    before, after = verdict["before"], verdict["after"]
    return before if before == after else f"{before} -> {after}"


def _significance(found: Record) -> list[str]:
    """How p was found, and where it could not have become small."""
    tests = [test for case in found["cases"] for test in case["tests"]]
    if not tests:
        return ["No rows are paired: the numbers are compared, nothing is tested."]
    rows, blocks = (sorted({test[name] for test in tests}) for name in ("rows", "blocks"))
    lines = [
        f"p: the mean difference over {_range(rows)} paired rows, signs flipped in {_range(blocks)} blocks of "
        f"neighbouring rows, two-sided, Holm over all {len(tests)} tests; * below {found['level']:g}."
    ]
    if max(test["smallest_p"] for test in tests) * len(tests) >= found["level"]:
        lines.append("So few blocks in so many tests cannot give a p below that, however large a difference is.")
    return lines


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
