"""`diffcheck run`: plan first, then execute.

`plan` does everything that can fail on bad input (names, layers, gates, trace shapes, tensors' headers) and reads no
weight; `execute` then goes through the layers. Per layer one pipeline serves all cases, so a precision or a theta
costs only the stages that it changes.

A case that runs out of memory is tried once more with nothing else in memory, and then recorded as failed. With a
journal every finished case is kept as soon as it is done, and what the journal has already is not run again. An
interrupt ends `execute` early with what is finished.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .backends import Backend, Chain, find_backend
from .cases import DEFAULT_PRECISIONS, DEFAULT_THETAS, Case, build_cases
from .checkpoint.layer import Checkpoint
from .compare import Targets, compare
from .digests import tensor_digest
from .errors import EnvironmentMissing, InputError
from .exhausted import out_of_memory, release
from .inputs.source import LayerInputs, choose_queries, load_inputs
from .inputs.synthetic import check_needle_options, synthetic_inputs
from .journal import Journal
from .metrics import counted_rows
from .pipeline import Pipeline
from .probes import probe_topk
from .recipe import Recipe, plain
from .refimpl import IndexerWeights

DEFAULT_QUERIES = 256
SYNTHETIC_LENGTH_IN_TOPK = 16
"""Default length of made-up inputs in units of index_topk: four times where selection starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for; see `diffcheck run --help`."""

    checkpoint: Path
    layers: list[int] | None = None
    precisions: list[str] = field(default_factory=lambda: list(DEFAULT_PRECISIONS))
    thetas: list[str] = field(default_factory=lambda: list(DEFAULT_THETAS))
    recipe_files: list[Path] = field(default_factory=list)
    backend: str = "auto"
    length: int | None = None
    queries: int | None = None
    trace: Path | None = None
    request: int | None = None
    needle_depth: float | None = None
    needle_strength: float | None = None
    device: str = "auto"
    seed: int = 0
    source: str | None = None
    """What the inputs are going to be, where they are not made yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A validated run: nothing here can fail on the user's input any more."""

    options: Options
    checkpoint: Checkpoint
    layers: tuple[int, ...]
    cases: list[Case]
    device: str
    backend: Backend | None
    inputs: dict[int, LayerInputs] | None
    trace: Path | None = None
    """Where the inputs are from, None for made-up ones."""
    length: int
    source: str
    notes: list[str]
    bytes_to_read: int
    """Bytes of weights that the run reads."""

    @property
    def queries(self) -> int:
        """How many query rows are compared, unless there are more needles."""
        return min(self.options.queries or DEFAULT_QUERIES, self.length)

    def case_names(self) -> list[dict[str, Any]]:
        """What tells the cases apart, in the order in which they run."""
        return [_name(layer, case) for layer in self.layers for case in self.cases]


