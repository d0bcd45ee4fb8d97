"""What a checkpoint directory is, and what is wrong with it, from its config and the headers of its shards.

`inspect_checkpoint` answers three questions that decide whether a deployment's numbers can be right before
any is computed: which layers have an indexer; where each config value came from and what a careless reader
would make of it (`traps`); and whether every tensor is where it should be. Coverage is counted per layer and
group of tensors (indexer, attention, hyper-connections, feed-forward), and index and shards are held against
each other both ways.

A problem is a `Finding`, so that one run shows all of them: an *error* is one for which `run` would refuse a
layer or compute garbage from it, everything else is a *warning*. `fault` numbers known ways of failing: 18
scale bytes taken as numbers, 19 another index_topk than the checkpoint's, 20 tensors missing, unmapped, or in
a missing shard.

Only headers are read, and of each indexer its scales and one block of rows. A path, config or index that
cannot be used at all raises InputError, as for `run`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from diffcheck.refimpl import InputError
from diffcheck.refimpl.config import CONFIG_FIELDS, INDEXER_RATIO
from diffcheck.refimpl.config_json import read_json

from .layer import Checkpoint
from .names import GROUPS, canonical_name, expected_in_layer, is_mapped, split_layer
from .shard import Entry, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

CAUSES = {18: "scale_bytes", 19: "k", 20: "unknown"}
"""Ids of the numbered faults; tensors that are not where they should be can do anything."""
_SHOWN = 3
"""Names quoted in a finding; the rest is counted."""
_QUANTISED = ("F8_E4M3", "I8", "F4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong: severity "error" or "warning", the known fault it matches or None, one line."""

    severity: str
    fault: int | None
    message: str

    @property
    def cause(self) -> str | None:
        """The id under which `diagnose` knows the fault; None where it has no number."""
        return None if self.fault is None else CAUSES[self.fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValue:
    """One value of the config and where it came from."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCoverage:
    """One layer's tensors.

    indexer is "none" (not that ratio), "complete", "partial" or "absent"; groups has for each group the
    tensors there and expected, scales not counted; bytes_needed is what `run` reads of it, 0 when `run` would
    refuse.
    """

    layer: int
    ratio: int
    indexer: str
    groups: Mapping[str, tuple[int, int]]
    bytes_needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file: number of tensors and bytes of data, by its header; None for both when it cannot be read."""

    file: str
    tensors: int | None
    nbytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Everything `inspect` prints; source is where the index came from, ignored counts draft tensors."""

    directory: str
    source: str
    config: tuple[ConfigValue, ...]
    traps: tuple[str, ...]
    layers: tuple[LayerCoverage, ...]
    shards: tuple[Shard, ...]
    unmapped: tuple[str, ...]
    ignored: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which `run` would refuse a layer or compute garbage."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types only, with the fields of this record and the cause of each finding."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for finding, entry in zip(self.findings, plain["findings"], strict=True):
            entry["cause"] = finding.cause
        return plain


class _Report:
    """Findings so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, message: str, *, error: bool, fault: int | None = 20) -> None:
        severity = "error" if error else "warning"
        self.findings.append(Finding(severity=severity, fault=fault, message=message))

    def add_names(self, what: str, names: Iterable[str]) -> None:
        """One finding for a set of tensor names; an error when any of an indexer is among them."""
        listed = sorted(set(names))
        if listed:
            # the indexer's first: those are the names that matter
            listed.sort(key=lambda name: ".indexer." not in name)
            error = ".indexer." in listed[0]
            self.add(f"{what}: {_some(listed)}", error=error)


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Read config, index and all headers of a checkpoint and say what is there and what is wrong.

    Raises InputError for a path, config.json or index that cannot be used; every other problem is a finding.
    """
    checkpoint = Checkpoint(path)
    config = checkpoint.config
    report = _Report()
    for trap in config.traps:
        # somebody may already run with another k; the plain note on code defaults stays a trap
        if "index_topk" in trap and ("contradicts" in trap or "published" in trap):
            report.add(trap, error=False, fault=19)
    present, shards, ignored = _read_headers(checkpoint, report)
    unmapped = sorted(name for name in present if not is_mapped(name))
    report.add_names("unmapped, no known tensor has this name", unmapped)
    _check_scales_present(present, report)
    layers = _cover_layers(checkpoint, present, report)
    if not checkpoint.indexer_layers or not checkpoint.present_layers:
        try:
            checkpoint.select()
        except InputError as error:
            report.add(str(error), error=True)
    return Inspection(
        directory=str(checkpoint.directory),
        source=checkpoint.index.source,
        config=tuple(
            ConfigValue(name=name, value=getattr(config, name), source=config.sources[name]) for name in CONFIG_FIELDS
        ),
        traps=config.traps,
        layers=layers,
        shards=shards,
        unmapped=tuple(unmapped),
        ignored=ignored,
        findings=tuple(sorted(report.findings, key=lambda finding: finding.severity)),
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _read_headers(checkpoint: Checkpoint, report: _Report) -> tuple[dict[str, Entry], tuple[Shard, ...], int]:
    """Canonical names that the shards really hold, the shards, and the number of draft tensors."""
    index = checkpoint.index
    by_file: dict[str, list[str]] = defaultdict(list)
    for places in index.locations.values():
        for place in places:
            by_file[place.file].append(place.name)
    present: dict[str, Entry] = {}
    shards = []
    ignored = 0
    for file in index.files:
        wanted = by_file[file]
        try:
            header = read_header(checkpoint.directory / file)
        except InputError as problem:
            report.add_names(f"{problem}; it should hold", wanted)
            if not wanted:
                report.add(str(problem), error=False)
            shards.append(Shard(file=file, tensors=None, nbytes=None))
            continue
        shards.append(Shard(file=file, tensors=len(header), nbytes=sum(entry.nbytes for entry in header.values())))
        report.add_names(f"{file} does not hold what {index.source} places there", set(wanted) - header.keys())
        report.add_names(
            f"{file} holds what {index.source} places in another shard",
            (name for name, _ in index.misplaced(file, header)),
        )
        unlisted = []
        for name, entry in header.items():
            canonical = canonical_name(name)
            if canonical is None:
                ignored += 1
            elif canonical not in index.locations:
                unlisted.append(name)
            else:
                present[canonical] = entry
        report.add_names(f"{file} holds what {index.source} does not list", unlisted)
    strays = {path.name for path in checkpoint.directory.glob("model*.safetensors")} - set(index.files)
    if strays and index.source != "headers":
        report.add(f"not named in {index.source}: {_some(sorted(strays))}", error=False)
    return present, tuple(shards), ignored


def _check_scales_present(present: Mapping[str, Entry], report: _Report) -> None:
    weights = {name: entry for name, entry in present.items() if name.endswith(".weight")}
    report.add_names(
        "quantised weight without a scale",
        (
            name
            for name, entry in weights.items()
            if entry.dtype in _QUANTISED and name.removesuffix("weight") + "scale" not in present
        ),
    )
    report.add_names(
        "scale without a weight",
        (name for name in present if name.endswith(".scale") and name.removesuffix("scale") + "weight" not in present),
    )


def _cover_layers(checkpoint: Checkpoint, present: Mapping[str, Entry], report: _Report) -> tuple[LayerCoverage, ...]:
    ratios = checkpoint.config.compress_ratios
    held: dict[int, set[str]] = defaultdict(set)
    for name in present:
        inside = split_layer(name)
        if inside:
            held[inside[0]].add(inside[1])
    beyond = sorted(layer for layer in held if layer >= len(ratios))
    if beyond:
        report.add(f"layers {_numbers(beyond)} are beyond the {len(ratios)} layers of the config", error=False)
    experts = _routed_experts(checkpoint)
    layers = []
    lacking: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for layer, ratio in enumerate(ratios):
        names = held[layer]
        groups = {}
        for group, expected in _expected(ratio, experts, names).items():
            missing = [name for name in expected if name not in names]
            groups[group] = (len(expected) - len(missing), len(expected))
            if len(missing) == len(expected):
                missing = ["all tensors"]
            elif group == "indexer":
                continue  # the check below names what a partial one lacks
            if missing and expected:
                lacking[group, tuple(missing)].append(layer)
        if ratio != INDEXER_RATIO and any(name.startswith("attn.indexer.") for name in names):
            report.add(f"layer {layer} has indexer tensors, but its compress ratio is {ratio}", error=False)
        state, nbytes = "none", 0
        if ratio == INDEXER_RATIO:
            state, nbytes = _check_indexer(checkpoint, layer, groups["indexer"], report)
        layers.append(LayerCoverage(layer=layer, ratio=ratio, indexer=state, groups=groups, bytes_needed=nbytes))
    for (group, absent), numbers in lacking.items():
        report.add(f"{group}: layers {_numbers(numbers)} lack {_some(list(absent))}", error=False)
    return tuple(layers)


def _check_indexer(checkpoint: Checkpoint, layer: int, count: tuple[int, int], report: _Report) -> tuple[str, int]:
    """State of one indexer and the bytes `run` would read of it."""
    if layer in checkpoint.absent_layers:
        return "absent", 0
    state = "complete" if count[0] == count[1] else "partial"
    try:
        nbytes = checkpoint.bytes_needed(layer)
        problem = checkpoint.scale_problem(layer)
    except InputError as error:
        report.add(str(error), error=True)
        return state, 0
    if problem:
        report.add(f"layer {layer} attn.indexer.wq_b: {problem}", error=True, fault=18)
    return state, nbytes


def _routed_experts(checkpoint: Checkpoint) -> int | None:
    count = read_json(checkpoint.directory / "config.json").get("n_routed_experts")
    return count if isinstance(count, int) and 0 <= count <= 4096 else None


def _expected(ratio: int, experts: int | None, names: set[str]) -> dict[str, tuple[str, ...]]:
    """`expected_in_layer` with the two choices that a layer's own names decide."""
    fused = "ffn.experts.gate_up_proj" in names
    if experts is None:
        # a config that does not say: as many as there are
        numbers = {name.split(".")[2] for name in names if name.startswith("ffn.experts.")}
        experts = len(numbers)
    expected = expected_in_layer(ratio, 0 if fused else experts)
    swap = {"ffn.gate.bias": "ffn.gate.tid2eid"} if "ffn.gate.tid2eid" in names else {}
    ffn = tuple(swap.get(name, name) for name in expected["ffn"])
    if fused:
        ffn += ("ffn.experts.gate_up_proj", "ffn.experts.down_proj")
    return {**expected, "ffn": ffn}


