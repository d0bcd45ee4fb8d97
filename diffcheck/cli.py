"""The command line.

Exit codes: 0 passed, 1 a gate failed or a fault was found, 2 bad usage or input, 3 the environment lacks what was asked
for, 130 interrupted. Errors are one line on stderr; a traceback means a bug in diffcheck.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .errors import EnvironmentMissing, InputError
from .version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Checkpoint = Annotated[Path, typer.Option(help="Checkpoint directory in the released DeepSeek-V4 layout.")]


def main() -> None:
    """Entry point: runs the app and turns user errors into one line and an exit code."""
    try:
        raise SystemExit(app(standalone_mode=False))
    except InputError as error:
        _fail(str(error), 2)
    except EnvironmentMissing as error:
        _fail(str(error), 3)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except Exception as error:
        # typer may carry its own copy of click, so its usage errors are known by what they can do
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message(), error.exit_code)  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> None:
    print(f"diffcheck: {message}", file=sys.stderr)
    raise SystemExit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"diffcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run DeepSeek's reference sparse-attention indexer beside a deployment's numbers."""


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _print_presets(wanted: bool) -> None:
    from .presets import DESCRIPTIONS, PRECISIONS

    if wanted:
        for name, text in (PRECISIONS | DESCRIPTIONS).items():
            print(f"{name:14s}{text}")
        raise typer.Exit


