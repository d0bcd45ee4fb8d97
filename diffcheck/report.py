"""What a run prints and writes: the table, the summary in plain words, and the JSON document.

The table leads with what is lost (needles, survival by rank), then the overlap: with few relevant entries the tail of
the set is noise, so a Jaccard of 0.4 can be harmless, and one lost needle is fatal at 0.9.
"""

from __future__ import annotations

import math
import platform
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .gates import GateResult
from .invariants import MEANING
from .packages import installed_version
from .probes import describe
from .recipe import Recipe, plain
from .run import Outcome, Plan
from .version import __version__

SCHEMA_VERSION = 1
HEAD_BINS, TAIL_BIN = 4, 5
"""Survival bins (of r/k) that count as the head of the set, below 0.75, and the last one inside it, from 0.9 to 1."""
SAFE_SURVIVAL = 0.99
PROXY_MARK = "PROXY"
"""Stands in the source of inputs that only stand in for hidden states."""


def environment(device: str) -> dict[str, Any]:
    """Versions and machine, for the JSON document."""
    return {
        "diffcheck": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in ("torch", "triton", "safetensors", "numpy")},
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def document(todo: Plan, outcome: Outcome, gates: list[GateResult]) -> dict[str, Any]:
    """The whole run as JSON values (schema_version 1)."""
    config = todo.checkpoint.config
    reference = Recipe.reference(config)
    recipes = {
        f"{case.precision} @ {case.theta.label}": {
            "replaced": {name: plain(value) for name, value in case.recipe.differences(reference).items()},
            "fields": case.recipe.to_json(),
        }
        for case in todo.cases
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment(todo.device),
        "command": sys.argv[1:],
        "checkpoint": {
            "path": str(todo.checkpoint.directory),
            "config": {name: plain(getattr(config, name)) for name in config.sources if hasattr(config, name)},
            "sources": dict(config.sources),
            "absent_layers": list(todo.checkpoint.absent_layers),
        },
        "inputs": {
            "source": todo.source,
            "proxy": PROXY_MARK in todo.source,
            "length": todo.length,
            "seed": todo.options.seed,
            "needles": outcome.needles,
        },
        "partial": outcome.partial,
        "layers": outcome.layers,
        "notes": todo.notes + outcome.notes,
        "recipes": recipes,
        "cases": outcome.cases,
        "gates": [{"gate": g.gate, "measured": g.measured, "failed": g.failed, "passed": g.passed} for g in gates],
        "probes": outcome.probes,
        "summary": summary(todo, outcome),
        "stage_evaluations": {"asked": outcome.stages_asked, "computed": outcome.stages_computed},
        "seconds": outcome.seconds,
    }


def render(console: Console, todo: Plan, outcome: Outcome, gates: list[GateResult]) -> None:
    """Print the table, notes, summary and gates."""
    config = todo.checkpoint.config
    console.print(f"checkpoint {todo.checkpoint.directory}", highlight=False, soft_wrap=True)
    console.print(f"inputs     {todo.source}, {todo.length} tokens", highlight=False, soft_wrap=True)
    console.print(
        f"selection  top {config.index_topk} of {todo.length // 4} entries; "
        f"starts above {4 * config.index_topk} tokens",
        highlight=False,
    )
    for note in todo.notes:
        console.print(f"note       {note}", highlight=False, soft_wrap=True)
    console.print(_table(outcome, console.width))
    console.print(LEGEND, highlight=False, style="dim")
    console.print()
    for line in summary(todo, outcome):
        console.print(line, highlight=False)
    for line in step_lines(outcome):
        console.print(line, highlight=False)
    for case in outcome.failed:
        where = f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}"
        console.print(f"FAILED: {where}: {case['reason']}", highlight=False, markup=False)
    for record in outcome.probes:
        console.print(f"probe: {describe(record)}", highlight=False)
    saved = outcome.stages_asked - outcome.stages_computed
    interrupted = "interrupted: " if outcome.partial else ""
    console.print(
        f"{interrupted}{len(outcome.cases)} cases in {outcome.seconds:.1f} s; {saved} of {outcome.stages_asked} stage "
        "evaluations were shared.",
        highlight=False,
    )
    for gate in gates:
        state = "passed" if gate.passed else "FAILED" if gate.measured else "FAILED: nothing was measured"
        console.print(f"gate {gate.gate}: {state} ({gate.measured} cases)", highlight=False, markup=False)
        for failure in gate.failed:
            console.print(f"  {failure}", highlight=False, markup=False)


