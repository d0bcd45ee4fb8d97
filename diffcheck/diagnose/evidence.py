"""What a trace file shows of one layer, checked against the checkpoint before anything is computed.

An *observation* is a stage of the deployment: tensors named as stages are, plus `gate_folded` with `q_scale`, `pages`
with `block_table` or `slots`, and `observed_topk`, which stands before `topk`. Names that mean nothing here are kept
and reported. Several requests in one file (`requests`, cumulative token counts) are cut apart: the longest one is
diagnosed, indices are checked in all of them.

Letters: T tokens, E entries of the request, R query rows, H heads, D head dim.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.layer import Checkpoint
from ..errors import InputError
from ..inputs.source import load_inputs
from ..presets import build
from ..recipe import Recipe
from ..refimpl import IndexerConfig, IndexerWeights
from ..refimpl.compressor import WINDOW
from ..refimpl.trace import KEY_STAGES, QUERY_STAGES, STAGES, Trace, load_traces

PAGE_NAMES = ("pages", "block_table", "slots")
_KNOWN = {"x", "qr", "queries", "tokens", "observed_topk", "gate_folded", "q_scale", *PAGE_NAMES, *STAGES}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One layer of a trace.

    stages: observed tensors by stage name, topk and gates aside; query side [R, …], key side one row per entry
    completed in this call. selected: int64 [R, places], -1 empty. first_known: first entry that x determines, more
    than 0 when the call continues a stream. other_x: x of the file's other layers; other_weights: () -> other layers of
    the checkpoint with their weights.
    repeats: selections of further runs of the same call. foreign: rows whose selection holds an entry of another
    request, and the rows that were checked.
    """

    layer: int
    config: IndexerConfig
    weights: IndexerWeights
    x: Tensor
    qr: Tensor
    start: int
    queries: Tensor
    stages: dict[str, Tensor]
    selected: Tensor | None = None
    gate_folded: Tensor | None = None
    q_scale: Tensor | None = None
    pages: Tensor | None = None
    page_format: str | None = None
    slots: Tensor | None = None
    other_x: dict[int, Tensor] = field(default_factory=dict)
    other_weights: Callable[[], Iterator[tuple[int, IndexerWeights]]] = field(default=lambda: iter(()))
    repeats: tuple[Tensor, ...] = ()
    foreign: tuple[int, int] = (0, 0)
    requests: int = 1
    notes: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        """Entries so far, those before this call included."""
        return (self.start + self.x.shape[0]) // WINDOW

    @property
    def first_known(self) -> int:
        """First entry whose two windows lie in this call."""
        return 0 if self.start == 0 else -(-self.start // WINDOW) + 1

    @property
    def names(self) -> list[str]:
        """What was observed, in pipeline order."""
        found = [name for name in STAGES if name in self.stages or (name == "topk" and self.selected is not None)]
        if self.gate_folded is not None:
            found.append("gate_folded")
        return found + (["pages"] if self.pages is not None else [])


def read_trace(path: Path, checkpoint: Checkpoint, layers: list[int] | None) -> tuple[list[Evidence], dict[str, str]]:
    """Evidence of each layer asked for (all that the file holds by default), and the file's metadata.

    InputError when the file does not fit the checkpoint or holds nothing that could be compared.
    """
    config = checkpoint.config
    inputs = load_inputs(path, config, layers, several=True)
    checkpoint.select(list(inputs))
    traces = load_traces(path)
    found = []
    for layer, given in inputs.items():
        trace = traces[layer]
        others = {
            n: t["x"].bfloat16() for n, t in traces.items() if n != layer and "x" in t and t["x"].shape == given.x.shape
        }
        part = _Reader(path, config, trace, given.x, given.qr, given.start).read()
        found.append(
            Evidence(
                layer=layer, config=config, weights=checkpoint.load(layer), start=given.start, other_x=others,
                other_weights=_others(checkpoint, layer, others),
                page_format=trace.metadata.get("page_format"), **part,
            )
        )  # fmt: skip
    if not any(evidence.names for evidence in found):
        raise InputError(
            f"{path}: holds inputs only, expected something that the deployment computed: "
            f"{', '.join(STAGES)}, observed_topk or pages"
        )
    return found, next(iter(traces.values())).metadata


def _others(
    checkpoint: Checkpoint, layer: int, with_x: dict[int, Tensor]
) -> Callable[[], Iterator[tuple[int, IndexerWeights]]]:
    """The other layers, those with inputs in the trace first; read when somebody asks."""

    def load() -> Iterator[tuple[int, IndexerWeights]]:
        for other in sorted(checkpoint.present_layers, key=lambda n: n not in with_x):
            if other != layer:
                yield other, checkpoint.load(other)

    return load


def declared_recipe(option: str | None, metadata: dict[str, str], config: IndexerConfig) -> Recipe | None:
    """The recipe that the deployment says it runs: by the command line (a name or a TOML file), else by the trace."""
    from ..cases import load_recipe

    if option is not None:
        is_file = option.endswith(".toml") or Path(option).is_file()
        return load_recipe(Path(option), config) if is_file else build(option, config)
    text = metadata.get("recipe", "").strip()
    if not text:
        return None
    if not text.startswith("{"):
        return build(text.strip('"'), config)
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"metadata recipe is no JSON ({error}), expected a recipe's fields or a preset's name"
        ) from None
    return Recipe.from_json(fields, config)


