"""Commands about reports: their schemas, and other forms of a report that was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .output import check_writable, stdout, write_json


def schema(
    command: Annotated[str, typer.Argument(help="run, compare, diagnose, marginal, needle, inspect or bench.")] = "run",
) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command writes with --json."""
    from ..reporting.schema import load_schema

    print(json.dumps(load_schema(command), indent=2))


def compare(
    before: Annotated[Path, typer.Argument(help="Report of `diffcheck run --json`: the baseline.")],
    after: Annotated[Path, typer.Argument(help="Report to compare with it.")],
    tolerance: Annotated[
        list[str] | None, typer.Option(help="FIELD=NUMBER: by how much it may become worse; repeatable.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Tolerances from this file; default: diffcheck.toml or pyproject.toml, upwards.")
    ] = None,
    gate_what_if: Annotated[bool, typer.Option(help="What-if thetas can be regressions too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the comparison to this file.")] = None,
) -> None:
    """Say what moved between two reports, case by case; exit code 1 when something became worse than tolerated."""
    from ..regression import compare_reports, read_report, tolerances
    from ..reporting.moved import render_comparison
    from ..settings import find_settings

    settings = find_settings(config)
    allowed = tolerances(file=settings.tolerance, command_line=tolerance or [])
    if json_file is not None:
        check_writable(json_file)
    found = compare_reports(
        read_report(before), read_report(after), tolerance=allowed, what_if=gate_what_if or settings.gate_what_if
    )
    console = stdout()
    render_comparison(console, found)
    if json_file is not None:
        write_json(json_file, found)
        console.print(f"wrote {json_file}", highlight=False)
    if found["regressions"]:
        raise typer.Exit(1)
