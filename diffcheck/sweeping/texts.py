"""What a sweep measures on: layers of a checkpoint, each on one or several texts.

Texts are the requests of a trace, or made-up ones with planted needles, another seed for each. Query rows are the same
in all layers and recipes. A text whose rows all see no more than they may select shows nothing and is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..checkpoint.layer import Checkpoint
from ..digests import digest
from ..errors import InputError
from ..inputs.source import LayerInputs, choose_queries, load_inputs
from ..inputs.synthetic import synthetic_inputs
from ..refimpl.scoring import visible_entries
from ..refimpl.trace import open_trace
from ..run import SYNTHETIC_LENGTH_IN_TOPK
from .cases import LayerText, spread

SEED_STEP = 1_000_003
"""Between the seeds of two texts, so that no layer of one meets a layer of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A validated choice of layers and texts; `load` reads or makes one."""

    checkpoint: Checkpoint
    layers: tuple[int, ...]
    source: str
    trace: Path | None
    requests: tuple[int | None, ...]
    lengths: tuple[int, ...]
    rows: int
    seed: int
    fingerprint: dict[str, object] = field(repr=False)

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """Names these texts among those of all sweeps, since processes of a cluster serve many."""
        return digest(json.dumps(self.fingerprint, sort_keys=True))

    def positions(self, text: int) -> Tensor:
        """Query rows of a text, int64; all see more than k entries."""
        k = self.checkpoint.config.index_topk
        chosen = choose_queries(self.lengths[text], k, min(self.rows, self.lengths[text]))
        return chosen[visible_entries(chosen) > k]

    def load(self, layer: int, text: int) -> LayerText:
        """A layer on a text."""
        config = self.checkpoint.config
        weights = self.checkpoint.load(layer)
        if self.trace is not None:
            inputs: LayerInputs = load_inputs(self.trace, config, [layer], request=self.requests[text])[layer]
            if inputs.start:
                raise InputError(f"{self.trace}: starts at token {inputs.start}, expected 0: a sweep begins a stream")
        else:
            seed = self.seed + layer + SEED_STEP * text
            inputs = synthetic_inputs(config, weights, length=self.lengths[text], seed=seed)
        positions = self.positions(text)
        return LayerText(
            key=f"{self.digest}/{layer}/{text}", config=config, weights=weights, x=inputs.x, qr=inputs.qr,
            positions=positions, order=spread(len(positions)), needles=inputs.needles,
        )  # fmt: skip


def plan_texts(
    checkpoint: Path,
    *,
    layers: list[int] | None,
    trace: Path | None,
    request: int | None,
    length: int | None,
    texts: int | None,
    rows: int,
    seed: int,
    made_from: str | None = None,
) -> Texts:
    """Check everything that can be wrong with the inputs; InputError says what is.

    made_from: names the trace in the fingerprint, where its file is a new one each time.
    """
    if rows < 1:
        raise InputError(f"--rows: {rows}, expected at least 1")
    if texts is not None and texts < 1:
        raise InputError(f"--texts: {texts}, expected at least 1")
    if trace is not None and (length is not None or texts is not None):
        raise InputError("--trace excludes --length and --texts: its requests are the texts")
    if trace is None and request is not None:
        raise InputError("--request chooses one of a trace's requests, expected --trace")
    opened = Checkpoint(checkpoint)
    chosen, k = opened.select(layers), opened.config.index_topk
    own = opened.directory / "trace.safetensors"
    if trace is None and length is None and texts is None and own.is_file():
        trace = own
    requests: tuple[int | None, ...] = (None,) * (texts or 1)
    if trace is None:
        lengths = (length or SYNTHETIC_LENGTH_IN_TOPK * k,) * (texts or 1)
        source = f"made-up hidden states, {_count(lengths)}, seed {seed}"
    else:
        with open_trace(trace) as file:
            present = set(file.layers)
        held = tuple(n for n in chosen if n in present)
        if not held or (layers is not None and held != chosen):
            lacking = sorted(set(chosen) - present)
            raise InputError(f"{trace}: holds no layer {lacking}, expected layers.N.x and layers.N.qr of them")
        chosen = held
        # the values of one layer, so that most of what can be wrong is found before anything is measured
        several = "requests" in file.shared
        load_inputs(trace, opened.config, [chosen[0]], request=request or 0 if several else request)
        requests, lengths = _requests(trace, request, chosen[0])
        source = f"trace {trace}, {_count(lengths)}"
    for length in lengths:
        if length // 4 <= k:
            raise InputError(
                f"a text of {length} tokens makes {length // 4} entries and {k} are selected, so no format can show "
                f"a difference; expected more than {4 * k + 3} tokens"
            )
    for layer in chosen:
        opened.bytes_needed(layer)
    fingerprint: dict[str, object] = {
        "checkpoint": str(opened.directory.resolve()),
        "layers": list(chosen),
        "trace": made_from or (_state(trace) if trace else None),
        "files": [
            _state(path) for name in ("config.json", *opened.index.files) if (path := opened.directory / name).exists()
        ],
        "texts": [[r, n] for r, n in zip(requests, lengths, strict=True)],
        "rows": rows,
        "seed": seed,
    }
    return Texts(
        checkpoint=opened, layers=chosen, source=source, trace=trace, requests=requests, lengths=lengths, rows=rows,
        seed=seed, fingerprint=fingerprint,
    )  # fmt: skip


def _count(lengths: tuple[int, ...]) -> str:
    tokens = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else f"{lengths[0]}"
    return f"{len(lengths)} texts of {tokens} tokens" if len(lengths) > 1 else f"a text of {tokens} tokens"


def _state(path: Path) -> list[object]:
    """A file, and what changes when it does."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _requests(trace: Path, request: int | None, layer: int) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The requests of a trace (which `load_inputs` has found in order) that are measured, and their tokens."""
    with open_trace(trace) as opened:
        if "requests" not in opened.shared:
            return (None,), (opened.file.get_slice(f"layers.{layer}.x").get_shape()[0],)
        bounds = opened.file.get_tensor("requests").tolist()
    wanted = range(len(bounds) - 1) if request is None else [request]
    return tuple(wanted), tuple(bounds[n + 1] - bounds[n] for n in wanted)
