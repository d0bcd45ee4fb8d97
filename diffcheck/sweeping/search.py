"""`diffcheck sweep`: plan, measure layer by layer, and gather the records.

In each layer the recipes go through the rungs of `halving` on all texts together. Cases are handed to the executor in
one fixed order and their results taken in the same order; finished ones are kept in a journal, so that an interrupted
sweep goes on where it stopped and a finished one costs nothing when it is asked for again. The inputs of the next
layers are read, or made, by threads while a layer is measured.

A budget is shared out among the layers that are left. Within its share a layer always measures all recipes on the
first rung; further rungs end when the share is used up. Layers for which nothing was left are not part of the result.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from ..journal import Journal
from ..run import device_of
from ..statistics import SEVERAL, resampling_groups
from .cases import LayerText, Rung
from .executors import Executor, make_executor
from .halving import rungs, survivors
from .ranking import Sample
from .space import Candidate, load_space
from .texts import Texts, plan_texts

OBJECTIVES = ("recall", "needle", "answers")
DEFAULT_ROWS, DEFAULT_HALVINGS, DEFAULT_FLOOR = 256, 2, 0.95
READERS = 8
"""Most threads that make inputs ahead of a GPU."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the command line asks for; see `diffcheck sweep --help`."""

    checkpoint: Path
    space: str = "default"
    layers: list[int] | None = None
    trace: Path | None = None
    request: int | None = None
    length: int | None = None
    texts: int | None = None
    rows: int = DEFAULT_ROWS
    halvings: int = DEFAULT_HALVINGS
    objective: str = "recall"
    floor: float = DEFAULT_FLOOR
    budget: float | None = None
    executor: str = "local"
    run_dir: Path | None = None
    resume: bool = False
    device: str = "auto"
    seed: int = 0
    made_from: str | None = None
    """What the trace is made from, where each command makes it anew: stands for the file when a sweep is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """A validated sweep: what is measured, and on how many rows after each rung."""

    options: SweepOptions
    texts: Texts
    candidates: list[Candidate]
    sizes: list[int]
    device: str


@dataclass(slots=True, kw_only=True)
class Measured:
    """Records by candidate: `recall` and `plain` [recipes, layers, rows of all texts], `needles` [recipes, 1, needles]
    or None without any; where the rows are (text, position); layers that are complete; how long it took."""

    layers: tuple[int, ...]
    recall: Sample
    plain: Sample
    needles: Sample | None
    where: list[tuple[int, int]] = field(repr=False)
    seconds: float = 0.0
    measured_cases: int = 0
    kept_cases: int = 0
    notes: list[str] = field(default_factory=list)


def plan(options: SweepOptions) -> SweepPlan:
    """Validate everything against the checkpoint; InputError or EnvironmentMissing says what is wrong."""
    o = options
    # a driver needs no GPU of its own where a cluster has some
    device = o.device if o.executor == "ray" and o.device == "cuda" else device_of(o.device)
    if o.objective not in OBJECTIVES:
        raise InputError(f"--objective: {o.objective!r}, expected {', '.join(OBJECTIVES)}")
    if not 0 <= o.floor <= 1:
        raise InputError(f"--floor: {o.floor}, expected 0 to 1")
    if o.halvings < 0:
        raise InputError(f"--halvings: {o.halvings}, expected 0 or more")
    if o.budget is not None and not 0 < o.budget < float("inf"):
        raise InputError(f"--budget: {o.budget}, expected minutes above 0")
    if o.resume and o.run_dir is None:
        raise InputError("--resume goes on with the records of --run-dir DIR, expected that too")
    texts = plan_texts(
        o.checkpoint, layers=o.layers, trace=o.trace, request=o.request, length=o.length, texts=o.texts, rows=o.rows,
        seed=o.seed, made_from=o.made_from,
    )  # fmt: skip
    found = load_space(o.space, texts.checkpoint.config)
    rows = max(len(texts.positions(text)) for text in range(texts.count))
    return SweepPlan(options=o, texts=texts, candidates=found, sizes=rungs(rows, o.halvings), device=device)


def identity(todo: SweepPlan) -> dict[str, Any]:
    """What must be equal for old records to be worth keeping."""
    return todo.texts.fingerprint | {
        "recipes": {c.name: c.recipe.to_json() for c in todo.candidates},
        "rungs": todo.sizes,
        "objective": todo.options.objective,
        "device": todo.device,
    }


def execute(todo: SweepPlan, say: Say) -> Measured:
    """Measure, keeping records in the run directory if there is one."""
    o = todo.options
    executor = make_executor(o.executor, todo.device)
    journal = Journal.open(o.run_dir, identity=identity(todo), resume=o.resume) if o.run_dir else None
    try:
        with journal or nullcontext(), _Reader(todo) as reader:
            search = _Search(todo, executor, reader, journal, say)
            search.run()
            return search.measured()
    finally:
        executor.close()


class _Reader:
    """Loads layers in threads, a few ahead."""

    def __init__(self, todo: SweepPlan) -> None:
        texts, cores = todo.texts, len(os.sched_getaffinity(0))
        config = texts.checkpoint.config
        # made-up inputs take three times their own size while they are made
        size = 6 * max(texts.lengths) * (config.hidden_size + config.q_lora_rank)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        fits = max(1, int(memory // 4 // size))
        count = min(READERS, cores // 2, fits) if todo.device == "cuda" and texts.trace is None else 1
        self.ahead = max(1, count)
        self._threads = torch.get_num_threads()
        own = max(1, cores // self.ahead) if self.ahead > 1 else self._threads
        self._pool = ThreadPoolExecutor(self.ahead, initializer=torch.set_num_threads, initargs=(own,))
        self._texts = texts
        self._coming: dict[tuple[int, int], Future[LayerText]] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def expect(self, layer: int, text: int) -> None:
        """It will be asked for soon."""
        if (layer, text) not in self._coming:
            self._coming[layer, text] = self._pool.submit(self._texts.load, layer, text)

    def take(self, layer: int, text: int) -> LayerText:
        """A layer on a text."""
        self.expect(layer, text)
        return self._coming.pop((layer, text)).result()


class _Search:
    """The state of a sweep: the layers that are open, and all records so far."""

    def __init__(self, todo: SweepPlan, executor: Executor, reader: _Reader, journal: Journal | None, say: Say) -> None:
        self.todo, self.executor, self.reader, self.journal, self.say = todo, executor, reader, journal, say
        self.records: dict[tuple[int, int, int, int], dict[str, Any]] = {}
        self.began = time.monotonic()
        budget = todo.options.budget
        self.deadline = float("inf") if budget is None else self.began + 60 * budget
        self.complete: list[int] = []
        self.fresh = self.kept = 0
        self.notes: list[str] = []

    def run(self) -> None:
        """Go through all layers."""
        coming = deque(self.todo.texts.layers)
        open_layers: deque[_OpenLayer] = deque()
        while coming or open_layers:
            while coming and len(open_layers) < self.executor.ahead:
                if time.monotonic() >= self.deadline:
                    break
                for number in list(coming)[: 1 + self.reader.ahead]:
                    self._expect(number)
                open_layers.append(_OpenLayer(self, coming.popleft()))
            if not open_layers:
                self.notes.append(f"the budget was used up before layer {', '.join(map(str, coming))}")
                return
            layer = open_layers.popleft()
            left = self.deadline - time.monotonic()
            share = left / (1 + len(open_layers) + len(coming))
            if layer.finish(time.monotonic() + share):
                self.complete.append(layer.layer)

    def _expect(self, layer: int) -> None:
        for text in range(self.todo.texts.count):
            if any(not self.known(layer, text, 0, c) for c in range(len(self.todo.candidates))):
                self.reader.expect(layer, text)

    def key(self, layer: int, text: int, rung: int, candidate: int) -> str:
        """A case's name in the journal."""
        return f"layer {layer} text {text} rung {rung} {self.todo.candidates[candidate].name}"

    def known(self, layer: int, text: int, rung: int, candidate: int) -> bool:
        """Whether the journal has a case."""
        return self.journal is not None and self.key(layer, text, rung, candidate) in self.journal.records

    def keep(self, layer: int, text: int, rung: int, candidate: int, record: dict[str, Any]) -> None:
        """Take a result, once."""
        if self.known(layer, text, rung, candidate):
            self.kept += 1
        else:
            self.fresh += 1
            if self.journal is not None:
                self.journal.append(self.key(layer, text, rung, candidate), record)
        self.records[layer, text, rung, candidate] = record

    def measured(self) -> Measured:
        """All records of complete layers as arrays."""
        texts = self.todo.texts
        layers = tuple(self.complete)
        if not layers:
            raise InputError(
                "--budget: not enough for the first rung of one layer; raise it, or --rows or recipes down"
            )
        recall, plain, needles = self.arrays(layers)
        groups = self.row_groups()
        where = [(t, int(p)) for t in range(texts.count) for p in texts.positions(t)]
        sample = None
        if needles is not None:
            values, owners = needles
            sample = Sample(values=values[:, None], groups=needle_groups(owners))
        return Measured(
            layers=layers, recall=Sample(values=recall, groups=groups), plain=Sample(values=plain, groups=groups),
            needles=sample, where=where, seconds=time.monotonic() - self.began, measured_cases=self.fresh,
            kept_cases=self.kept, notes=self.notes,
        )  # fmt: skip

    def row_groups(self) -> np.ndarray:
        """What is resampled together, for the rows of all texts."""
        sizes = [len(self.todo.texts.positions(text)) for text in range(self.todo.texts.count)]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        return resampling_groups(len(owners), sequences=owners, block=int(np.ceil(np.sqrt(max(sizes)))))

    def arrays(self, layers: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """(tie-tolerant recall, plain recall) [recipes, layers, rows]; needles [recipes, needles] with their texts."""
        texts, k = self.todo.texts, self.todo.texts.checkpoint.config.index_topk
        sizes = [len(texts.positions(text)) for text in range(texts.count)]
        first = np.concatenate([[0], np.cumsum(sizes)])
        count = len(self.todo.candidates)
        tied, plain = (np.full((count, len(layers), first[-1]), np.nan) for _ in range(2))
        kept: dict[tuple[int, int], list[tuple[int, list[bool], list[bool]]]] = {}
        for (layer, text, _, candidate), record in self.records.items():
            if layer not in layers:
                continue
            rows = first[text] + np.asarray(record["rows"], np.int64)
            tied[candidate, layers.index(layer), rows] = np.asarray(record["hits_tied"]) / k
            plain[candidate, layers.index(layer), rows] = np.asarray(record["hits"]) / k
            if record.get("needles_had"):
                found = kept.setdefault((layer, text), [])
                found.append((candidate, record["needles_kept"], record["needles_had"]))
        parts, owners = [], []
        for (_, text), found in sorted(kept.items()):
            had = np.asarray(found[0][2], bool)
            part = np.full((count, int(had.sum())), np.nan)
            for candidate, keeps, _ in found:
                part[candidate] = np.asarray(keeps, np.float64)[had]
            parts.append(part)
            owners += [text] * int(had.sum())
        return tied, plain, (np.concatenate(parts, axis=1), np.asarray(owners)) if owners else None


def needle_groups(owners: np.ndarray) -> np.ndarray:
    """What is resampled together of needles, given their texts; those of few texts lie far apart and count singly."""
    return owners if len(np.unique(owners)) >= SEVERAL else np.arange(len(owners))


class _OpenLayer:
    """A layer whose cases are being measured, rung by rung."""

    def __init__(self, search: _Search, layer: int) -> None:
        self.search, self.layer, self.rung = search, layer, 0
        self.alive = list(range(len(search.todo.candidates)))
        self.shared: dict[int, Any] = {}
        self.began = time.monotonic()
        self.waited = 0.0
        self.said: list[str] = []
        self.pending: deque[tuple[int, int, Any]] = deque()
        self._submit()

    def _submit(self) -> None:
        s, sizes = self.search, self.search.todo.sizes
        whole = Rung(first=sizes[self.rung - 1] if self.rung else 0, last=sizes[self.rung], needles=self.rung == 0)
        for text in range(s.todo.texts.count):
            for candidate in self.alive:
                handle = None
                if not s.known(self.layer, text, self.rung, candidate):
                    if text not in self.shared:
                        self.shared[text] = s.executor.share(self._inputs(text))
                    handle = s.executor.submit(self.shared[text], s.todo.candidates[candidate].recipe, whole)
                self.pending.append((text, candidate, handle))

    def _inputs(self, text: int) -> LayerText:
        asked = time.monotonic()
        given = self.search.reader.take(self.layer, text)
        self.waited += time.monotonic() - asked
        return given

    def finish(self, deadline: float) -> bool:
        """Measure to the end, or until the deadline once the first rung is done; whether that rung is complete."""
        s = self.search
        while True:
            count = len(self.alive)
            stopped = not self._collect(deadline if self.rung else s.deadline)
            self.said.append(f"{count} on {s.todo.sizes[self.rung]} rows{' (stopped: budget)' if stopped else ''}")
            if stopped or self.rung + 1 == len(s.todo.sizes):
                break
            self.alive = self._survivors()
            self.rung += 1
            self._submit()
        for _, _, handle in self.pending:
            if handle is not None:
                s.executor.cancel(handle)
        self.shared.clear()
        took = f"{time.monotonic() - self.began:.1f} s, {self.waited:.1f} of them waiting for inputs"
        s.say(f"layer {self.layer}: {', '.join(self.said)}; {took}")
        return not (stopped and self.rung == 0)

    def _collect(self, deadline: float) -> bool:
        """Take the results of this rung in order; False if the deadline came first."""
        s = self.search
        while self.pending:
            text, candidate, handle = self.pending[0]
            if handle is None:
                assert s.journal is not None, "only a journal knows cases before they run"
                record = s.journal.records[s.key(self.layer, text, self.rung, candidate)]
            elif time.monotonic() >= deadline:
                return False
            else:
                record = s.executor.result(handle)
            self.pending.popleft()
            s.keep(self.layer, text, self.rung, candidate, record)
        return True

    def _survivors(self) -> list[int]:
        """Who is measured on more rows, by the records of this layer."""
        s = self.search
        tied, _, needles = s.arrays((self.layer,))
        sample = Sample(values=tied, groups=s.row_groups())
        if s.todo.options.objective == "needle" and needles is not None:
            values, owners = needles
            sample = Sample(values=values[:, None], groups=needle_groups(owners))
        costs = [s.todo.candidates[c].bytes for c in self.alive]
        part = Sample(values=sample.values[self.alive], groups=sample.groups)
        return [self.alive[i] for i in survivors(costs, part.estimates.tolist(), part.chances(costs).tolist())]
