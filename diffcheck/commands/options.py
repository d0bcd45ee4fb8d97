"""Options that several commands have, and what their texts mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError

Checkpoint = Annotated[Path, typer.Option(help="Checkpoint directory in the released DeepSeek-V4 layout.")]
Layers = Annotated[str, typer.Option(help="all, or layer numbers such as 2,4.")]
IndexerLayers = Annotated[str, typer.Option(help="all indexer layers, or numbers such as 2,4.")]
Precisions = Annotated[
    str, typer.Option(help="Precisions: names, presets, or formats such as qat+e4m3/128/ue8m0; comma separated.")
]
Thetas = Annotated[str, typer.Option(help="RoPE thetas: checkpoint, NUMBER, NUMBER:noyarn.")]
RecipeFiles = Annotated[list[Path] | None, typer.Option(help="TOML file with one more recipe; repeatable.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Measured = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write one self-contained page about the run.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write a summary for a pull request.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write the gates as JUnit XML, a test for each case.")]
Metrics = Annotated[
    Path | None, typer.Option("--metrics", help="Write Prometheus metrics for node_exporter's textfile collector.")
]


def split(text: str) -> list[str]:
    """Parts of a comma separated list, without blanks."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_precisions(text: str) -> list[str]:
    """The precisions of a list; a comma inside one (`k=…,q=…`, options of a format) does not end it."""
    from ..grammar import split_precisions as split_spelled

    return split_spelled(text)


def layer_numbers(text: str) -> list[int] | None:
    """Layer numbers of `--layers`, None for all; InputError for anything else."""
    if text == "all":
        return None
    parts = split(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"--layers: {text!r}, expected all or numbers such as 2,4")
    return [int(part) for part in parts]
