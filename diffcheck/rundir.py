"""What `diffcheck run --run-dir DIR` keeps, and when old records may be used.

    DIR/records.jsonl       the run's identity, then a line a finished layer set-up and a line a finished case
    DIR/layers/             with a text: finished layers of the forward pass
    DIR/trace.safetensors   with a text: what the forward pass left

The identity is everything outside a case that changes its numbers: checkpoint, inputs, query rows, backend, device and
versions. A directory of another identity is refused. What a case itself is (layer, precision, theta and all fields of
its recipe) is its key, so that a resumed run may ask for more layers or precisions, and a recipe file that was edited
is measured anew. Cases that failed are not kept: a resumed run tries them again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .backends import find_backend
from .digests import digest
from .journal import Journal
from .packages import installed_version
from .run import Plan, made_up
from .version import __version__


def open_run(directory: Path, todo: Plan, *, resume: bool, text: str | None = None) -> Journal:
    """The journal of a planned run; InputError as in `Journal.open`. text: digest of a text that is captured first."""
    return Journal.open(directory, identity=identity(todo, text), resume=resume)


def identity(todo: Plan, text: str | None = None) -> dict[str, Any]:
    """What must be equal for records of another run to be this run's."""
    options = todo.options
    return {
        "diffcheck": __version__,
        "torch": installed_version("torch"),
        "checkpoint": todo.checkpoint.fingerprint(),
        "inputs": _inputs(todo) if text is None else f"text {text}",
        "query rows": options.queries,
        "backend": _backend(options.backend),
        "device": torch.cuda.get_device_name() if todo.device == "cuda" else todo.device,
    }


def _inputs(todo: Plan) -> str:
    if todo.inputs is None:
        return made_up(todo)
    assert todo.trace is not None, "inputs come from a trace"
    status = todo.trace.stat()
    return f"trace {digest(f'{status.st_size} {status.st_mtime_ns}')}, request {todo.options.request}"


def _backend(name: str) -> str:
    """A backend with what says that it is still the same: its file's contents, or its version."""
    path, _, _ = name.rpartition(":")
    if path.endswith(".py"):
        return f"{name} {digest(Path(path).read_bytes())}"
    return name if name == "auto" else f"{name} {find_backend(name).version()}"
