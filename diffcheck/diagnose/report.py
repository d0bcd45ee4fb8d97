"""The whole command: read, diagnose layer by layer, and say it in words and as JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.layer import Checkpoint
from ..refimpl.compressor import WINDOW
from .census import Breach
from .engine import Engine
from .evidence import Evidence, declared_recipe, read_trace
from .selection import unrepeatable
from .verdict import Finding, findings_of

if TYPE_CHECKING:
    from rich.console import Console

    from ..recipe import Recipe

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiagnosis:
    """One layer: findings, notes, what was observed and how much of each stage is unequal to its prediction."""

    layer: int
    findings: list[Finding]
    notes: list[str]
    observed: list[str]
    unequal: dict[str, float]
    rows: int
    entries: int
    selective: int
    base: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All layers of a trace."""

    checkpoint: str
    trace: str
    declared: str | None
    layers: list[LayerDiagnosis]
    notes: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Findings of all layers."""
        return [finding for layer in self.layers for finding in layer.findings]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": self.checkpoint,
            "trace": self.trace,
            "declared": self.declared,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes + [f"layer {x.layer}: {note}" for x in self.layers for note in x.notes],
            "layers": [
                {
                    "layer": x.layer, "compared_with": x.base, "observed": x.observed, "unequal": x.unequal,
                    "rows": x.rows, "entries": x.entries, "rows_that_select": x.selective, "seconds": x.seconds,
                }
                for x in self.layers
            ],
        }  # fmt: skip


def diagnose(
    checkpoint: str | Path, trace: str | Path, *, layers: list[int] | None = None, recipe: str | None = None
) -> Diagnosis:
    """Diagnose a trace file against a checkpoint directory.

    layers: all that the trace holds by default. recipe: a precision, preset or TOML file that the deployment says it
    runs; by default what the trace's metadata says, else nothing. InputError for input that does not fit.
    """
    opened = Checkpoint(checkpoint)
    found, metadata = read_trace(Path(trace), opened, layers)
    declared = declared_recipe(recipe, metadata, opened.config)
    return Diagnosis(
        checkpoint=str(checkpoint),
        trace=str(trace),
        declared=declared.name if declared else None,
        layers=[diagnose_layer(evidence, declared) for evidence in found],
    )


def diagnose_layer(evidence: Evidence, declared: Recipe | None) -> LayerDiagnosis:
    """Diagnose one layer."""
    began = time.perf_counter()
    with torch.no_grad():
        engine = Engine(evidence, declared)
        engine.run()
        foreign, rows = evidence.foreign
        if foreign:
            engine.breaches.append(Breach(stage="topk", cause="cross_request", failed=foreign, rows=rows))
        findings, notes = findings_of(engine)
    selective = int(((evidence.queries + 1) // WINDOW > engine.reference.k).sum())
    if evidence.repeats and evidence.selected is not None:
        changed = unrepeatable(evidence.selected, evidence.repeats)
        notes.append(f"repeated runs: {changed} of {len(evidence.queries)} rows select another set")
    if not selective:
        notes.append("no query sees more entries than are selected: no fault could change a selection here")
    return LayerDiagnosis(
        layer=evidence.layer, findings=findings, notes=[*evidence.notes, *notes], observed=evidence.names,
        unequal=engine.unequal, rows=len(engine.rows), entries=evidence.entries, selective=selective,
        base=engine.base.name, seconds=time.perf_counter() - began,
    )  # fmt: skip


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the verdict: a sentence for each finding, then what was compared and the notes."""
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(f"checkpoint {diagnosis.checkpoint}")
    line(f"trace      {diagnosis.trace}")
    line(f"recipe     {diagnosis.declared or 'none declared: compared with the reference'}")
    for note in diagnosis.notes:
        line(f"note: {note}", "dim")
    for layer in diagnosis.layers:
        observed = ", ".join(layer.observed) or "nothing"
        line("")
        line(f"layer {layer.layer}: {layer.rows} query rows, {layer.entries} entries; observed {observed}")
        for finding in layer.findings:
            line(finding.sentence, "red")
            line(f"  {_confidence(finding)}", "dim")
        if not layer.findings:
            line(f"layer {layer.layer}: no fault found", "green")
        for note in layer.notes:
            line(f"note: {note}", "dim")


def _confidence(f: Finding) -> str:
    text = f"{f.rows} rows compared, {f.rows_affected} differ"
    if f.explained_ci:
        text += f"; explained share {f.explained_ci[0]:.3f} to {f.explained_ci[1]:.3f} (95 % over rows)"
    return text