class _Reader:
    """Checks the shapes of one layer and cuts out the request to diagnose."""

    def __init__(self, path: Path, config: IndexerConfig, trace: Trace, x: Tensor, qr: Tensor, start: int) -> None:
        self.where, self.config, self.trace = f"{path}: layers.{trace.layer}", config, trace
        self.x, self.qr, self.start = x, qr, start
        self.bounds = self._bounds(path)
        lengths = [b - a for a, b in itertools.pairwise(self.bounds)]
        self.chosen = lengths.index(max(lengths))
        self.counts = [(start + n) // WINDOW - start // WINDOW for n in lengths]

    def _bounds(self, path: Path) -> list[int]:
        tokens = self.x.shape[0]
        if "requests" not in self.trace.shared:
            return [0, tokens]
        bounds = [int(b) for b in self.trace.shared["requests"].flatten().tolist()]
        rising = all(a < b for a, b in itertools.pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or not rising:
            raise InputError(f"{path}: requests is {bounds[:8]}, expected rising token counts from 0 to {tokens}")
        if len(bounds) > 2 and self.start:
            raise InputError(f"{path}: several requests that start at token {self.start}, expected start_position 0")
        return bounds

    def read(self) -> dict[str, Any]:
        """Fields of the evidence that come from the trace."""
        trace, lo, hi = self.trace, self.bounds[self.chosen], self.bounds[self.chosen + 1]
        queries = self._queries()
        mine = (queries >= lo + self.start) & (queries < hi + self.start)
        if not bool(mine.any()):
            raise InputError(f"{self.where}.queries holds no position of the longest request, expected some")
        stages: dict[str, Tensor] = {}
        for name in STAGES[:-1]:
            if name in trace:
                stages[name] = self._stage(name, trace[name], len(queries), mine)
        notes = [f"{name}: unknown name, not compared" for name in trace if name not in _KNOWN and not _repeat(name)]
        if len(self.bounds) > 2:
            notes.append(f"{len(self.bounds) - 1} requests; the longest one, tokens {lo} to {hi - 1}, is diagnosed")
        result: dict[str, Any] = {
            "x": self.x[lo:hi], "qr": self.qr[lo:hi], "queries": queries[mine] - lo, "stages": stages,
            "requests": len(self.bounds) - 1,
        }  # fmt: skip
        name = "observed_topk" if "observed_topk" in trace else "topk"
        if name in trace:
            selected = self._indices(name, len(queries))
            own, foreign = self._own(selected, queries)
            result["selected"], result["foreign"] = own[mine], (int(foreign.sum()), len(queries))
            repeats = [self._indices(n, len(queries)) for n in trace if _repeat(n)]
            result["repeats"] = tuple(self._own(r, queries)[0][mine] for r in repeats)
        for name in ("gate_folded", "q_scale"):
            if name in trace:
                value = trace[name].float()
                if value.shape[0] != len(queries):
                    raise InputError(f"{self.where}.{name} has {value.shape[0]} rows, expected {len(queries)}")
                result[name] = value.reshape(len(queries), -1)[mine]
        if result.get("gate_folded") is not None and result["gate_folded"].shape[1] != self.config.index_n_heads:
            raise InputError(f"{self.where}.gate_folded, expected [{len(queries)}, {self.config.index_n_heads}]")
        result |= self._pages()
        return result | {"notes": tuple(notes)}

    def _queries(self) -> Tensor:
        tokens = self.x.shape[0]
        if "queries" not in self.trace:
            return torch.arange(self.start, self.start + tokens)
        queries = self.trace["queries"]
        if queries.dim() != 1 or queries.is_floating_point() or not len(queries):
            raise InputError(f"{self.where}.queries is {queries.dtype} {list(queries.shape)}, expected token positions")
        queries = queries.long()
        if int(queries.min()) < self.start or int(queries.max()) >= self.start + tokens:
            raise InputError(
                f"{self.where}.queries runs from {int(queries.min())} to {int(queries.max())}, expected positions in "
                f"{self.start}..{self.start + tokens - 1}"
            )
        return queries

    def _stage(self, name: str, tensor: Tensor, rows: int, mine: Tensor) -> Tensor:
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        entries = sum(self.counts)
        shapes = {"gate": (rows, heads), "scores": (rows, -1)}
        expected = shapes.get(name, (rows, heads, dim) if name in QUERY_STAGES else (entries, dim))
        if tensor.dtype not in _FLOATS:
            raise InputError(f"{self.where}.{name} has dtype {tensor.dtype}, expected a float type")
        if name == "scores":
            own = (self.start + self.bounds[self.chosen + 1] - self.bounds[self.chosen]) // WINDOW
            widths = {own, max(self.counts), entries} if len(self.bounds) > 2 else {own}
            if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] not in widths:
                raise InputError(
                    f"{self.where}.scores has shape {list(tensor.shape)}, expected {[rows, own]}: a column for every "
                    "entry so far"
                )
            first = sum(self.counts[: self.chosen]) if tensor.shape[1] == entries and len(self.bounds) > 2 else 0
            return tensor[mine][:, first : first + own]
        if tuple(tensor.shape) != expected:
            raise InputError(f"{self.where}.{name} has shape {list(tensor.shape)}, expected {list(expected)}")
        if name in KEY_STAGES:
            first = sum(self.counts[: self.chosen])
            return tensor[first : first + self.counts[self.chosen]]
        return tensor[mine]

    def _indices(self, name: str, rows: int) -> Tensor:
        tensor = self.trace[name]
        if tensor.dim() != 2 or tensor.is_floating_point() or tensor.shape[0] != rows:
            raise InputError(
                f"{self.where}.{name} is {tensor.dtype} {list(tensor.shape)}, expected integers [{rows}, places]"
            )
        return tensor.long()

    def _own(self, selected: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Selections counted from each request's own entry 0, and the rows that hold an entry of another request."""
        if len(self.bounds) == 2:
            return selected, torch.zeros(len(queries), dtype=torch.bool)
        bounds = torch.tensor(self.bounds)
        request = torch.bucketize(queries, bounds, right=True) - 1
        first = torch.tensor([0, *self.counts]).cumsum(0)[request]
        count = torch.tensor(self.counts)[request]
        held = selected >= 0

        def outside(offset: Tensor) -> Tensor:
            return held & ((selected < offset[:, None]) | (selected >= (offset + count)[:, None]))

        # entries are counted over all requests or within each: whichever leaves fewer outside
        ragged, own = outside(first), outside(torch.zeros_like(first))
        offset, wrong = (first, ragged) if int(ragged.sum()) < int(own.sum()) else (torch.zeros_like(first), own)
        return torch.where(held & ~wrong, selected - offset[:, None], -1), wrong.any(1)

    def _pages(self) -> dict[str, Any]:
        trace = self.trace
        if "pages" not in trace:
            return {}
        pages = trace["pages"]
        if pages.dtype not in (torch.uint8, torch.int8) or pages.dim() < 2:
            raise InputError(f"{self.where}.pages is {pages.dtype} {list(pages.shape)}, expected uint8 [pages, bytes]")
        pages = pages.view(torch.uint8).reshape(pages.shape[0], -1)
        entries = (self.start + self.bounds[self.chosen + 1] - self.bounds[self.chosen]) // WINDOW
        if "block_table" in trace:
            table = trace["block_table"].long()
            table = table[self.chosen] if table.dim() == 2 and len(self.bounds) > 2 else table.flatten()
            needed = -(-entries // 64)
            if len(table) < needed:
                raise InputError(f"{self.where}.block_table has {len(table)} pages, expected {needed} for {entries}")
            slots = table[torch.arange(entries) // 64] * 64 + torch.arange(entries) % 64
        elif "slots" in trace:
            slots = trace["slots"].long().flatten()
            first = sum(self.counts[: self.chosen])
            slots = slots[first : first + entries] if len(self.bounds) > 2 else slots
            if len(slots) != entries:
                raise InputError(f"{self.where}.slots has {len(slots)} entries, expected {entries}")
        else:
            slots = torch.arange(entries)
        return {"pages": pages, "slots": slots}


def _repeat(name: str) -> bool:
    return name.startswith(("observed_topk.", "observed_topk_", "topk.", "topk_"))
