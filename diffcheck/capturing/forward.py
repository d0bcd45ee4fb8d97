"""The forward pass over a text, layer by layer, resumable: what each indexer really sees.

A run directory holds what an interrupt must not cost:

    run.json                    which checkpoint, text and options the run is of; another one is refused
    streams-NNNN.safetensors    the residual streams after layer NNNN, the newest only
    layer-NNNN.safetensors      x, qr and what else was asked for of a captured layer

Each file is written beside its name and renamed, so that one that is there is whole. A run that finds its own directory
goes on after the newest streams.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.model import ModelCheckpoint
from ..errors import InputError
from ..refimpl import STAGES, run_indexer
from ..refimpl.model import AttentionRecord, run_model

SCHEMA = "diffcheck-run-1"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What to record: `layers` (indexer layers), the stages named, and the attention mass of the `queries`, int64."""

    layers: tuple[int, ...]
    queries: Tensor = field(repr=False)
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Cost of one layer: seconds, waiting for its weights included; of these, writing files; peak bytes on the GPU."""

    layer: int
    seconds: float
    saving: float
    peak_bytes: int | None


def capture_forward(
    model: ModelCheckpoint,
    tokens: Sequence[int],
    wanted: Captured,
    run_dir: Path,
    *,
    device: str = "cpu",
    say: Say = lambda line: None,
    done: Callable[[LayerTime], None] = lambda time: None,
) -> list[LayerTime]:
    """Run the layers up to the last one wanted and leave a file for each of these in `run_dir`.

    Layers that the directory has already are not run again. Returns the cost of those that ran; `done` is told each of
    them at once. Raises InputError for a
    directory of another run, an id outside the vocabulary and whatever the checkpoint lacks.
    """
    ids = torch.tensor(list(tokens), dtype=torch.int64)
    last = max(wanted.layers)
    _claim(run_dir, _key(model, ids, wanted))
    finished, streams = _newest_streams(run_dir, wanted.layers)
    if finished is not None:
        say(f"layers 0 to {finished} are done, found in {run_dir}")
    todo = range(0 if finished is None else finished + 1, last + 1)
    times: list[LayerTime] = []
    began = time.perf_counter()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    running = run_model(
        model.config, model.load, ids, layers=todo, streams=streams, device=device, mass_queries=wanted.queries
    )
    for result in running:
        if device == "cuda":
            torch.cuda.synchronize()
        ran = time.perf_counter()
        if result.layer in wanted.layers:
            _save(run_dir / _layer_file(result.layer), _record(model, result.layer, result.record, wanted))
        if result.layer != last:
            _save(run_dir / _streams_file(result.layer), {"streams": result.streams})
            _drop_older_streams(run_dir, result.layer)
        now = time.perf_counter()
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        times.append(LayerTime(layer=result.layer, seconds=now - began, saving=now - ran, peak_bytes=peak))
        began = now
        done(times[-1])
        say(_progress(times, last))
    return times


def _progress(times: list[LayerTime], last: int) -> str:
    latest = times[-1]
    # the first layer also waits for its weights, so it says little about the others
    steady = [t.seconds for t in times[1:]] or [latest.seconds]
    left = (last - latest.layer) * sum(steady) / len(steady)
    peak = "" if latest.peak_bytes is None else f", peak {latest.peak_bytes / 1e9:.1f} GB"
    return f"layer {latest.layer} of 0..{last}: {latest.seconds:.1f} s{peak}, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _record(model: ModelCheckpoint, layer: int, record: AttentionRecord, wanted: Captured) -> dict[str, Tensor]:
    """Tensors of a captured layer, on the CPU, by their names in a trace."""
    tensors = {"x": record.x, "qr": record.qr, "queries": wanted.queries}
    if record.mass is not None:
        tensors["attention_mass"] = record.mass
    if wanted.stages:
        weights = model.checkpoint.load(layer).to(record.x.device)
        queries = wanted.queries.to(record.x.device)
        trace = run_indexer(model.config.indexer, weights, record.x, record.qr, queries=queries)
        tensors |= {name: trace[name] for name in wanted.stages}
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _key(model: ModelCheckpoint, ids: Tensor, wanted: Captured) -> dict[str, str]:
    def digest(values: object) -> str:
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    return {
        "checkpoint": model.checkpoint.fingerprint(),
        "text": digest(ids.tolist()),
        "layers": ",".join(map(str, wanted.layers)),
        "query rows": digest(wanted.queries.tolist()),
        "stages": ",".join(wanted.stages),
    }


def _claim(run_dir: Path, key: dict[str, str]) -> None:
    """Make the directory this run's, or see that it is."""
    path = run_dir / "run.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(run_dir.iterdir()):
                raise InputError(f"{run_dir}: is not empty and holds no run.json, expected a new directory")
            path.write_text(json.dumps({"schema": SCHEMA, "key": key}, indent=1) + "\n", encoding="utf-8")
            return
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{run_dir}: cannot be used ({error.strerror}), expected a writable directory") from None
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON ({error}), expected a run's own file") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("key"), dict):
        raise InputError(f"{path}: is no file of schema {SCHEMA}, expected a run directory")
    other = [name for name in key if found["key"].get(name) != key[name]]
    if other:
        raise InputError(f"{run_dir}: holds a run with other {' and '.join(other)}, expected this run's or a new one")


def _layer_file(layer: int) -> str:
    return f"layer-{layer:04d}.safetensors"


def _streams_file(layer: int) -> str:
    return f"streams-{layer:04d}.safetensors"


def _newest_streams(run_dir: Path, layers: tuple[int, ...]) -> tuple[int | None, Tensor | None]:
    """The last finished layer and its streams; (None, None) at the start. All wanted layers done: no streams needed."""
    last = max(layers)
    if all((run_dir / _layer_file(layer)).is_file() for layer in layers):
        return last, torch.empty(0)
    for layer in range(last - 1, -1, -1):
        path = run_dir / _streams_file(layer)
        earlier = [n for n in layers if n <= layer]
        if path.is_file() and all((run_dir / _layer_file(n)).is_file() for n in earlier):
            with safe_open(str(path), framework="pt") as file:
                return layer, file.get_tensor("streams")
    return None, None


def _drop_older_streams(run_dir: Path, newest: int) -> None:
    for path in run_dir.glob("streams-*.safetensors"):
        if path.name != _streams_file(newest):
            path.unlink()


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, str(partial))
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def check_stages(names: Sequence[str]) -> tuple[str, ...]:
    """Stage names in pipeline order; "all" means every one. InputError for an unknown name."""
    unknown = [name for name in names if name not in (*STAGES, "all")]
    if unknown:
        raise InputError(f"--stages: {unknown[0]!r}, expected all or some of {', '.join(STAGES)}")
    return tuple(name for name in STAGES if name in names or "all" in names)