def _numbers(layers: list[int]) -> str:
    """Layer numbers, runs shortened: 2, 4-6."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def render(inspection: Inspection, console: Console) -> None:
    """Print an inspection: directory, config with sources, traps, layer map with coverage, findings."""
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    unread = sum(shard.tensors is None for shard in inspection.shards)
    tensors = sum(shard.tensors or 0 for shard in inspection.shards)
    size = sum(shard.nbytes or 0 for shard in inspection.shards)
    line(inspection.directory, "bold")
    line(
        f"{len(inspection.shards)} files by {inspection.source}, {unread} unreadable: "
        f"{tensors} tensors, {size / 1e9:.3g} GB; {inspection.ignored} of draft modules ignored, "
        f"{len(inspection.unmapped)} unmapped"
    )
    config = Table(title="Config", title_justify="left", box=None, header_style="bold")
    for column in ("value", "", "source"):
        config.add_column(column, overflow="fold")
    for value in inspection.config:
        if value.name != "compress_ratios":  # the layer map shows them
            config.add_row(Text(value.name), Text(_show(value.value)), Text(value.source))
        else:
            config.add_row(Text(value.name), Text(f"{len(value.value)} layers, below"), Text(value.source))
    console.print(config)
    for trap in inspection.traps:
        line(f"trap: {trap}", "yellow")
    layers = Table(title="Layers", title_justify="left", box=None, header_style="bold")
    for column in ("layer", "ratio", *GROUPS):
        layers.add_column(column, justify="left" if column == "indexer" else "right")
    for row in inspection.layers:
        counts = ["-" if not row.groups[group][1] else "{}/{}".format(*row.groups[group]) for group in GROUPS]
        state = "-" if row.indexer == "none" else f"{row.indexer} {counts[0]}"
        style = {"partial": "red", "absent": "yellow"}.get(row.indexer, "")
        layers.add_row(str(row.layer), str(row.ratio), Text(state, style=style), *counts[1:])
    console.print(layers)
    for finding in inspection.findings:
        known = f" (fault {finding.fault})" if finding.fault else ""
        line(
            f"{finding.severity}{known}: {finding.message}",
            "red" if finding.severity == "error" else "yellow",
        )
    if not inspection.findings:
        line("no findings", "green")


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if hasattr(value, "__dataclass_fields__"):
        return ", ".join(f"{key} {item:g}" for key, item in asdict(value).items())
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
