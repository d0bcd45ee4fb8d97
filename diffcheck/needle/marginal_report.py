"""`diffcheck marginal`: options, layers one after another, and the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cases import build_cases
from ..checkpoint.layer import Checkpoint
from ..errors import InputError
from ..inputs.hidden import synthetic_hidden
from ..inputs.source import load_inputs
from ..run import SYNTHETIC_LENGTH_IN_TOPK, device_of
from .marginal import DEFAULT_STRENGTHS, evaluate_sweep, sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalOptions:
    """What the command line asks for; see `diffcheck marginal --help`."""

    checkpoint: Path
    trace: Path | None
    layers: list[int] | None
    precisions: list[str]
    thetas: list[str]
    recipe_files: list[Path]
    trials: int
    strengths: list[str] | None
    length: int | None
    seed: int
    device: str


def measure(options: MarginalOptions, say: Callable[[str], None]) -> tuple[str, list[dict[str, Any]]]:
    """(where the hidden states are from, a record for each layer and case); InputError says what is wrong."""
    if options.trials < 2:
        raise InputError(f"--trials: {options.trials}, expected at least 2 for an interval")
    if options.trace is not None and options.length is not None:
        raise InputError("--length and --trace exclude each other: a trace has its own length")
    strengths, device = parse_strengths(options.strengths), device_of(options.device)
    opened = Checkpoint(options.checkpoint)
    layers = opened.select(options.layers)
    cases = build_cases(opened.config, options.precisions, options.thetas, options.recipe_files)
    trace = options.trace
    if trace is None and options.length is None and (opened.directory / "trace.safetensors").is_file():
        trace = opened.directory / "trace.safetensors"
    config, records = opened.config, []
    if trace is None:
        length = options.length or SYNTHETIC_LENGTH_IN_TOPK * config.index_topk
        source = f"made-up hidden states, seed {options.seed}, {length} tokens"
        states = {n: synthetic_hidden(config, length=length, seed=options.seed + n) for n in layers}
    else:
        loaded = load_inputs(trace, config, list(layers), strict=options.layers is not None)
        states = {n: (inputs.x, inputs.qr) for n, inputs in loaded.items()}
        first = next(iter(loaded.values()))
        if first.start:
            raise InputError(f"{trace}: starts at token {first.start}, expected 0")
        source = f"trace {trace} ({first.source or 'no source given'}), {first.length} tokens"
    for layer, (x, qr) in states.items():
        say(f"layer {layer}: {len(strengths)} strengths, {options.trials} needles each")
        found = sweep(
            config, opened.load(layer), x, qr, cases, trials=options.trials, strengths=strengths, device=device
        )
        records += [{"layer": layer, **record} for record in evaluate_sweep(found, seed=options.seed)]
    return source, records


def parse_strengths(texts: Sequence[str] | None) -> tuple[float, ...]:
    """Rising finite numbers, at least two; InputError otherwise."""
    if texts is None:
        return DEFAULT_STRENGTHS
    try:
        values = tuple(float(text) for text in texts)
    except ValueError:
        values = ()
    if len(values) < 2 or list(values) != sorted(set(values)) or not all(map(math.isfinite, values)):
        raise InputError(f"--strengths: {','.join(texts)!r}, expected at least two rising numbers such as -0.1,0,0.1,1")
    return values


def render(console: Console, source: str, records: Sequence[dict[str, Any]]) -> None:
    """Print one row a case: strength at 50 %, shift, and P(selected) at each strength."""
    console.print(f"inputs {source}", highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer", justify="right")
    for name in ("precision", "theta", "at 50 %", "shift"):
        table.add_column(name, no_wrap=True)
    for strength in records[0]["strengths"]:
        table.add_column(f"{strength:g}", justify="right")
    for record in records:
        own = (record["precision"], record["theta_setting"]) == ("reference", "checkpoint")
        table.add_row(
            str(record["layer"]),
            record["precision"],
            record["theta_setting"],
            _value(record["strength_50"], record["strength_50_ci"], "{:.3f}", record["p_selected"]),
            "" if own else _value(record["shift"], record["shift_ci"], "{:+.3f}", None),
            *("-" if p is None else f"{p:.2f}" for p in record["p_selected"]),
        )
    console.print(table)
    console.print(LEGEND, highlight=False, style="dim")


LEGEND = (
    "at 50 %: strength at which a needle is selected half of the time (0: it ties with the k-th place, 1: with the\n"
    "best); shift: the same against the reference, with 95 % intervals over the needles. Columns: P(selected)."
)


def _value(
    value: float | None, interval: Sequence[float] | None, form: str, p_selected: Sequence[float | None] | None
) -> str:
    if value is None:
        known = [p for p in p_selected or () if p is not None]
        return "" if not known else "above all" if known[-1] < 0.5 else "below all"
    if interval is None:
        return form.format(value)
    low, high = (form.format(end) for end in interval)
    return f"{form.format(value)} [{low}, {high}]"
