"""Commands about reports: their schemas, and other forms of a report that was kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from .options import Html, Junit, Markdown, Metrics
from .output import check_writable, stdout, write_json, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Where a run's report is written besides JSON; None for a form that nobody asked for."""

    html: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    metrics: Path | None = None

    def check(self) -> None:
        """Fail before any work if a file could not be written; InputError names the option."""
        found = [path for path in self._named().values() if path is not None]
        if len(set(found)) < len(found):
            raise InputError("--html, --markdown, --junit and --metrics: two name one file, expected a file each")
        for option, path in self._named().items():
            if path is not None:
                check_writable(path, option)

    def write(self, documents: Sequence[dict[str, Any]]) -> list[Path]:
        """Write all forms of one or several runs' documents; the files written."""
        from ..reporting.merge import merge

        whole = merge(documents)
        if self.html is not None:
            from ..reporting.html import page

            write_text(self.html, page(whole))
        if self.markdown is not None:
            from ..reporting.markdown import markdown

            write_text(self.markdown, markdown(whole))
        if self.junit is not None:
            from ..reporting.junit import junit

            write_text(self.junit, junit(documents))
        if self.metrics is not None:
            from ..reporting.prometheus import metrics

            write_text(self.metrics, metrics(whole))
        return [path for path in self._named().values() if path is not None]

    def _named(self) -> dict[str, Path | None]:
        return {"--html": self.html, "--markdown": self.markdown, "--junit": self.junit, "--metrics": self.metrics}


def render(
    reports: Annotated[list[Path], typer.Argument(help="Files that `diffcheck run --json` wrote.")],
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    metrics: Metrics = None,
) -> None:
    """Make a page, a summary, JUnit XML or metrics from kept reports; several become one, such as several lengths.

    Without any of them the table of `run` is printed again.
    """
    from ..reporting.console import render as print_table
    from ..reporting.merge import merge, read_document

    files = ReportFiles(html=html, markdown=markdown, junit=junit, metrics=metrics)
    files.check()
    documents = [read_document(path) for path in reports]
    written = files.write(documents)
    for path in written:
        print(f"wrote {path}")
    if not written:
        print_table(stdout(), merge(documents))


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