LEGEND = (
    "lost: needles that the reference selects and this case does not. rank: median needle rank, reference -> case.\n"
    "mass: share of the main attention's weight that falls on entries it drops (only after a forward pass).\n"
    "head, tail: share of the reference's entries of rank below 0.75 k, and from 0.9 k, that is still selected.\n"
    "J, J tied: Jaccard with the reference, plain and tie-tolerant; J ideal: with the unrounded formulas.\n"
    "score, format, kernel: relative score error in all, from the recipe's choices, and beyond them."
)


COLUMNS = (
    "layer", "precision", "theta", "lost", "mass", "rank", "head", "tail", "J", "J tied", "J ideal", "recall", "worst",
    "score", "format", "kernel", "B", "first stage", "verdict",
)  # fmt: skip
NARROW = {150: ("J ideal", "recall", "worst", "B"), 125: ("J", "format", "tail"), 95: ("rank", "score", "kernel")}
"""Columns that are left out on a terminal narrower than this."""


def _table(outcome: Outcome, width: int) -> Table:
    left_out = {name for least, names in NARROW.items() if width < least for name in names}
    if all(case.get("attention_mass_lost") is None for case in outcome.cases):
        left_out.add("mass")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for name in COLUMNS:
        if name not in left_out:
            left = name in ("precision", "theta", "first stage", "verdict")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
    layer = None
    for case in outcome.cases:
        if layer is not None and case["layer"] != layer:
            table.add_row()
        layer = case["layer"]
        cells = zip(COLUMNS, _row(case), strict=True)
        table.add_row(*(cell for name, cell in cells if name not in left_out), style=_STYLES.get(case["verdict"]))
    return table


_STYLES = {
    "kernel": "bold red",
    "config": "yellow",
    "same": "green",
    "vacuous": "dim",
    "refused": "dim",
    "failed": "bold red",
}


