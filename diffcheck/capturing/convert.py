"""`diffcheck convert`: a dump of any kind to a trace file, with what was found and what is missing."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.layer import Checkpoint
from ..errors import InputError
from ..refimpl import save_traces
from .dumps import Dump, read_plain, read_sglang_dump
from .response import read_response
from .text import check_out

_SHOWN = 8
"""Names of one kind that are printed; the rest is counted."""


def convert_dump(dump: Path, checkpoint: Path, out: Path, request: int = 0) -> list[str]:
    """Write one request of a dump to the trace file `out`; returns lines for people. InputError says what is wrong."""
    check_out(out)
    config = Checkpoint(checkpoint).config
    if dump.is_dir():
        found = read_sglang_dump(dump, config)
    elif dump.suffix == ".json":
        answer = read_response(dump, config)
        found = Dump(
            requests=(answer.layers,),
            missing=("x and qr: an answer holds the selection only",),
            ignored=answer.unknown,
        )
    else:
        found = read_plain(dump)
    if not 0 <= request < len(found.requests):
        raise InputError(f"{dump}: has no request {request}, expected 0 to {len(found.requests) - 1}")
    traces = found.requests[request]
    try:
        save_traces(out, list(traces.values()))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror or error})") from None
    lines = [f"wrote {out}: request {request} of {len(found.requests)}"]
    for layer, trace in sorted(traces.items()):
        tensors = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in trace.items())
        lines.append(f"layer {layer}, from token {trace.start} on: {tensors}")
    lines += _some("missing: ", found.missing)
    lines += _some("not understood: ", found.ignored)
    return lines


def _some(label: str, items: tuple[str, ...]) -> list[str]:
    more = [f"{label}{len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [label + item for item in items[:_SHOWN]] + more
