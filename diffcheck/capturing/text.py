"""From a checkpoint and a text to a trace file: what `diffcheck capture` and `diffcheck run --text` do."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..checkpoint.layer import Checkpoint
from ..checkpoint.model import ModelCheckpoint
from ..errors import InputError
from ..inputs.source import choose_queries
from ..refimpl import Trace, save_traces
from .embedding import PROXY, embedding_inputs
from .forward import Captured, LayerTime, Say, capture_forward
from .tokens import Tokeniser, read_text, read_tokens

INPUT_KINDS = ("model", "embedding")
DEFAULT_QUERIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs:
    """A validated request: the model, its token ids, the indexer layers to record, and where all that is from."""

    model: ModelCheckpoint
    tokens: tuple[int, ...] = field(repr=False)
    layers: tuple[int, ...]
    kind: str
    source: str


def load_text_inputs(
    checkpoint: Path, *, text: Path | None, tokens: Path | None, layers: Sequence[int] | None, kind: str = "model"
) -> TextInputs:
    """Check everything that can be wrong before the first layer runs; InputError says what is.

    kind: "model" for the forward pass, "embedding" for the proxy. layers: indexer layers, by default all there are.
    """
    if kind not in INPUT_KINDS:
        raise InputError(f"--inputs: {kind!r}, expected {' or '.join(INPUT_KINDS)}")
    if (text is None) == (tokens is None):
        raise InputError("expected one of --text FILE and --tokens FILE.json")
    opened = Checkpoint(checkpoint)
    model = ModelCheckpoint(opened)
    chosen = opened.select(layers)
    if kind == "model":
        reach = model.layers_present
        beyond = [layer for layer in chosen if layer >= reach]
        if beyond and (layers is not None or len(beyond) == len(chosen)):
            raise InputError(
                f"{model.directory}: holds layers 0 to {reach - 1} whole, expected all up to layer {max(chosen)}"
            )
        chosen = tuple(layer for layer in chosen if layer < reach)
    if tokens is not None:
        ids, name = read_tokens(tokens), tokens
    else:
        assert text is not None, "one of both was given"
        ids, name = Tokeniser(model.directory).encode(read_text(text)), text
    wrong = next(((i, t) for i, t in enumerate(ids) if not 0 <= t < model.config.vocab_size), None)
    if wrong:
        raise InputError(
            f"{name}: token {wrong[0]} has id {wrong[1]}, expected 0 to {model.config.vocab_size - 1} "
            "(the checkpoint's vocab_size)"
        )
    if len(ids) < 4:
        raise InputError(f"{name}: makes {len(ids)} tokens, expected at least 4 (one compressed entry)")
    what = PROXY if kind == "embedding" else "forward pass of the reference"
    return TextInputs(
        model=model, tokens=tuple(ids), layers=chosen, kind=kind, source=f"{what}, {len(ids)} tokens of {name.name}"
    )


def capture_trace(
    inputs: TextInputs,
    out: Path,
    *,
    device: str = "cpu",
    run_dir: Path | None = None,
    queries: int = DEFAULT_QUERIES,
    stages: tuple[str, ...] = (),
    must_include: Sequence[int] = (),
    shared: dict[str, torch.Tensor] | None = None,
    say: Say = lambda line: None,
) -> list[LayerTime]:
    """Write the trace file `out`; returns the cost of each layer that ran.

    run_dir keeps finished layers; by default one beside `out`, removed when the trace is written. queries: how many
    query rows get their attention mass (and stages) recorded, those of must_include among them. shared: tensors of the
    file that belong to no layer.
    """
    check_out(out)
    length, k = len(inputs.tokens), inputs.model.config.indexer.index_topk
    rows = choose_queries(length, k, min(queries, length), must_include)
    metadata = {"source": inputs.source, "model": inputs.model.directory.name}
    if inputs.kind == "embedding":
        traces = [
            Trace(embedding_inputs(inputs.model, inputs.tokens, n), layer=n, shared=shared, metadata=metadata)
            for n in inputs.layers
        ]
        _write(out, traces)
        return []
    directory = run_dir or default_run_dir(out)
    wanted = Captured(layers=inputs.layers, queries=rows, stages=stages)
    times = capture_forward(inputs.model, inputs.tokens, wanted, directory, device=device, say=say)
    traces = [
        Trace(load_file(directory / f"layer-{n:04d}.safetensors"), layer=n, shared=shared, metadata=metadata)
        for n in inputs.layers
    ]
    _write(out, traces)
    if run_dir is None:
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
    return times


def default_run_dir(out: Path) -> Path:
    """Where the finished layers of a capture to `out` are kept."""
    return out.with_name(out.name + ".run")


def check_out(out: Path) -> None:
    """InputError if a trace could not be written there."""
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"--out: cannot write {out}, expected a file in a directory that exists")


def _write(out: Path, traces: list[Trace]) -> None:
    partial = out.with_name(out.name + ".partial")
    try:
        save_traces(partial, traces)
        partial.replace(out)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror or error})") from None