def _row(case: dict[str, Any]) -> list[str]:
    head = [str(case["layer"]), case["precision"], case["theta_setting"]]
    if case["verdict"] in ("refused", "failed"):
        return [*head, *[""] * 14, "-", case["verdict"]]
    needles = case["needles"]
    ranks = [case["needle_rank_reference_median"], case["needle_rank_median"]]
    return [
        *head,
        f"{case['needles_lost']}/{case['needles_selected_reference']}" if needles else "-",
        "-" if case["attention_mass_lost"] is None else f"{case['attention_mass_lost']:.2%}",
        "->".join("-" if r is None else f"{r:g}" for r in ranks) if needles else "-",
        _number(survival_below(case, HEAD_BINS)),
        _number(case["survival"][TAIL_BIN]["p"]),
        *(_number(case[name]) for name in ("jaccard", "jaccard_tied", "jaccard_ideal", "recall_mean", "recall_worst")),
        *(_error(case[name]) for name in ("score_rel_error", "format_error", "kernel_error")),
        f"{case['bytes_per_entry']:g}",
        case["first_stage"] or "-",
        case["verdict"],
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _error(value: float | None) -> str:
    return "nan" if value is None else "0" if value == 0 else f"{value:.1e}" if value < 0.001 else f"{value:.4f}"


def survival_below(case: dict[str, Any], bins: int) -> float | None:
    """Share of the reference's entries in the first `bins` survival bins that are still selected."""
    counted = [b for b in case["survival"][:bins] if b["p"] is not None]
    total = sum(b["n"] for b in counted)
    return sum(b["p"] * b["n"] for b in counted) / total if total else None


def summary(todo: Plan, outcome: Outcome) -> list[str]:
    """The run in plain words: a line a precision, then what each what-if theta does to the first precision."""
    k = todo.checkpoint.config.index_topk
    lines = []
    if PROXY_MARK in todo.source:
        lines.append("PROXY inputs: embedding rows, not hidden states; the numbers show arithmetic, not the model.")
    for precision in dict.fromkeys(case.precision for case in todo.cases):
        records = [r for r in outcome.cases if r["precision"] == precision and not r["what_if"]]
        if records:
            lines.append(f"{precision}: {_words(records, k)}")
    for setting in dict.fromkeys(case.theta.label for case in todo.cases if case.what_if):
        first = todo.cases[0].precision
        records = [r for r in outcome.cases if r["theta_setting"] == setting and r["precision"] == first]
        if records:
            lines.append(f"what if theta were {setting} ({first}): {_words(records, k)}")
    return lines


def step_lines(outcome: Outcome) -> list[str]:
    """Each step of the kernels that ran, worst over the cases: who ran it and how it compares with the emulation."""
    worst: dict[tuple[str, str, str], dict[str, Any]] = {}
    for case in outcome.cases:
        for step in case.get("steps") or ():
            key = (case["precision"], step["step"], step["backend"])
            if key not in worst or _badness(step) > _badness(worst[key]):
                worst[key] = step
    lines = []
    for (precision, name, backend), step in worst.items():
        alone, chained = step["isolated"], step["cumulative"]
        if name in ("keys", "queries"):
            text = f"{alone['equal']:.4%} of the values equal"
        elif name == "logits":
            text = f"calc_diff {_error(alone['calc_diff'])} alone, {_error(chained['calc_diff'])} in the chain"
        else:
            causes = sorted({*alone["causes"], *chained["causes"]})
            text = "; ".join(MEANING[cause] for cause in causes) or "right"
        lines.append(f"{precision}: {name} by {backend}: {text}")
    return lines


def _badness(step: dict[str, Any]) -> float:
    chained = step["cumulative"]
    if "equal" in chained:
        return -float(chained["equal"])
    if "causes" in chained:
        return float(len({*chained["causes"], *step["isolated"]["causes"]}))
    return math.inf if chained["calc_diff"] is None else float(chained["calc_diff"])


def _words(records: list[dict[str, Any]], k: int) -> str:
    refused = [r for r in records if r["verdict"] == "refused"]
    failed = [r for r in records if r["verdict"] == "failed"]
    measured = [r for r in records if r["verdict"] not in ("refused", "vacuous", "failed")]
    if failed and not measured:
        return f"failed: {failed[0]['reason']}."
    if refused and not measured:
        return f"refused by {refused[0]['backend']}: {refused[0]['reason']}."
    if not measured:
        return f"vacuous: no query sees more than {k} entries, so everything is selected and nothing was tested."
    worst = min(measured, key=lambda r: r["jaccard_tied"])
    lost = [r for r in measured if r["needles_lost"]]
    head = min((s for r in measured if (s := survival_below(r, HEAD_BINS)) is not None), default=None)
    broken = [r for r in measured if r["verdict"] == "kernel"]
    parts = []
    if broken:
        parts.append(
            f"KERNEL differs from its own recipe in layer {broken[0]['layer']} "
            f"(Jaccard {broken[0]['jaccard_kernel']:.3f})"
        )
    if lost:
        count, had = (sum(r[n] for r in lost) for n in ("needles_lost", "needles_selected_reference"))
        where = ", ".join(str(r["layer"]) for r in lost)
        parts.append(f"LOSES {count} of {had} needles (layer {where})")
    dropped = [r for r in measured if r.get("attention_mass_lost") is not None]
    if dropped:
        most = max(dropped, key=lambda r: r["attention_mass_lost"])
        row = max(dropped, key=lambda r: r["attention_mass_lost_worst"])
        parts.append(
            f"drops {most['attention_mass_lost']:.2%} of the attention mass (layer {most['layer']}), "
            f"{row['attention_mass_lost_worst']:.1%} in the worst row (layer {row['layer']}, "
            f"query {row['attention_mass_lost_worst_query']})"
        )
    if all(r["verdict"] == "same" for r in measured):
        parts.append("selects what the reference selects")
    else:
        parts.append(f"Jaccard {worst['jaccard_tied']:.3f} at worst (layer {worst['layer']})")
        if head is not None:
            parts.append(_head_words(head))
    return "; ".join(parts) + "."


def _head_words(head: float) -> str:
    if head >= SAFE_SURVIVAL:
        return f"the differences lie in the tail, {head:.1%} of the entries ranked below 0.75 k stay"
    return f"the differences reach the head, only {head:.1%} of the entries ranked below 0.75 k stay"