def plan(options: Options) -> Plan:
    """Validate the options against the checkpoint; InputError or EnvironmentMissing says what is wrong."""
    device = device_of(options.device)
    backend = None if options.backend == "auto" else find_backend(options.backend)
    if options.queries is not None and options.queries < 1:
        raise InputError(f"--queries: {options.queries}, expected at least 1")
    if options.length is not None and options.length < 4:
        raise InputError(f"--length: {options.length}, expected at least 4 tokens (one compressed entry)")
    if options.trace is not None and options.length is not None:
        raise InputError("--length and --trace exclude each other: a trace has its own length")
    checkpoint = Checkpoint(options.checkpoint)
    layers = checkpoint.select(options.layers)
    cases = build_cases(checkpoint.config, options.precisions, options.thetas, options.recipe_files)
    if backend is not None and (reason := backend.unavailable(device)):
        raise EnvironmentMissing(f"backend {options.backend}: {reason}")
    notes = []
    if checkpoint.absent_layers and options.layers is None:
        absent = ", ".join(map(str, checkpoint.absent_layers))
        notes.append(f"indexer layers without tensors in this checkpoint, left out: {absent}")
    trace = options.trace
    if trace is None and options.length is None and (checkpoint.directory / "trace.safetensors").is_file():
        trace = checkpoint.directory / "trace.safetensors"
    inputs = None
    if trace is None and options.request is not None:
        raise InputError("--request chooses one of a trace's requests, expected --trace")
    if trace is not None:
        if options.needle_depth is not None or options.needle_strength is not None:
            raise InputError(
                "--needle-depth and --needle-strength plant into made-up inputs; leave out the trace or give --length"
            )
        inputs = load_inputs(
            trace, checkpoint.config, list(layers), strict=options.layers is not None, request=options.request
        )
        missing = [layer for layer in layers if layer not in inputs]
        if missing:
            notes.append(f"layers that the trace does not hold, left out: {', '.join(map(str, missing))}")
        layers = tuple(layer for layer in layers if layer in inputs)
        first = inputs[layers[0]]
        length, source = len(first.x), f"trace {trace} ({first.source or 'no source given'})"
        notes += [f"layer {layer}: {note}" for layer in layers for note in inputs[layer].notes]
        if options.request is not None and all(inputs[layer].mass is None for layer in layers):
            notes.append("lost attention mass: absent, it is known only where a forward pass ran one text")
    else:
        length = options.length or SYNTHETIC_LENGTH_IN_TOPK * checkpoint.config.index_topk
        source = options.source or f"made-up hidden states, seed {options.seed}"
        check_needle_options(checkpoint.config, length, options.needle_depth, options.needle_strength)
    if options.queries is not None and options.queries > length:
        raise InputError(f"--queries: {options.queries} for {length} tokens, expected at most one a token")
    # reads the headers, which checks every tensor's name, type and shape
    bytes_to_read = sum(checkpoint.bytes_needed(layer) for layer in layers)
    return Plan(
        options=options, checkpoint=checkpoint, layers=layers, cases=cases, device=device, backend=backend,
        inputs=inputs, trace=trace, length=length, source=source, notes=notes, bytes_to_read=bytes_to_read,
    )  # fmt: skip


def device_of(name: str) -> str:
    """Either "cpu" or "cuda", for auto, cpu or cuda; InputError for another, EnvironmentMissing without the GPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissing("--device cuda: torch sees no CUDA device here")
    return "cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run measured: cases as plain records, and how many stage evaluations sharing saved."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    stages_asked: int = 0
    stages_computed: int = 0
    seconds: float = 0.0
    needles: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What the cases of a layer share: digests of its weights and inputs, and the positions of the rows that count."""
    partial: bool = False
    """Interrupted: cases are missing."""

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The cases that could not be measured here."""
        return [case for case in self.cases if case["verdict"] == "failed"]


class Progress(Protocol):
    """Told what happens: `doing` before something that takes a while, `done` after each case."""

    def doing(self, line: str) -> None:
        """Something slow begins."""

    def done(self, line: str) -> None:
        """One more case is done."""


def execute(todo: Plan, progress: Progress, journal: Journal | None = None) -> Outcome:
    """Run all cases of a plan, but those that the journal has; a KeyboardInterrupt makes the outcome partial."""
    outcome, began = Outcome(), time.perf_counter()
    try:
        for layer in todo.layers:
            for record in _run_layer(todo, layer, outcome, progress, journal):
                outcome.cases.append(record)
        if todo.device == "cuda" and isinstance(todo.backend, Chain):
            outcome.probes = _probe(todo, todo.backend)
    except KeyboardInterrupt:
        outcome.partial = True
    outcome.seconds = time.perf_counter() - began
    return outcome


def kept(todo: Plan, journal: Journal) -> int:
    """How many of the plan's cases a journal has."""
    return sum(_key(layer, case) in journal.records for layer in todo.layers for case in todo.cases)


def _key(layer: int, case: Case) -> str:
    return f"layer {layer} {case.key}"


