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
    Html,
    Junit,
    Layers,
    Markdown,
    Measured,
    Metrics,
    Precisions,
    RecipeFiles,
    Thetas,
    layer_numbers,
    split,
    split_precisions,
)
from .output import check_writable, say, stdout, without_nan, write_json
from .reports import ReportFiles


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
        Path | None, typer.Option(help="Keeps each finished case (with a text, layer too) as soon as it is done.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --run-dir holds of this run.")] = False,
    needle_depth: Annotated[float | None, typer.Option(help="Depth of a planted needle, 0 to 1.")] = None,
    needle_strength: Annotated[float | None, typer.Option(help="0 marginal, 1 strong, negative lost.")] = None,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of made-up inputs.")] = 0,
    json_file: Measured = None,
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    metrics: Metrics = None,
    gate: Annotated[
        list[str] | None, typer.Option(help="FIELD OP NUMBER, e.g. jaccard_kernel>=0.999, or recommended; repeatable.")
    ] = None,
    gate_what_if: Annotated[bool, typer.Option(help="Gates count what-if thetas too.")] = False,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier --json report: say what moved, exit code 1 if it became worse.")
    ] = None,
    tolerance: Annotated[
        list[str] | None, typer.Option(help="With --baseline: FIELD=NUMBER, by how much it may; repeatable.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Gates from this file; default: diffcheck.toml or pyproject.toml, upwards.")
    ] = None,
    explain_gates: Annotated[bool, typer.Option(help="Print each case's gates and their origin, then stop.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print cases, bytes to read and an estimate, then stop.")] = False,
    list_presets: Annotated[
        bool,
        typer.Option("--list-presets", callback=_print_presets, is_eager=True, help="List precisions and presets."),
    ] = False,
) -> None:
    """Compare the reference indexer with deployment recipes, layer by layer."""
    from ..gate_rules import GatePlan
    from ..regression import Report, check_comparable, compare_reports, read_report, tolerances
    from ..reporting.console import render
    from ..reporting.document import document
    from ..reporting.moved import render_comparison
    from ..reporting.words import headline
    from ..run import Options, plan
    from ..settings import find_settings
    from .running import measure

    options = Options(
        checkpoint=checkpoint, layers=layer_numbers(layers), precisions=split_precisions(precision),
        thetas=split(theta), recipe_files=recipe or [], backend=backend, length=length, queries=queries, trace=trace,
        request=request,
        needle_depth=needle_depth, needle_strength=needle_strength, device=device, seed=seed,
    )  # fmt: skip
    settings = find_settings(config)
    gates = GatePlan.of(gate or [], settings, what_if=gate_what_if)
    console = stdout()
    from_text = None
    if text is not None or tokens is not None:
        from ..capturing.run import read_text_run

        from_text = read_text_run(options, text=text, tokens=tokens, kind=inputs)
    elif inputs != "model":
        raise InputError("--inputs belongs to --text or --tokens")
    if resume and run_dir is None:
        raise InputError("--resume goes on with a run directory, expected --run-dir DIR")
    todo = plan(options if from_text is None else from_text.planned)
    if dry_run:
        from ..estimate import render_plan

        render_plan(console, todo)
        return
    if settings.path is not None:
        console.print(f"settings   {settings.path}", highlight=False, soft_wrap=True)
    if explain_gates:
        console.print("\n".join(gates.explain(todo.case_names())), highlight=False, markup=False, soft_wrap=True)
        return
    files = ReportFiles(html=html, markdown=markdown, junit=junit, metrics=metrics)
    files.check()
    if json_file is not None:
        check_writable(json_file)
    before = None
    if baseline is not None:
        before = read_report(baseline)
        check_comparable(before, todo.case_names(), "this run")
    elif tolerance:
        raise InputError("--tolerance is by how much a run may be worse than its baseline, expected --baseline FILE")
    allowed = tolerances(file=settings.tolerance, command_line=tolerance or [])
    todo, outcome = measure(todo, from_text, run_dir, resume=resume)
    results = gates.check(outcome.cases, outcome.probes)
    report = without_nan(document(todo, outcome, results))
    render(console, report)
    if before is not None and not outcome.partial:
        moved = compare_reports(
            before, Report(name="this run", document=report), tolerance=allowed, what_if=gates.what_if
        )
        render_comparison(console, moved)
        report["baseline"] = without_nan(moved)
        report["headline"] = headline(report)
    if json_file is not None:
        write_json(json_file, report)
        console.print(f"wrote {json_file}", highlight=False)
    for path in files.write([report]):
        console.print(f"wrote {path}", highlight=False)
    if outcome.partial:
        raise KeyboardInterrupt
    regressed = report.get("baseline", {}).get("regressions")
    if outcome.failed or regressed or not all(result.passed for result in results):
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
