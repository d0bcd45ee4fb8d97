"""Traces from files that a server left: SGLang's tensor dumps, returned top-k, and plain .pt or .safetensors files.

Nothing from a file is executed: `.pt` is read with weights_only, arrays without pickles. What a file lacks is listed,
not guessed, and names that mean nothing here are listed as well.

SGLang's `--debug-tensor-dump-output-folder` makes a directory a rank, TP{t}_PP{p}_Rank{r}_pid{n}, with one file a
forward pass, Pass{n}.pt: outputs of the model's leaf modules by name, and the batch's positions. x is what the layer's
input norm returns and qr what q_norm does. Tokens of a pass belong to requests by their positions: position 0 begins a
new request, another one continues the request that ended there.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import InputError
from ..refimpl import STAGES, IndexerConfig, Trace

_RANK = re.compile(r"TP(\d+)_PP(\d+)_Rank\d+(?:_pid\d+)?")
_PASS = re.compile(r"Pass(\d+)\.pt")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_SGLANG = {
    "x": re.compile(r"input_layernorm|attn_norm"),
    "qr": re.compile(r"(?:self_attn|attn)\.(?:q_norm|q_a_norm|q_a_layernorm)"),
    "q": re.compile(r"(?:self_attn|attn)\.indexer\.wq_b"),
}
KNOWN = ("x", "qr", *STAGES, "queries", "pages", "block_table", "slots", "tokens", "observed_topk", "attention_mass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What a dump holds: traces by layer for each request; what is missing; names that were not understood."""

    requests: tuple[dict[int, Trace], ...]
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = field(default=(), repr=False)


def load_pt(path: Path) -> Any:
    """Contents of a .pt file, tensors on the CPU; InputError when it is absent or needs more than plain tensors."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected a .pt file") from None
    except pickle.UnpicklingError:
        raise InputError(f"{path}: holds more than tensors, expected a file that weights_only can read") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not readable as a .pt file ({str(error).splitlines()[0][:120]})") from None


def read_sglang_dump(path: str | Path, config: IndexerConfig) -> Dump:
    """Read a dump directory, of all ranks or of one. Rank TP0 of each pipeline stage is used: x and qr are replicated.

    Raises InputError for a directory without a pass, files that cannot be read, and a dump in which no layer with an
    indexer has x and qr.
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such directory, expected SGLang's tensor dumps")
    ranks = [(entry, match) for entry in sorted(path.iterdir()) if (match := _RANK.fullmatch(entry.name))]
    directories = [entry for entry, match in ranks if match[1] == "0"] or [path]
    streams: dict[int, _Requests] = {}
    ignored: set[str] = set()
    missing: list[str] = []
    for directory in directories:
        passes = sorted((int(m[1]), file) for file in directory.iterdir() if (m := _PASS.fullmatch(file.name)))
        if not passes:
            raise InputError(f"{directory}: no Pass00000.pt, expected the files of SGLang's tensor dump")
        for number, file in passes:
            contents = load_pt(file)
            if not isinstance(contents, Mapping):
                raise InputError(f"{file}: holds {type(contents).__name__}, expected tensors by module name")
            if not _add_pass(contents, config, streams, ignored, file):
                missing.append(f"pass {number}: positions, taken to be one request from token 0 on")
    return _finish(path, streams, config, ignored, missing)


class _Requests:
    """A layer's rows, sorted into requests by position."""

    def __init__(self) -> None:
        self.parts: list[dict[str, list[Tensor]]] = []
        self.start: list[int] = []
        self.length: list[int] = []

    def add(self, runs: list[tuple[int, int, int]], tensors: dict[str, Tensor]) -> None:
        """`runs`: (row, position, length) of consecutive tokens; each goes to the request that it continues."""
        for row, position, length in runs:
            ends = [s + n for s, n in zip(self.start, self.length, strict=True)]
            known = [i for i, end in enumerate(ends) if end == position]
            if known:
                request = known[-1]
            else:
                self.parts.append(defaultdict(list))
                self.start.append(position)
                self.length.append(0)
                request = len(self.parts) - 1
            self.length[request] += length
            for name, tensor in tensors.items():
                self.parts[request][name].append(tensor[row : row + length])


def _runs(positions: Tensor) -> list[tuple[int, int, int]]:
    """(first row, position, length) of each stretch of consecutive positions."""
    if not len(positions):
        return []
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(positions)]
    return [(a, int(positions[a]), b - a) for a, b in pairwise(edges)]


