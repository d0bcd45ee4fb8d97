"""A Trace: the stages of one layer's indexer that were computed or observed, with its inputs.

In memory a mapping from stage names to tensors; on disk one safetensors file that may hold several layers:

    layers.{N}.{name}   name in x, qr, a stage, queries, pages, block_table, slots, tokens, observed_topk
    anything else       shared by all layers (needle_queries, needle_positions, requests, …)
    metadata            schema = "diffcheck-trace-1"; source, model, recipe, page_format, start_position (optional)

Shapes have no batch dimension. x is [T, hidden], qr [T, q_lora]; query-side stages have one row per entry of
`queries` (absolute token positions; all T when absent); key-side stages have one row per compressed entry completed
in this call, the first of which is entry number `entry_start`. Score columns and top-k indices always count from
entry 0; -1 is an empty slot and invisible scores are -inf. Unknown names are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .compressor import WINDOW
from .errors import InputError

if TYPE_CHECKING:
    from .indexer import IndexerState

SCHEMA = "diffcheck-trace-1"
QUERY_STAGES = ("q", "q_rope", "q_hadamard", "q_quant", "gate", "scores", "topk")
KEY_STAGES = ("pool", "k_norm", "k_rope", "k_hadamard", "k_quant")
STAGES = (*QUERY_STAGES[:4], *KEY_STAGES, *QUERY_STAGES[4:])
"""All stages in pipeline order."""
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")


class Trace(Mapping[str, Tensor]):
    """One layer's tensors by name, and where in the token stream they lie.

    `layer` is the layer number or None; `start` the position of the first token of this call; `state` continues the
    stream (not saved); `shared` holds tensors that belong to no layer; `metadata` the file's strings.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        layer: int | None = None,
        start: int = 0,
        state: IndexerState | None = None,
        shared: Mapping[str, Tensor] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self.layer, self.start, self.state = layer, start, state
        self.shared = dict(shared or {})
        self.metadata = dict(metadata or {})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in self.items())
        return f"Trace(layer={self.layer}, start={self.start}, {shapes})"

    @property
    def entry_start(self) -> int:
        """Number of the first entry that the key-side stages hold."""
        return self.start // WINDOW

    @property
    def queries(self) -> Tensor:
        """Absolute token positions of the query rows, int64."""
        if "queries" in self:
            return self["queries"].long()
        return torch.arange(self.start, self.start + self["x"].shape[0])

    def save(self, path: str | Path) -> None:
        """Write this layer to a safetensors file (see `save_traces` for several layers)."""
        save_traces(path, [self])

    @classmethod
    def load(cls, path: str | Path, layer: int | None = None) -> Trace:
        """Read one layer of a trace file; `layer` may be left out when the file holds only one.

        Raises InputError for a file that is absent, broken, of another schema, or without that layer.
        """
        traces = load_traces(path, None if layer is None else [layer])
        if layer is None and len(traces) != 1:
            raise InputError(f"{path}: holds layers {sorted(traces)}, expected one or a layer number")
        return next(iter(traces.values()))


def save_traces(path: str | Path, traces: list[Trace]) -> None:
    """Write the traces of several layers, which must share start position, to one safetensors file."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for trace in traces:
        assert trace.start == traces[0].start, "traces of one file start at one position"
        prefix = f"layers.{trace.layer or 0}."
        tensors |= {prefix + name: tensor for name, tensor in trace.items()}
        tensors |= trace.shared
        metadata |= trace.metadata
    assert len({trace.layer or 0 for trace in traces}) == len(traces), "one trace a layer"
    metadata |= {"schema": SCHEMA, "start_position": str(traces[0].start if traces else 0)}
    owners: set[int] = set()
    for name, tensor in tensors.items():
        tensors[name] = tensor.contiguous().cpu()
        storage = tensors[name].untyped_storage().data_ptr()
        # a step that a recipe skips hands its input on, and the file format refuses one tensor under two names
        if storage in owners:
            tensors[name] = tensors[name].clone()
        owners.add(storage)
    save_file(tensors, str(path), metadata=metadata)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """An open trace file: `layers` has the key of each tensor by layer and name, `shared` the keys of the others."""

    file: Any
    metadata: dict[str, str]
    start: int
    layers: dict[int, dict[str, str]]
    shared: tuple[str, ...]


@contextmanager
def open_trace(path: str | Path) -> Iterator[TraceFile]:
    """Open a trace file without reading a tensor.

    Raises InputError when the file is absent, no safetensors file, of an unknown schema, or (also inside the `with`)
    not readable after all.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise InputError(f"{path}: no such file, expected a trace (safetensors)")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise InputError(f"{path}: schema is {metadata.get('schema')!r}, expected {SCHEMA!r}")
            text = metadata.get("start_position", "0")
            if not text.isdecimal():
                raise InputError(f"{path}: start_position is {text!r}, expected a number of tokens")
            layers: dict[int, dict[str, str]] = {}
            shared = []
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                if match := _LAYER_NAME.fullmatch(key):
                    layers.setdefault(int(match[1]), {})[match[2]] = key
                else:
                    shared.append(key)
            yield TraceFile(file, metadata, int(text), layers, tuple(shared))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not readable as safetensors ({error})") from None


def load_traces(path: str | Path, layers: list[int] | None = None) -> dict[int, Trace]:
    """Traces by layer number; only the tensors of `layers` (all by default) are read.

    Raises InputError as `open_trace`, and when the file lacks a layer.
    """
    with open_trace(path) as opened:
        present, read = sorted(opened.layers), opened.file.get_tensor
        wanted = present if layers is None else layers
        missing = sorted(set(wanted) - set(present))
        if missing or not present:
            raise InputError(
                f"{path}: has no layer {missing or ''}, expected tensors named layers.N.*; it holds {present}"
            )
        shared = {key: read(key) for key in opened.shared}
        return {
            layer: Trace(
                {name: read(key) for name, key in opened.layers[layer].items()},
                layer=layer,
                start=opened.start,
                shared=shared,
                metadata=opened.metadata,
            )
            for layer in wanted
        }
