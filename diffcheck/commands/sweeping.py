"""The command that looks for a format: a sweep over recipes, layers and texts."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import Checkpoint, Device, Layers, Measured, layer_numbers
from .output import check_writable, say, stdout, write_json, write_text


def sweep(
    checkpoint: Checkpoint,
    trace: Annotated[
        Path | None, typer.Option(help="Trace file, each request a text; default: the checkpoint's own.")
    ] = None,
    request: Annotated[int | None, typer.Option(help="Only this request of a trace that holds several.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of made-up texts instead of a trace.")] = None,
    texts: Annotated[int | None, typer.Option(help="How many made-up texts.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file: its hidden states by a forward pass.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list of token ids, instead of --text.")] = None,
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
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page about the sweep.")] = None,
) -> None:
    """Find the best format for the bytes: recall and needles of a space of recipes, on all layers."""
    from ..sweeping.answers import answer_text, measure_answers
    from ..sweeping.html import page
    from ..sweeping.report import render
    from ..sweeping.result import document
    from ..sweeping.search import SweepOptions, execute, plan
    from ..sweeping.speed import logits_speeds

    if json_file is not None:
        check_writable(json_file)
    if html is not None:
        check_writable(html, "--html")
    said, made_from = None, None
    if objective == "answers":
        if text is None and tokens is None:
            raise InputError("--objective answers runs the model on a text, expected --text FILE or --tokens FILE.json")
        said = answer_text(checkpoint, text=text, tokens=tokens)
    if text is not None or tokens is not None:
        if trace is not None or length is not None or texts is not None:
            raise InputError("--text and --tokens exclude --trace, --length and --texts: they are the text")
        trace, made_from = captured(
            checkpoint, layers=layer_numbers(layers), device=device, text=text, tokens=tokens, run_dir=run_dir
        )
    options = SweepOptions(
        checkpoint=checkpoint, space=space, layers=layer_numbers(layers), trace=trace, request=request, length=length,
        texts=texts, rows=rows, halvings=halvings, objective=objective, floor=floor, budget=budget, executor=executor,
        run_dir=run_dir, resume=resume, device=device, seed=seed, made_from=made_from,
    )  # fmt: skip
    todo = plan(options)
    try:
        measured = execute(todo, say)
        extra = {} if said is None else {"answers": measure_answers(todo, said, measured, say)}
    except KeyboardInterrupt:
        if run_dir is not None:
            say(f"finished cases are kept in {run_dir}: the same command with --resume goes on from there")
        raise
    speeds = logits_speeds(todo) if todo.device == "cuda" else {}
    found = document(todo, measured, extra, speeds)
    console = stdout()
    render(console, found, every=every)
    if json_file is not None:
        write_json(json_file, found)
        console.print(f"wrote {json_file}", highlight=False)
    if html is not None:
        write_text(html, page(found))
        console.print(f"wrote {html}", highlight=False)


def captured(
    checkpoint: Path, *, layers: list[int] | None, device: str, text: Path | None, tokens: Path | None,
    run_dir: Path | None,
) -> tuple[Path, str]:  # fmt: skip
    """The trace of a text by a forward pass (kept in run_dir, or until the process ends), and what it is made from."""
    from ..capturing.text import capture_trace, load_text_inputs
    from ..run import device_of

    where = device_of(device)
    inputs = load_text_inputs(checkpoint, text=text, tokens=tokens, layers=layers)
    if run_dir is None:
        directory = Path(tempfile.mkdtemp(prefix="diffcheck-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    else:
        directory = run_dir
    try:
        (directory / "layers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--run-dir: cannot use {directory} ({error.strerror})") from None
    trace = directory / "trace.safetensors"
    capture_trace(inputs, trace, device=where, run_dir=directory / "layers", say=say)
    return trace, f"{inputs.source} {hashlib.sha256(json.dumps(inputs.tokens).encode()).hexdigest()}"