def _add_pass(
    contents: Mapping[str, Any],
    config: IndexerConfig,
    streams: dict[int, _Requests],
    ignored: set[str],
    file: Path,
) -> bool:
    """Sort a pass into the streams; False when it had no positions."""
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    positions = None
    for name, value in contents.items():
        if name.endswith("forward_batch_info.positions"):
            positions = value.long()
            continue
        match = _LAYER.fullmatch(name)
        known = match and next((n for n, pattern in _SGLANG.items() if pattern.fullmatch(match[2])), None)
        if not match or known is None or int(match[1]) not in config.indexer_layers:
            ignored.add(re.sub(r"\.\d+\.", ".N.", name))
            continue
        tensor = value[0] if isinstance(value, list | tuple) else value  # a norm with a residual returns both
        layers[int(match[1])][known] = tensor
    if not layers:
        return True
    rows = max(len(t) for tensors in layers.values() for t in tensors.values())
    given = positions is not None
    if positions is None:
        positions = torch.arange(rows)
    if positions.dim() != 1 or len(positions) > rows:
        raise InputError(f"{file}: {len(positions)} positions for {rows} rows, expected one a row")
    for layer, tensors in layers.items():
        for name, tensor in list(tensors.items()):
            width = {"x": config.hidden_size, "qr": config.q_lora_rank}.get(name)
            tensor = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
            if name == "q":
                if tensor.shape[-1] != config.index_n_heads * config.index_head_dim:
                    del tensors[name]  # a tensor-parallel share
                    continue
                tensor = tensor.unflatten(-1, (config.index_n_heads, config.index_head_dim))
            elif tensor.shape[-1] != width:
                raise InputError(
                    f"{file}: {name} of layer {layer} has shape {list(tensor.shape)}, expected [T, {width}] "
                    "as the checkpoint's config says"
                )
            tensors[name] = tensor
        streams.setdefault(layer, _Requests()).add(_runs(positions), tensors)
    return given


def _finish(
    path: Path, streams: dict[int, _Requests], config: IndexerConfig, ignored: set[str], missing: list[str]
) -> Dump:
    missing = missing + [f"layer {layer}: not in the dump" for layer in config.indexer_layers if layer not in streams]
    count = max((len(s.parts) for s in streams.values()), default=0)
    requests: list[dict[int, Trace]] = [{} for _ in range(count)]
    for layer, stream in sorted(streams.items()):
        for number, (part, start, length) in enumerate(zip(stream.parts, stream.start, stream.length, strict=True)):
            where = f"layer {layer}, request {number}"
            tensors = {name: torch.cat(rows) for name, rows in part.items()}
            for name in [n for n, t in tensors.items() if len(t) != length]:
                missing.append(f"{where}: {name} of {length - len(tensors.pop(name))} tokens")
            missing += [
                f"{where}: {name} ({what})"
                for name, what in (("x", "the input norm's output"), ("qr", "q_norm's output; a fused kernel hides it"))
                if name not in tensors
            ]
            if start:
                missing.append(f"{where}: tokens 0 to {start - 1} (a cached prefix)")
            requests[number][layer] = Trace(
                tensors, layer=layer, start=start, metadata={"source": f"SGLang tensor dump {path.name}"}
            )
    if not any("x" in t and "qr" in t for request in requests for t in request.values()):
        found = "; ".join(missing[:3])
        raise InputError(f"{path}: no layer with an indexer has x and qr, expected both of one at least ({found})")
    return Dump(requests=tuple(requests), missing=tuple(missing), ignored=tuple(sorted(ignored)))


def read_plain(path: str | Path) -> Dump:
    """A .safetensors or .pt file with tensors named layers.N.NAME, or a .pt of {layer: {name: tensor}}; one request.

    NAME is x, qr, a stage, queries, pages, block_table, slots, tokens or observed_topk. InputError when nothing of that
    is there or the file cannot be read.
    """
    path = Path(path)
    if path.suffix == ".pt":
        contents = load_pt(path)
    else:
        try:
            contents = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not readable as safetensors ({error})") from None
    if not isinstance(contents, Mapping):
        raise InputError(f"{path}: holds {type(contents).__name__}, expected tensors by name")
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    shared: dict[str, Tensor] = {}
    ignored = []
    for name, value in _flat(contents):
        match = _LAYER.fullmatch(name)
        if not isinstance(value, Tensor):
            ignored.append(name)
        elif match and match[2] in KNOWN:
            layers[int(match[1])][match[2]] = value
        elif name.startswith("needle_") or name == "requests":
            shared[name] = value
        else:
            ignored.append(name)
    if not layers:
        raise InputError(f"{path}: no tensor named layers.N.x or the like, expected x and qr of a layer at least")
    missing = [f"layer {n}: {name}" for n, found in sorted(layers.items()) for name in ("x", "qr") if name not in found]
    traces = {
        n: Trace(found, layer=n, shared=shared, metadata={"source": f"plain file {path.name}"})
        for n, found in sorted(layers.items())
    }
    return Dump(requests=(traces,), missing=tuple(missing), ignored=tuple(ignored))


def _flat(contents: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    found = []
    for key, value in contents.items():
        if isinstance(value, Mapping) and re.fullmatch(r"\d+|layers\.\d+", str(key)):
            found += [(f"layers.{str(key).removeprefix('layers.')}.{name}", part) for name, part in value.items()]
        else:
            found.append((str(key), value))
    return found
