"""Commands about reports: their schemas, and other forms of a report that was kept."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    command: Annotated[str, typer.Argument(help="run, diagnose, marginal, needle, inspect or bench.")] = "run",
) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command writes with --json."""
    from ..reporting.schema import load_schema

    print(json.dumps(load_schema(command), indent=2))