def _probe(todo: Plan, chain: Chain) -> list[dict[str, Any]]:
    """Probes of the selection kernel that ran, if it is not the emulation's."""
    config = todo.checkpoint.config
    recipe = next((c.recipe for c in todo.cases if not chain.refusal(c.recipe, config)), None)
    if recipe is None:
        return []
    kernels = chain.part("topk", recipe, config)
    return [] if kernels.name == "emulated" else probe_topk(kernels, config.index_topk, todo.device)


def _run_layer(
    todo: Plan, layer: int, outcome: Outcome, progress: Progress, journal: Journal | None
) -> Iterator[dict[str, Any]]:
    """Records of a layer's cases in order; those of the journal as they are."""
    found = {} if journal is None else journal.records
    shared = f"layer {layer}"
    if shared in found and all(_key(layer, case) in found for case in todo.cases):
        _share(outcome, layer, found[shared])
        yield from (found[_key(layer, case)] for case in todo.cases)
        return
    progress.doing(f"layer {layer}: inputs and reference")
    reason = None
    try:
        pipeline, targets, common = _set_up(todo, layer)
    except (MemoryError, RuntimeError) as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
    if reason is None:
        _share(outcome, layer, common)
        if journal is not None and shared not in found:
            journal.append(shared, common)
    for case in todo.cases:
        key = _key(layer, case)
        if key in found:
            yield found[key]
            continue
        if reason is None:
            record = _survive(todo, layer, case, pipeline, targets)
        else:
            record = _describe(todo, layer, case) | _failed(f"the reference ran {reason}")
        if journal is not None and record["verdict"] != "failed":
            journal.append(key, record)
        yield record
        progress.done(f"layer {layer} {record['precision']} theta {record['theta_setting']}: {record['verdict']}")
    if reason is None:
        asked, computed = pipeline.savings()
        outcome.stages_asked += asked
        outcome.stages_computed += computed
    else:
        release()


def _share(outcome: Outcome, layer: int, common: dict[str, Any]) -> None:
    outcome.layers[layer] = {name: common[name] for name in ("weights", "inputs", "rows")}
    outcome.needles[layer] = common["needles"]
    outcome.notes += common["notes"]


def layer_inputs(todo: Plan, layer: int) -> tuple[IndexerWeights, LayerInputs]:
    """Weights and inputs of a layer of the plan, on the CPU; InputError for a trace that does not begin at token 0."""
    config = todo.checkpoint.config
    weights = todo.checkpoint.load(layer)
    if todo.inputs is not None:
        inputs = todo.inputs[layer]
    else:
        o = todo.options
        inputs = synthetic_inputs(
            config,
            weights,
            length=todo.length,
            seed=o.seed + layer,
            depth=o.needle_depth,
            strength=o.needle_strength,
        )
    if inputs.start:
        raise InputError(
            f"the trace of layer {layer} starts at token {inputs.start}, expected 0: `run` begins a stream"
        )
    return weights, inputs


def _set_up(todo: Plan, layer: int) -> tuple[Pipeline, Targets, dict[str, Any]]:
    """The pipeline and targets of a layer, and what its cases share, as plain values."""
    config, device = todo.checkpoint.config, todo.device
    weights, inputs = layer_inputs(todo, layer)
    must = [needle.query for needle in inputs.needles]
    queries, mass = _rows(inputs, config.index_topk, todo, must)
    pipeline = Pipeline(
        config, weights.to(device), inputs.x.to(device), inputs.qr.to(device), queries=queries.to(device)
    )
    targets = Targets.of(pipeline, inputs.needles, mass)
    common = {
        "weights": tensor_digest(*(getattr(weights, name) for name in weights.__dataclass_fields__)),
        "inputs": made_up(todo) if todo.inputs is None else tensor_digest(inputs.x, inputs.qr),
        "rows": pipeline.queries[counted_rows(targets.visible, targets.k)].tolist(),
        "needles": [
            {"query": n.query, "first_token": n.first_token, "last_token": n.last_token} for n in inputs.needles
        ],
        # notes on a trace are in the plan
        "notes": [] if todo.inputs is not None else [f"layer {layer}: {note}" for note in inputs.notes],
    }
    return pipeline, targets, common


