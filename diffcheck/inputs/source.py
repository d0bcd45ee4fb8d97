"""Recorded inputs: x, qr and needles of a trace file, checked against the checkpoint before any work is done.

Only the tensors that are inputs are read (a trace may hold gigabytes of scores). Everything that does not fit
is an InputError of one line that says what was found and what was expected.

A needle is a record of some tokens that a query must find again: top-level `needle_queries` and
`needle_positions` (token positions of the query and of the record's first token), and `needle_lengths` in
tokens where known.

`choose_queries` decides which rows of a sequence are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ranks import needle_entries
from ..refimpl.compressor import WINDOW
from ..refimpl.config import IndexerConfig
from ..refimpl.errors import InputError
from ..refimpl.scoring import visible_entries
from ..refimpl.trace import TraceFile, open_trace

DEFAULT_NEEDLE_TOKENS = 5
"""Length of a record whose trace does not say: the shortest one, a marker, a key of two tokens, a value of
two.

A longer record is then judged by its first five tokens, that is by two entries, or three when it starts
unaligned.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """Token positions: `query` must find the record of the tokens first_token .. last_token."""

    query: int
    first_token: int
    last_token: int

    @property
    def entries(self) -> range:
        """Entries whose own window holds one of the record's tokens."""
        return needle_entries(self.first_token, self.last_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """One layer's inputs: x bf16 [T, hidden], qr bf16 [T, q_lora]; token i of them is at position start + i.

    needles have absolute positions. source says where the inputs come from, notes what was done to them. mass, where a
    forward pass recorded it, is the main attention's weight of each entry, fp32 [rows, E], for the positions
    mass_queries, int64 [rows].
    """

    x: Tensor = field(repr=False, compare=False)
    qr: Tensor = field(repr=False, compare=False)
    start: int = 0
    needles: tuple[Needle, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()
    mass: Tensor | None = field(default=None, repr=False, compare=False)
    mass_queries: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.x.shape[0]


def load_inputs(
    path: str | Path,
    config: IndexerConfig,
    layers: Sequence[int] | None = None,
    *,
    strict: bool = True,
    needle_tokens: int = DEFAULT_NEEDLE_TOKENS,
    request: int | None = None,
    several: bool = False,
) -> dict[int, LayerInputs]:
    """The inputs of `layers` (all layers of the file by default) from a trace, by layer number.

    strict: every one of `layers` must be there; otherwise those of them that the file holds are enough, at
    least one. needle_tokens: length of a record when the file has no `needle_lengths`. x and qr may be fp32;
    they are rounded to bf16 once, which is noted. request: which one, 0 is the first, of a file that holds several;
    its positions count from its own start. several: take a file of several requests as it is, one after another.

    Raises InputError when the file is absent, broken or of another schema; when it lacks a layer, or x or qr
    of it; when a layer has no indexer in `config`; when widths, row numbers or dtypes do not fit; when x or
    qr holds NaN or inf; when needle tensors are incomplete, of different length or out of range; when it
    holds several requests and neither `request` nor `several` is given.
    """
    path = Path(path)
    with open_trace(path) as opened:
        return _load(path, opened, config, layers, strict, needle_tokens, request, several)


def _load(
    path: Path,
    opened: TraceFile,
    config: IndexerConfig,
    layers: Sequence[int] | None,
    strict: bool,
    needle_tokens: int,
    request: int | None,
    several: bool,
) -> dict[int, LayerInputs]:
    file, start, names, present = opened.file, opened.start, set(opened.file.keys()), set(opened.layers)
    wanted = sorted(present if layers is None else set(layers))
    if layers is not None and not strict:
        _check_indexer(path, config, sorted(present))
        wanted = [layer for layer in wanted if layer in present]
    if not wanted:
        asked = "" if layers is None else f" of {sorted(layers)}"
        raise InputError(
            f"{path}: holds no layer{asked}, expected layers.N.x and layers.N.qr; it has {sorted(present)}"
        )
    _check_indexer(path, config, wanted)
    # shapes come from the header, so everything that can be wrong with them is found before a tensor is read
    rows = {layer: _check_header(path, file, names, present, config, layer) for layer in wanted}
    if len(set(rows.values())) > 1:
        raise InputError(f"{path}: layers have {rows} tokens, expected the same number in each")
    tokens = rows[wanted[0]]
    mine = range(tokens) if several else _request(path, file, names, start, tokens, request)
    needles = _needles(path, file, names, start, tokens, needle_tokens)
    if len(mine) < tokens:
        needles = tuple(
            Needle(
                query=n.query - mine.start, first_token=n.first_token - mine.start, last_token=n.last_token - mine.start
            )
            for n in needles
            if mine.start <= n.first_token and n.query < mine.stop
        )
    loaded = {}
    for layer in wanted:
        notes: list[str] = []
        x, qr = (_read(path, file, f"layers.{layer}.{name}", notes)[mine.start : mine.stop] for name in ("x", "qr"))
        mass = mass_queries = None
        if len(mine) == tokens:
            mass, mass_queries = _mass(path, file, names, layer, start, tokens)
        loaded[layer] = LayerInputs(
            x=x,
            qr=qr,
            start=start,
            needles=needles,
            source=opened.metadata.get("source", ""),
            notes=tuple(notes),
            mass=mass,
            mass_queries=mass_queries,
        )
    return loaded


def _check_indexer(path: Path, config: IndexerConfig, layers: Iterable[int]) -> None:
    foreign = [layer for layer in layers if layer not in config.indexer_layers]
    if foreign:
        have = ", ".join(map(str, config.indexer_layers))
        raise InputError(f"{path}: layer {foreign[0]} has no indexer in this checkpoint, expected layers among {have}")


def _check_header(path: Path, file: Any, names: set[str], present: set[int], config: IndexerConfig, layer: int) -> int:
    """Number of rows of a layer whose names and shapes are right."""
    rows = []
    for name, width in (("x", config.hidden_size), ("qr", config.q_lora_rank)):
        key = f"layers.{layer}.{name}"
        if key not in names:
            raise InputError(f"{path}: no tensor {key}, expected it; the file has layers {sorted(present)}")
        shape = file.get_slice(key).get_shape()
        if len(shape) != 2 or shape[1] != width or shape[0] < WINDOW:
            raise InputError(f"{path}: {key} has shape {shape}, expected [T, {width}] as the checkpoint's config says")
        rows.append(int(shape[0]))
    if rows[0] != rows[1]:
        raise InputError(f"{path}: layer {layer} has {rows[0]} rows of x and {rows[1]} of qr, expected the same number")
    return rows[0]


def _request(path: Path, file: Any, names: set[str], start: int, tokens: int, request: int | None) -> range:
    """Rows of the request asked for; all of them where the file has one."""
    bounds = _integers(path, file, "requests") if "requests" in names else [0, tokens]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(set(bounds)):
        raise InputError(f"{path}: requests is {bounds[:8]}, expected rising token counts from 0 to {tokens}")
    count = len(bounds) - 1
    if request is None and count > 1:
        raise InputError(
            f"{path}: holds {count} requests over {tokens} tokens, expected one request "
            f"(choose one with --request 0 to {count - 1}: scores do not cross requests)"
        )
    if request is not None and not 0 <= request < count:
        raise InputError(f"{path}: has no request {request}, expected 0 to {count - 1}")
    if count > 1 and start:
        raise InputError(f"{path}: holds several requests and starts at token {start}, expected 0")
    first = request or 0
    if bounds[first + 1] - bounds[first] < WINDOW:
        raise InputError(f"{path}: request {first} has {bounds[first + 1] - bounds[first]} tokens, expected {WINDOW}")
    return range(bounds[first], bounds[first + 1])


def _read(path: Path, file: Any, key: str, notes: list[str]) -> Tensor:
    tensor: Tensor = file.get_tensor(key)
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise InputError(f"{path}: {key} has dtype {tensor.dtype}, expected torch.bfloat16 or torch.float32")
    rounded = tensor.bfloat16()
    if tensor.dtype == torch.float32:
        notes.append(f"{key} was fp32 and is rounded to bf16")
    # after the rounding, which turns the largest fp32 values into inf
    bad = ~rounded.isfinite().all(dim=1)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise InputError(f"{path}: {key} holds NaN or inf, first in row {row}, expected finite values (bf16 range)")
    return rounded


def _mass(
    path: Path, file: Any, names: set[str], layer: int, start: int, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Attention mass of a layer and the positions of its rows, if the trace has them."""
    key, rows_key = (f"layers.{layer}.{name}" for name in ("attention_mass", "queries"))
    if key not in names:
        return None, None
    if rows_key not in names:
        raise InputError(f"{path}: no tensor {rows_key}, expected the positions of the rows of {key}")
    queries = torch.tensor(_integers(path, file, rows_key), dtype=torch.int64)
    shape = file.get_slice(key).get_shape()
    if shape != [len(queries), (start + length) // WINDOW]:
        raise InputError(f"{path}: {key} has shape {shape}, expected {[len(queries), (start + length) // WINDOW]}")
    if len(queries) and not start <= int(queries.min()) <= int(queries.max()) < start + length:
        raise InputError(f"{path}: {rows_key} holds a position outside {start}..{start + length - 1}")
    return file.get_tensor(key).float(), queries


def _needles(path: Path, file: Any, names: set[str], start: int, length: int, needle_tokens: int) -> tuple[Needle, ...]:
    """Needles of the file; every one inside the sequence, its record before its query."""
    given = {name: name in names for name in ("needle_queries", "needle_positions", "needle_lengths")}
    if not any(given.values()):
        return ()
    for name in ("needle_queries", "needle_positions"):
        if not given[name]:
            raise InputError(f"{path}: no tensor {name}, expected it beside the other needle tensors")
    columns = [_integers(path, file, name) for name in given if given[name]]
    if not given["needle_lengths"]:
        if needle_tokens < 1:
            raise InputError(f"needle_tokens is {needle_tokens}, expected at least 1")
        columns.append([needle_tokens] * len(columns[1]))
    queries, positions, lengths = columns
    if not len(queries) == len(positions) == len(lengths):
        raise InputError(
            f"{path}: {len(queries)} needle_queries, {len(positions)} needle_positions and {len(lengths)} "
            "needle_lengths, expected the same number"
        )
    needles = []
    for i, (query, first, tokens) in enumerate(zip(queries, positions, lengths, strict=True)):
        last = first + tokens - 1
        if not start <= query < start + length:
            raise InputError(f"{path}: needle_queries[{i}] is {query}, expected one of {start}..{start + length - 1}")
        if tokens < 1:
            raise InputError(f"{path}: needle_lengths[{i}] is {tokens}, expected at least 1 token")
        if first < 0 or last > query:
            raise InputError(
                f"{path}: needle {i} covers tokens {first}..{last}, expected them in 0..{query}, its query"
            )
        needles.append(Needle(query=query, first_token=first, last_token=last))
    return tuple(needles)


def _integers(path: Path, file: Any, name: str) -> list[int]:
    tensor: Tensor = file.get_tensor(name)
    if tensor.dim() != 1 or tensor.is_floating_point():
        raise InputError(f"{path}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, expected a list of integers")
    return [int(value) for value in tensor.tolist()]


def choose_queries(length: int, k: int, count: int, must_include: Iterable[int] = (), *, start: int = 0) -> Tensor:
    """Which rows to compare: int64 token positions, ascending, all different.

    All of must_include (needle queries), filled up to `count` with rows spread evenly over those that see
    more than k entries, the last row among them; over all rows when none does. Fewer when there are not that
    many, more only when must_include alone is larger. Positions run from start to start + length - 1.

    Raises InputError when length or count is not positive or a position of must_include is outside.
    """
    if length < 1 or count < 1:
        raise InputError(f"length is {length} and count {count}, expected at least 1 of each")
    positions = torch.arange(start, start + length)
    must = torch.tensor(sorted({int(query) for query in must_include}), dtype=torch.int64)
    outside = must[(must < start) | (must >= start + length)]
    if outside.numel():
        raise InputError(f"query {int(outside[0])} is outside, expected a position in {start}..{start + length - 1}")
    selective = positions[visible_entries(positions) > k]
    pool = selective if selective.numel() else positions
    free = pool[~torch.isin(pool, must)]
    wanted = min(max(count - must.numel(), 0), free.numel())
    # step >= 1, so no position comes twice; counted from the end, so that the longest context is always there
    steps = torch.arange(wanted) * free.numel() // max(wanted, 1)
    return torch.cat((must, free.flip(0)[steps])).sort().values
