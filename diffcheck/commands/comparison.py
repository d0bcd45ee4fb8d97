"""Commands that compare: a run over recipes, marginal needles, and the diagnosis of a deployment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import (
    Checkpoint,
    Device,
    Layers,
    Measured,
    Precisions,
    RecipeFiles,
    Thetas,
    layer_numbers,
    split,
    split_precisions,
)
from .output import Steps, check_writable, say, stdout, write_json


def _print_presets(wanted: bool) -> None:
    from ..presets import DESCRIPTIONS, PRECISIONS

    if wanted:
        for name, text in (PRECISIONS | DESCRIPTIONS).items():
            print(f"{name:14s}{text}")
        raise typer.Exit


def run(
    checkpoint: Checkpoint,
    layers: Layers = "all",
    precision: Precisions = "reference,bf16,fp8,fp4",
    theta: Annotated[
        str, typer.Option(help="RoPE thetas: checkpoint, NUMBER (YaRN kept), NUMBER:noyarn.")
    ] = "checkpoint,10000,40000",
    length: Annotated[int | None, typer.Option(help="Tokens of made-up hidden states instead of a trace.")] = None,
    queries: Annotated[int | None, typer.Option(help="Query rows to compare; default 256 or all.")] = None,
    recipe: RecipeFiles = None,
    backend: Annotated[str, typer.Option(help="auto, a name of `diffcheck backends`, or path.py:object.")] = "auto",
    trace: Annotated[Path | None, typer.Option(help="Trace file; default: the checkpoint's trace.safetensors.")] = None,
    request: Annotated[int | None, typer.Option(help="Which request of a trace that holds several.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file: its hidden states by a forward pass of the checkpoint.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list of token ids, instead of --text.")] = None,
    inputs: Annotated[
        str, typer.Option(help="With a text: model (forward pass), or embedding, a cheap PROXY.")
    ] = "model",
    run_dir: Annotated[
        Path | None, typer.Option(help="With a text: keeps finished layers and the trace; an interrupted run resumes.")
    ] = None,
    needle_depth: Annotated[float | None, typer.Option(help="Depth of a planted needle, 0 to 1.")] = None,
    needle_strength: Annotated[float | None, typer.Option(help="0 marginal, 1 strong, negative lost.")] = None,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of made-up inputs.")] = 0,
    json_file: Measured = None,
    gate: Annotated[
        list[str] | None, typer.Option(help="FIELD OP NUMBER, e.g. jaccard_kernel>=0.999; repeatable.")
    ] = None,
    gate_what_if: Annotated[bool, typer.Option(help="Gates count what-if thetas too.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print cases, bytes to read and an estimate, then stop.")] = False,
    list_presets: Annotated[
        bool,
        typer.Option("--list-presets", callback=_print_presets, is_eager=True, help="List precisions and presets."),
    ] = False,
) -> None:
    """Compare the reference indexer with deployment recipes, layer by layer."""
    from ..gates import Gate
    from ..report import document, render
    from ..run import Options, execute, plan

    options = Options(
        checkpoint=checkpoint, layers=layer_numbers(layers), precisions=split_precisions(precision),
        thetas=split(theta), recipe_files=recipe or [], backend=backend, length=length, queries=queries, trace=trace,
        request=request,
        needle_depth=needle_depth, needle_strength=needle_strength, device=device, seed=seed,
    )  # fmt: skip
    gates = [Gate.parse(condition) for condition in gate or []]
    console = stdout()
    if text is not None or tokens is not None:
        from ..capturing.run import inputs_from_text

        options = inputs_from_text(options, text=text, tokens=tokens, kind=inputs, run_dir=run_dir, dry_run=dry_run)
    elif run_dir is not None or inputs != "model":
        raise InputError("--run-dir and --inputs belong to --text or --tokens")
    todo = plan(options)
    if dry_run:
        from ..estimate import render_plan

        render_plan(console, todo)
        return
    if json_file is not None:
        check_writable(json_file)
    with Steps(len(todo.layers) * len(todo.cases)) as steps:
        outcome = execute(todo, steps)
    results = [g.check(outcome.cases + outcome.probes, what_if=gate_what_if) for g in gates]
    render(console, todo, outcome, results)
    if json_file is not None:
        write_json(json_file, document(todo, outcome, results))
        console.print(f"wrote {json_file}", highlight=False)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def marginal(
    checkpoint: Checkpoint,
    trace: Annotated[Path | None, typer.Option(help="Trace file; default: the checkpoint's trace.safetensors.")] = None,
    layers: Layers = "all",
    precision: Precisions = "bf16,fp8,fp4",
    theta: Thetas = "checkpoint",
    recipe: RecipeFiles = None,
    trials: Annotated[int, typer.Option(help="Needles planted at each strength.")] = 32,
    strengths: Annotated[str | None, typer.Option(help="Rising strengths, comma separated; 0 is marginal.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of made-up hidden states instead of a trace.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of made-up inputs and of the intervals.")] = 0,
    device: Device = "auto",
    json_file: Measured = None,
) -> None:
    """Sweep the strength of planted needles: how strong must one be to be selected half of the time?"""
    from ..needle.marginal_report import MarginalOptions, measure, render

    options = MarginalOptions(
        checkpoint=checkpoint, trace=trace, layers=layer_numbers(layers), precisions=split_precisions(precision),
        thetas=split(theta), recipe_files=recipe or [], trials=trials,
        strengths=None if strengths is None else split(strengths), length=length, seed=seed, device=device,
    )  # fmt: skip
    if json_file is not None:
        check_writable(json_file)
    source, records = measure(options, say)
    console = stdout()
    render(console, source, records)
    if json_file is not None:
        write_json(json_file, {"schema_version": 1, "command": sys.argv[1:], "inputs": source, "records": records})
        console.print(f"wrote {json_file}", highlight=False)


def diagnose(
    checkpoint: Checkpoint,
    trace: Annotated[
        Path | None, typer.Option(help="Trace file of the deployment: inputs and whatever was observed.")
    ] = None,
    response: Annotated[
        Path | None,
        typer.Option(help="A server's JSON answer with its indexer top-k, beside --trace, --text or --tokens."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="With --response: the request as a text file.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="With --response: the request as a JSON list of ids.")] = None,
    request: Annotated[
        int | None, typer.Option(help="With --response: which request of a trace that holds several.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With a text: keeps finished layers and the trace; an interrupted run resumes.")
    ] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Layer of the trace, repeatable; default all.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="What the deployment says it runs: a precision, preset or TOML file.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, for the forward pass over a text.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write findings and notes to this file.")] = None,
) -> None:
    """Name the first wrong stage of a deployment's trace, or of a server's answer, and the cause.

    Exits with 0 when no fault was found, 1 when there are findings, 2 on bad input.
    """
    from ..diagnose import InputsFrom, diagnose_answer, render
    from ..diagnose import diagnose as run_diagnosis

    if json_file is not None:
        check_writable(json_file)
    if response is not None:
        inputs = InputsFrom(trace=trace, request=request, text=text, tokens=tokens, run_dir=run_dir, device=device)
        found = diagnose_answer(checkpoint, response, inputs, layers=layer or None, recipe=recipe, say=say)
    elif text is not None or tokens is not None or request is not None or run_dir is not None:
        raise InputError(
            "--text, --tokens, --request and --run-dir go with --response: without it a trace is diagnosed"
        )
    elif trace is None:
        raise InputError("expected --trace FILE, or --response FILE with the inputs of its request")
    else:
        found = run_diagnosis(checkpoint, trace, layers=layer or None, recipe=recipe)
    render(found, stdout())
    if json_file is not None:
        write_json(json_file, found.to_json())
        stdout().print(f"wrote {json_file}", highlight=False)
    if found.findings:
        raise typer.Exit(1)
