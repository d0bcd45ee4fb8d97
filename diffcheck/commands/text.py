"""Commands that make inputs: the forward pass over a text, a server's dump, and needles hidden in a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import (
    Checkpoint,
    Device,
    IndexerLayers,
    Precisions,
    RecipeFiles,
    Thetas,
    layer_numbers,
    split,
    split_precisions,
)
from .output import check_writable, say, stdout, write_json


def capture(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Trace file to write (safetensors).")],
    text: Annotated[Path | None, typer.Option(help="Text file, through the checkpoint's tokenizer.json.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list of token ids, instead of --text.")] = None,
    layers: IndexerLayers = "all",
    inputs: Annotated[str, typer.Option(help="model (forward pass), or embedding, a cheap PROXY.")] = "model",
    stages: Annotated[str, typer.Option(help="Stages to record for the query rows: all, or names.")] = "",
    queries: Annotated[int, typer.Option(help="Query rows whose attention mass is recorded.")] = 256,
    run_dir: Annotated[
        Path | None, typer.Option(help="Keeps finished layers; default OUT.run, removed at the end.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Run a text through the whole checkpoint, layer by layer, and write what each indexer sees as a trace.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    from ..capturing import capture_trace, load_text_inputs
    from ..capturing.forward import check_stages
    from ..capturing.text import default_run_dir
    from ..run import device_of

    if queries < 1:
        raise InputError(f"--queries: {queries}, expected at least 1")
    chosen, where = check_stages(split(stages)), device_of(device)
    wanted = load_text_inputs(checkpoint, text=text, tokens=tokens, layers=layer_numbers(layers), kind=inputs)
    print(f"{wanted.source}; layers {', '.join(map(str, wanted.layers))} on {where}", file=sys.stderr)
    try:
        capture_trace(wanted, out, device=where, run_dir=run_dir, queries=queries, stages=chosen, say=say)
    except KeyboardInterrupt:
        if inputs == "model":
            say(f"finished layers are kept in {run_dir or default_run_dir(out)}: the same command goes on from there")
        raise
    print(f"wrote {out}: {wanted.source}")


def convert(
    dump: Annotated[Path, typer.Argument(help="SGLang dump directory, .pt or .safetensors file, or .json answer.")],
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Trace file to write (safetensors).")],
    request: Annotated[int, typer.Option(help="Which request of a dump, 0 is the first.")] = 0,
) -> None:
    """Turn what a server left (tensor dumps, plain tensors, returned top-k) into a trace; says what is missing."""
    from ..capturing.convert import convert_dump

    for line in convert_dump(dump, checkpoint, out, request):
        print(line)


def needle(
    checkpoint: Checkpoint,
    needle: Annotated[list[str] | None, typer.Option(help="Text to hide; repeatable, each one is a turn.")] = None,
    question: Annotated[list[str] | None, typer.Option(help="Question that must find it; one each, or one.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with needles, questions, lengths, depths.")] = None,
    haystack: Annotated[Path | None, typer.Option(help="Filler text, or .json ids; default: generated.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens, comma separated; default 2k,4.5k,10k,22k or the file's.")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Depths of the needle, 0 to 1; default 0.1,0.5,0.9 or the file's.")
    ] = None,
    layers: IndexerLayers = "all",
    precision: Precisions = "bf16,fp8,fp4",
    theta: Thetas = "checkpoint",
    recipe: RecipeFiles = None,
    run_dir: Annotated[Path | None, typer.Option(help="Keeps finished layers; an interrupted grid resumes.")] = None,
    device: Device = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write ranks and selections to this file.")] = None,
) -> None:
    """Hide needles in text, run the whole model, and say in how many layers each precision loses them."""
    from ..needle.command import NeedleOptions, run_needles
    from ..needle.report import document, render

    options = NeedleOptions(
        checkpoint=checkpoint, needles=needle or [], questions=question or [], config=config, haystack=haystack,
        lengths=None if lengths is None else split(lengths),
        depths=None if depths is None else split(depths), layers=layer_numbers(layers),
        precisions=split_precisions(precision),
        thetas=split(theta), recipe_files=recipe or [], run_dir=run_dir, device=device,
    )  # fmt: skip
    if json_file is not None:
        check_writable(json_file)
    cells = run_needles(options, say)
    console = stdout()
    console.print(f"checkpoint {checkpoint}", highlight=False, soft_wrap=True)
    render(console, cells)
    if json_file is not None:
        write_json(
            json_file,
            {
                "schema_version": 1,
                "command": sys.argv[1:],
                "checkpoint": str(checkpoint),
                "cells": document(cells),
            },
        )
        console.print(f"wrote {json_file}", highlight=False)