@app.command()
def run(
    checkpoint: Checkpoint,
    layers: Annotated[str, typer.Option(help="all, or layer numbers such as 2,4.")] = "all",
    precision: Annotated[str, typer.Option(help="Precisions and presets, comma separated.")] = "reference,bf16,fp8,fp4",
    theta: Annotated[
        str, typer.Option(help="RoPE thetas: checkpoint, NUMBER (YaRN kept), NUMBER:noyarn.")
    ] = "checkpoint,10000,40000",
    length: Annotated[int | None, typer.Option(help="Tokens of made-up hidden states instead of a trace.")] = None,
    queries: Annotated[int | None, typer.Option(help="Query rows to compare; default 256 or all.")] = None,
    recipe: Annotated[list[Path] | None, typer.Option(help="TOML file with one more recipe; repeatable.")] = None,
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of made-up inputs.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
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
    from .gates import Gate
    from .report import document, render
    from .run import Options, execute, plan

    options = Options(
        checkpoint=checkpoint, layers=_layer_numbers(layers), precisions=_split(precision), thetas=_split(theta),
        recipe_files=recipe or [], backend=backend, length=length, queries=queries, trace=trace,
        request=request,
        needle_depth=needle_depth, needle_strength=needle_strength, device=device, seed=seed,
    )  # fmt: skip
    gates = [Gate.parse(condition) for condition in gate or []]
    console = _console()
    if text is not None or tokens is not None:
        from .capturing.run import inputs_from_text

        options = inputs_from_text(options, text=text, tokens=tokens, kind=inputs, run_dir=run_dir, dry_run=dry_run)
    elif run_dir is not None or inputs != "model":
        raise InputError("--run-dir and --inputs belong to --text or --tokens")
    todo = plan(options)
    if dry_run:
        from .estimate import render_plan

        render_plan(console, todo)
        return
    if json_file is not None:
        _check_writable(json_file)
    with _Steps(len(todo.layers) * len(todo.cases)) as steps:
        outcome = execute(todo, steps)
    results = [g.check(outcome.cases + outcome.probes, what_if=gate_what_if) for g in gates]
    render(console, todo, outcome, results)
    if json_file is not None:
        _write_json(json_file, document(todo, outcome, results))
        console.print(f"wrote {json_file}", highlight=False)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


@app.command()
def capture(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Trace file to write (safetensors).")],
    text: Annotated[Path | None, typer.Option(help="Text file, through the checkpoint's tokenizer.json.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON list of token ids, instead of --text.")] = None,
    layers: Annotated[str, typer.Option(help="all indexer layers, or numbers such as 2,4.")] = "all",
    inputs: Annotated[str, typer.Option(help="model (forward pass), or embedding, a cheap PROXY.")] = "model",
    stages: Annotated[str, typer.Option(help="Stages to record for the query rows: all, or names.")] = "",
    queries: Annotated[int, typer.Option(help="Query rows whose attention mass is recorded.")] = 256,
    run_dir: Annotated[
        Path | None, typer.Option(help="Keeps finished layers; default OUT.run, removed at the end.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Run a text through the whole checkpoint, layer by layer, and write what each indexer sees as a trace.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    from .capturing import capture_trace, load_text_inputs
    from .capturing.forward import check_stages
    from .run import device_of

    if queries < 1:
        raise InputError(f"--queries: {queries}, expected at least 1")
    chosen, where = check_stages(_split(stages)), device_of(device)
    wanted = load_text_inputs(checkpoint, text=text, tokens=tokens, layers=_layer_numbers(layers), kind=inputs)
    print(f"{wanted.source}; layers {', '.join(map(str, wanted.layers))} on {where}", file=sys.stderr)
    capture_trace(wanted, out, device=where, run_dir=run_dir, queries=queries, stages=chosen, say=_say)
    print(f"wrote {out}: {wanted.source}")


@app.command()
def convert(
    dump: Annotated[Path, typer.Argument(help="SGLang dump directory, .pt or .safetensors file, or .json answer.")],
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Trace file to write (safetensors).")],
    request: Annotated[int, typer.Option(help="Which request of a dump, 0 is the first.")] = 0,
) -> None:
    """Turn what a server left (tensor dumps, plain tensors, returned top-k) into a trace; says what is missing."""
    from .capturing.convert import convert_dump

    for line in convert_dump(dump, checkpoint, out, request):
        print(line)


@app.command()
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
    layers: Annotated[str, typer.Option(help="all indexer layers, or numbers such as 2,4.")] = "all",
    precision: Annotated[str, typer.Option(help="Precisions and presets, comma separated.")] = "bf16,fp8,fp4",
    theta: Annotated[str, typer.Option(help="RoPE thetas: checkpoint, NUMBER, NUMBER:noyarn.")] = "checkpoint",
    recipe: Annotated[list[Path] | None, typer.Option(help="TOML file with one more recipe; repeatable.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Keeps finished layers; an interrupted grid resumes.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write ranks and selections to this file.")] = None,
) -> None:
    """Hide needles in text, run the whole model, and say in how many layers each precision loses them."""
    from .needle.command import NeedleOptions, run_needles
    from .needle.report import document, render

    options = NeedleOptions(
        checkpoint=checkpoint, needles=needle or [], questions=question or [], config=config, haystack=haystack,
        lengths=None if lengths is None else _split(lengths),
        depths=None if depths is None else _split(depths), layers=_layer_numbers(layers), precisions=_split(precision),
        thetas=_split(theta), recipe_files=recipe or [], run_dir=run_dir, device=device,
    )  # fmt: skip
    if json_file is not None:
        _check_writable(json_file)
    cells = run_needles(options, _say)
    console = _console()
    render(console, cells)
    if json_file is not None:
        _write_json(json_file, {"schema_version": 1, "command": sys.argv[1:], "cells": document(cells)})
        console.print(f"wrote {json_file}", highlight=False)


@app.command()
def marginal(
    checkpoint: Checkpoint,
    trace: Annotated[Path | None, typer.Option(help="Trace file; default: the checkpoint's trace.safetensors.")] = None,
    layers: Annotated[str, typer.Option(help="all, or layer numbers such as 2,4.")] = "all",
    precision: Annotated[str, typer.Option(help="Precisions and presets, comma separated.")] = "bf16,fp8,fp4",
    theta: Annotated[str, typer.Option(help="RoPE thetas: checkpoint, NUMBER, NUMBER:noyarn.")] = "checkpoint",
    recipe: Annotated[list[Path] | None, typer.Option(help="TOML file with one more recipe; repeatable.")] = None,
    trials: Annotated[int, typer.Option(help="Needles planted at each strength.")] = 32,
    strengths: Annotated[str | None, typer.Option(help="Rising strengths, comma separated; 0 is marginal.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of made-up hidden states instead of a trace.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of made-up inputs and of the intervals.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Sweep the strength of planted needles: how strong must one be to be selected half of the time?"""
    from .needle.marginal_report import MarginalOptions, measure, render

    options = MarginalOptions(
        checkpoint=checkpoint, trace=trace, layers=_layer_numbers(layers), precisions=_split(precision),
        thetas=_split(theta), recipe_files=recipe or [], trials=trials,
        strengths=None if strengths is None else _split(strengths), length=length, seed=seed, device=device,
    )  # fmt: skip
    if json_file is not None:
        _check_writable(json_file)
    source, records = measure(options, _say)
    console = _console()
    render(console, source, records)
    if json_file is not None:
        _write_json(json_file, {"schema_version": 1, "command": sys.argv[1:], "inputs": source, "records": records})
        console.print(f"wrote {json_file}", highlight=False)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.command()
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
    from .diagnose import InputsFrom, diagnose_answer, render
    from .diagnose import diagnose as run_diagnosis

    if json_file is not None:
        _check_writable(json_file)
    if response is not None:
        inputs = InputsFrom(trace=trace, request=request, text=text, tokens=tokens, run_dir=run_dir, device=device)
        found = diagnose_answer(checkpoint, response, inputs, layers=layer or None, recipe=recipe, say=_say)
    elif text is not None or tokens is not None or request is not None or run_dir is not None:
        raise InputError(
            "--text, --tokens, --request and --run-dir go with --response: without it a trace is diagnosed"
        )
    elif trace is None:
        raise InputError("expected --trace FILE, or --response FILE with the inputs of its request")
    else:
        found = run_diagnosis(checkpoint, trace, layers=layer or None, recipe=recipe)
    render(found, _console())
    if json_file is not None:
        _write_json(json_file, found.to_json())
        _console().print(f"wrote {json_file}", highlight=False)
    if found.findings:
        raise typer.Exit(1)


@app.command()
def inspect(
    checkpoint: Checkpoint,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything found to this file.")] = None,
) -> None:
    """Print a checkpoint's layer map, config values with their sources, traps, and header coverage.

    Exits with 2 when a layer could not be run on, or would give garbage.
    """
    from .checkpoint.inspect import inspect_checkpoint, render

    if json_file is not None:
        _check_writable(json_file)
    inspection = inspect_checkpoint(checkpoint)
    render(inspection, _console())
    if json_file is not None:
        _write_json(json_file, inspection.to_json())
    if inspection.errors:
        raise typer.Exit(2)


@app.command()
def backends(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where they would run.")] = "auto",
) -> None:
    """List backends: available or why not, version, who runs which step, and the recipes they can run."""
    from .backends.listing import render_backends

    render_backends(_console(), device)


@app.command()
def bench(
    backend: Annotated[
        str | None, typer.Option(help="Kernels to time, comma separated; default all there are.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(help="Such as prefill:4096x65536, decode:, select:, select-decode:, queries:8192, keys:."),
    ] = None,
    formats: Annotated[str, typer.Option(help="Key formats: e4m3, bf16, e2m1.")] = "e4m3",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the records to this file.")] = None,
) -> None:
    """Time the kernels, accuracy first: no speed is printed for a wrong result. Needs a CUDA device."""
    from .bench import DEFAULT_SHAPES, render
    from .bench import bench as measure

    if json_file is not None:
        _check_writable(json_file)
    names = None if backend is None else _split(backend)
    console, records = _console(), []
    for record in measure(names, _split(shapes) if shapes else list(DEFAULT_SHAPES), _split(formats)):
        records.append(record)
        render(console, record)
    if json_file is not None:
        _write_json(json_file, {"schema_version": 1, "records": records})


@app.command()
def fixture(
    directory: Annotated[Path, typer.Argument(help="Directory to write; must not hold anything yet.")],
    like: Annotated[str, typer.Option(help="v4-flash, v4-pro or mini.")] = "mini",
    layers: Annotated[str, typer.Option(help="all, or layer numbers such as 2,4.")] = "all",
    whole: Annotated[
        int | None, typer.Option(help="Write the whole model of the first WHOLE layers, random codes, not indexers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    shards: Annotated[int, typer.Option(help="Number of safetensors files.")] = 2,
    overwrite: Annotated[bool, typer.Option(help="Replace what the directory holds.")] = False,
    hidden_size: Annotated[int | None, typer.Option(help="Another hidden size.")] = None,
    q_lora_rank: Annotated[int | None, typer.Option(help="Another rank of the low-rank query.")] = None,
    index_n_heads: Annotated[int | None, typer.Option(help="Another number of index heads.")] = None,
    index_head_dim: Annotated[int | None, typer.Option(help="Another index head dim, a power of two.")] = None,
    index_topk: Annotated[int | None, typer.Option(help="Another number of selected entries.")] = None,
) -> None:
    """Write a checkpoint with seeded indexer weights (or a whole random model) in the released layout."""
    from .fixture import write_checkpoint

    if whole is not None:
        from .fixture_model import write_model

        indexer_only = (hidden_size, q_lora_rank, index_n_heads, index_head_dim, index_topk)
        if layers != "all" or shards != 2 or overwrite or any(value is not None for value in indexer_only):
            raise InputError("--whole goes with --like and --seed only: it writes one shard a layer at the real shapes")
        print(f"{write_model(directory, like=like, layers=whole, seed=seed, say=_say)}: whole, {whole} layers")
        return
    written = write_checkpoint(
        directory, like=like, layers=_layer_numbers(layers), seed=seed, shards=shards, overwrite=overwrite,
        hidden_size=hidden_size, q_lora_rank=q_lora_rank, index_n_heads=index_n_heads,
        index_head_dim=index_head_dim, index_topk=index_topk,
    )  # fmt: skip
    print(written)


def _layer_numbers(text: str) -> list[int] | None:
    if text == "all":
        return None
    parts = _split(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"--layers: {text!r}, expected all or numbers such as 2,4")
    return [int(part) for part in parts]


def _console() -> Console:
    """Standard output; wide enough for the table where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)


class _Steps:
    """Progress on stderr: a bar on a terminal, else one plain line a step."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
        self._total, self._count = total, 0

    def __enter__(self) -> _Steps:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("cases", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def doing(self, line: str) -> None:
        """Something slow begins; only a terminal shows it."""
        if self._bar:
            self._bar.update(self._task, description=line)

    def done(self, line: str) -> None:
        """One more step is done; `line` says which."""
        self._count += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=line)
        else:
            print(f"[{self._count}/{self._total}] {line}", file=sys.stderr)


def _check_writable(path: Path) -> None:
    """Fail before any work if the report could not be written."""
    directory = path.parent
    if path.is_dir() or not directory.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise InputError(f"--json: cannot write {path}, expected a file in a directory that exists and is writable")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InputError(f"--json: cannot write {path} ({error.strerror})") from None


def _without_nan(value: object) -> object:
    """The value with null for every number that JSON has no spelling for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def _write_json(path: Path, document: object) -> None:
    """Write beside the target and rename, so that an interrupt leaves no half document."""
    text = json.dumps(_without_nan(document), indent=1, allow_nan=False)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
