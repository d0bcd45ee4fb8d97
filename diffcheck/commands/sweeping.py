"""The command that looks for a format: a sweep over recipes, layers and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Checkpoint, Device, Layers, Measured, layer_numbers
from .output import check_writable, say, stdout, write_json


def sweep(
    checkpoint: Checkpoint,
    trace: Annotated[
        Path | None, typer.Option(help="Trace file, each request a text; default: the checkpoint's own.")
    ] = None,
    request: Annotated[int | None, typer.Option(help="Only this request of a trace that holds several.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of made-up texts instead of a trace.")] = None,
    texts: Annotated[int | None, typer.Option(help="How many made-up texts.")] = None,
    layers: Layers = "all",
    space: Annotated[
        str, typer.Option(help="default (40 recipes), or a TOML file of formats and recipes.")
    ] = "default",
    objective: Annotated[str, typer.Option(help="What is gained for the bytes: recall, needle or answers.")] = "recall",
    floor: Annotated[float, typer.Option(help="Least recall for the cheapest format of a layer.")] = 0.95,
    rows: Annotated[int, typer.Option(help="Query rows of a text at full fidelity.")] = 256,
    halvings: Annotated[int, typer.Option(help="Rungs with a quarter of the rows before that; 0: all in full.")] = 2,
    budget: Annotated[float | None, typer.Option(help="Minutes after which what there is must do.")] = None,
    executor: Annotated[
        str, typer.Option(help="local, or ray: a task a case, on the cluster of RAY_ADDRESS.")
    ] = "local",
    run_dir: Annotated[Path | None, typer.Option(help="Keeps the record of each finished case.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the records of --run-dir.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print all recipes, not only the Pareto fronts.")] = False,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of made-up texts.")] = 0,
    json_file: Measured = None,
) -> None:
    """Find the best format for the bytes: recall and needles of a space of recipes, on all layers."""
    from ..sweeping.report import render
    from ..sweeping.result import document
    from ..sweeping.search import SweepOptions, execute, plan
    from ..sweeping.speed import logits_speeds

    options = SweepOptions(
        checkpoint=checkpoint, space=space, layers=layer_numbers(layers), trace=trace, request=request, length=length,
        texts=texts, rows=rows, halvings=halvings, objective=objective, floor=floor, budget=budget, executor=executor,
        run_dir=run_dir, resume=resume, device=device, seed=seed,
    )  # fmt: skip
    if json_file is not None:
        check_writable(json_file)
    todo = plan(options)
    measured = execute(todo, say)
    speeds = logits_speeds(todo) if todo.device == "cuda" else {}
    found = document(todo, measured, {}, speeds)
    console = stdout()
    render(console, found, every=every)
    if json_file is not None:
        write_json(json_file, found)
        console.print(f"wrote {json_file}", highlight=False)
