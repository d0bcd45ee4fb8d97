"""Inputs out of a trace file: hidden states, and the needles that were marked in them.

Everything that can be wrong with a trace is found here, before any work: a width that the checkpoint does not have, a
layer that is not there, NaN or inf, needles outside the text. x and qr are bf16 in a model; fp32 in a file is rounded
once, and a note says so.

`needle_queries` holds token positions whose answer is a needle, `needle_positions` the token where each one's record
begins and `needle_lengths` its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..refimpl import IndexerConfig, InputError, Trace, load_traces

DEFAULT_NEEDLE_TOKENS = 5
"""Tokens of a record where the file does not say: a marker, a key and a value of two tokens each, which is the
shortest record that a key-value needle test plants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A record of tokens first_token .. last_token (both included) that the token at position `query` should find."""

    query: int
    first_token: int
    last_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """One layer's x [T, hidden] and qr [T, q_lora], bf16; `start` is the position of the first token."""

    x: Tensor = field(repr=False)
    qr: Tensor = field(repr=False)
    start: int = 0
    needles: tuple[Needle, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()


def load_inputs(
    path: Path, config: IndexerConfig, layers: list[int], *, strict: bool = True
) -> dict[int, LayerInputs]:
    """x, qr and needles of `layers` out of a trace file; with strict=False, of those of them that it holds.

    Raises InputError, one line, for anything that does not fit the checkpoint.
    """
    if strict:
        traces = load_traces(path, layers)
    else:
        traces = load_traces(path)
        foreign = sorted(set(traces) - set(config.indexer_layers))
        if foreign:
            raise InputError(
                f"{path}: holds layer {foreign[0]}, which has no indexer in this checkpoint; expected layers among "
                f"{list(config.indexer_layers)}"
            )
        traces = {layer: trace for layer, trace in traces.items() if layer in layers}
        if not traces:
            raise InputError(f"{path}: holds none of the layers {layers}")
    return {layer: _layer_inputs(path, config, trace) for layer, trace in sorted(traces.items())}


def _layer_inputs(path: Path, config: IndexerConfig, trace: Trace) -> LayerInputs:
    where = f"{path}: layers.{trace.layer}"
    notes: list[str] = []
    tensors = {}
    for name, width, what in (("x", config.hidden_size, "hidden size"), ("qr", config.q_lora_rank, "q_lora rank")):
        if name not in trace:
            raise InputError(f"{where} has no {name}, expected [T, {width}] bf16")
        tensor = trace[name]
        if tensor.dim() != 2 or tensor.shape[1] != width:
            raise InputError(f"{where}.{name} has shape {list(tensor.shape)}, expected [T, {width}]: the checkpoint's {what}")
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise InputError(f"{where}.{name} has dtype {tensor.dtype}, expected bfloat16 (or float32)")
        bad = (~tensor.isfinite()).any(1).nonzero()
        if len(bad):
            raise InputError(f"{where}.{name} has NaN or inf in row {int(bad[0])}, expected finite values")
        if tensor.dtype == torch.float32:
            notes.append(f"{name} is fp32 in the trace and was rounded to bf16")
        tensors[name] = tensor.bfloat16()
    if len(tensors["x"]) != len(tensors["qr"]) or len(tensors["x"]) < 4:
        raise InputError(
            f"{where} has {len(tensors['x'])} rows of x and {len(tensors['qr'])} of qr, expected the same number, at least 4"
        )
    needles = _needles(path, trace, trace.start + len(tensors["x"]))
    source = trace.metadata.get("source", "")
    return LayerInputs(**tensors, start=trace.start, needles=needles, source=source, notes=tuple(notes))


def _needles(path: Path, trace: Trace, length: int) -> tuple[Needle, ...]:
    names = ("needle_queries", "needle_positions", "needle_lengths")
    found = {name: trace.shared[name].long().flatten() for name in names if name in trace.shared}
    if not found:
        return ()
    if "needle_queries" not in found or "needle_positions" not in found:
        raise InputError(f"{path}: has {', '.join(found)}, expected both needle_queries and needle_positions")
    count = len(found["needle_queries"])
    lengths = found.get("needle_lengths", torch.full((count,), DEFAULT_NEEDLE_TOKENS))
    if len(found["needle_positions"]) != count or len(lengths) != count:
        raise InputError(
            f"{path}: {count} needle_queries, {len(found['needle_positions'])} needle_positions and {len(lengths)} "
            "needle_lengths, expected equally many"
        )
    needles = []
    for query, first, tokens in zip(found["needle_queries"].tolist(), found["needle_positions"].tolist(), lengths.tolist(), strict=True):
        if not (0 <= first and tokens >= 1 and first + tokens <= length and 0 <= query < length):
            raise InputError(
                f"{path}: needle at tokens {first}..{first + tokens - 1} with query {query}, expected positions in 0..{length - 1}"
            )
        needles.append(Needle(query=query, first_token=first, last_token=first + tokens - 1))
    return tuple(needles)


def choose_queries(length: int, k: int, count: int, must_include: list[int]) -> Tensor:
    """Query rows to compare: int64 positions, ascending and unique; all of `must_include`, the rest spread evenly.

    They are spread over the tokens that see more than k entries (over all tokens where none does). Exactly
    min(count, available) of them, or more if `must_include` alone is more.
    """
    first = 4 * (k + 1) - 1
    candidates = range(first if first < length else 0, length)
    chosen = set(must_include)
    wanted = max(0, count - len(chosen))
    free = [t for t in candidates if t not in chosen]
    picks = torch.linspace(0, len(free) - 1, min(wanted, len(free))).round().long().tolist() if free else []
    return torch.tensor(sorted(chosen | {free[i] for i in picks}), dtype=torch.int64)