def made_up(todo: Plan) -> str:
    """What decides made-up hidden states; their last bits may differ between machines."""
    o = todo.options
    return f"made-up, {todo.length} tokens, seed {o.seed}, needle depth {o.needle_depth}, strength {o.needle_strength}"


def _survive(todo: Plan, layer: int, case: Case, pipeline: Pipeline, targets: Targets) -> dict[str, Any]:
    """The case's record; a failed one where even an empty memory is too small for it."""
    reason = None
    for _ in range(2):
        try:
            return _run_case(todo, layer, case, pipeline, targets)
        except (MemoryError, RuntimeError) as error:
            reason = out_of_memory(error)
            if reason is None:
                raise
        # outside the handler, whose traceback holds the frames and so their tensors
        pipeline.forget()
        release()
    assert reason is not None, "a case either returns or runs out of memory"
    return _describe(todo, layer, case) | _failed(reason)


def _failed(reason: str) -> dict[str, Any]:
    return {"verdict": "failed", "reason": reason, "nonfinite": []}


def _rows(inputs: LayerInputs, k: int, todo: Plan, must: list[int]) -> tuple[Tensor, Tensor | None]:
    """Positions of the query rows to compare, and their attention mass [rows, E], NaN for a row without.

    Unless a number of rows was asked for, they are those that have their mass.
    """
    if inputs.mass is None or inputs.mass_queries is None:
        return choose_queries(len(inputs.x), k, todo.queries, must), None
    queries = torch.cat((inputs.mass_queries, torch.tensor(must, dtype=torch.int64))).unique()
    if todo.options.queries is not None:
        queries = choose_queries(len(inputs.x), k, todo.queries, must)
    mass = torch.full((len(queries), inputs.mass.shape[1]), torch.nan)
    row_of = {int(position): row for row, position in enumerate(inputs.mass_queries)}
    for row, position in enumerate(queries.tolist()):
        if position in row_of:
            mass[row] = inputs.mass[row_of[position]]
    return queries, mass


def _name(layer: int, case: Case) -> dict[str, Any]:
    return {
        "layer": layer,
        "precision": case.precision,
        "theta": case.recipe.k_theta,
        "theta_setting": case.theta.label,
        "what_if": case.what_if,
    }


def _describe(todo: Plan, layer: int, case: Case) -> dict[str, Any]:
    """What a case is, before anything is measured."""
    recipe = case.recipe
    return _name(layer, case) | {
        "backend": (todo.backend or automatic_backend(recipe, todo)).name,
        "length": todo.length,
        "k": recipe.k,
        "replaced": {n: plain(v) for n, v in recipe.differences(Recipe.reference(todo.checkpoint.config)).items()},
    }


def _run_case(todo: Plan, layer: int, case: Case, pipeline: Pipeline, targets: Targets) -> dict[str, Any]:
    began, recipe = time.perf_counter(), case.recipe
    backend = todo.backend or automatic_backend(recipe, todo)
    record = _describe(todo, layer, case)
    reason = backend.refusal(recipe, todo.checkpoint.config)
    if reason:
        return record | {"verdict": "refused", "reason": reason, "nonfinite": []}
    trace = backend.run(pipeline, recipe)
    record |= compare(pipeline, recipe, trace, targets)
    record["steps"] = backend.judge(pipeline, recipe, trace) if isinstance(backend, Chain) else None
    return record | {"reason": None, "seconds": time.perf_counter() - began}


def automatic_backend(recipe: Recipe, todo: Plan) -> Backend:
    """The fused kernels on CUDA where they can run the recipe, else the emulation."""
    fused = find_backend("triton")
    usable = (
        todo.device == "cuda" and not fused.unavailable("cuda") and not fused.refusal(recipe, todo.checkpoint.config)
    )
    return fused if usable else find_backend("emulated")
