"""A run in words: one sentence for the whole, a line a precision, and what the kernels' steps and probes say.

Lines lead with what is lost (needles, survival by rank), then the overlap: with few relevant entries the tail of the
set is noise, so a Jaccard of 0.4 can be harmless, and one lost needle is fatal at 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..invariants import MEANING
from ..probes import describe
from ..recipe import STRUCTURE

HEAD_BINS, TAIL_BIN = 4, 5
"""Survival bins (of r/k) that count as the head of the set, below 0.75, and the last one inside it, from 0.9 to 1."""
SAFE_SURVIVAL = 0.99
MOST_LAYERS = 8
"""More layers than this are counted, not listed."""
PROXY_MARK = "PROXY"
"""Stands in the source of inputs that only stand in for hidden states."""

Record = dict[str, Any]


def number(value: float | None) -> str:
    """A share with three digits."""
    return "-" if value is None else f"{value:.3f}"


def error(value: float | None) -> str:
    """A relative error; one that came out as NaN or infinity is null in the document."""
    return "nan" if value is None else "0" if value == 0 else f"{value:.1e}" if value < 0.001 else f"{value:.4f}"


def is_measured(case: Record) -> bool:
    """Whether a case has metrics: it ran, and some row sees more than k entries."""
    return case.get("jaccard_tied") is not None


def survival_below(case: Record, bins: int) -> float | None:
    """Share of the reference's entries in the first `bins` survival bins that are still selected."""
    counted = [b for b in case["survival"][:bins] if b["p"] is not None]
    total = sum(b["n"] for b in counted)
    return sum(b["p"] * b["n"] for b in counted) / total if total else None


def layers_of(cases: Iterable[Record]) -> str:
    """Name the layers of cases: "layer 2, 4", or only how many where that would be a long list."""
    numbers = sorted({case["layer"] for case in cases})
    return f"{len(numbers)} layers" if len(numbers) > MOST_LAYERS else f"layer {', '.join(map(str, numbers))}"


def shown(value: Any) -> str:
    """A recipe field's value: numbers without needless digits, YaRN by its factor."""
    if isinstance(value, dict):
        return f"factor {value['factor']:g}" if "factor" in value else str(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differences(replaced: Record, reference: Record) -> list[tuple[str, str, str]]:
    """(field, value, the reference's value) of each replaced field; q_ and k_ are joined where they agree."""
    found, joined = [], set()
    for name, value in replaced.items():
        other = "k_" + name[2:]
        both = name.startswith("q_") and other in replaced and replaced[other] == value
        if both and reference.get(name) == reference.get(other):
            joined.add(other)
            found.append((name[2:], shown(value), shown(reference.get(name))))
        elif name not in joined:
            found.append((name, shown(value), shown(reference.get(name))))
    return found


def headline(document: Record) -> Record:
    """The verdict in one sentence, with its cause, and its `status`.

    fault: a kernel departs from its own recipe, or a recipe from the reference in more than formats and roundings;
    failed: a gate, a case or the comparison with a baseline did, or the run was interrupted; differs: formats and
    roundings move the selection; same; untested: nothing was measured. What-if thetas do not count. What failed is
    named first.
    """
    status, sentence = _verdict(document)
    wrong = [probe for probe in document["probes"] if probe["causes"]]
    if wrong:
        status, sentence = "fault", f"{sentence}; probe: {describe(wrong[0])}"
    failed = [gate for gate in document["gates"] if not gate["passed"]]
    if failed:
        sentence = f"Gate {', '.join(gate['gate'] for gate in failed)} failed. {sentence}"
    regressions = document.get("baseline", {}).get("regressions", ())
    if regressions:
        first = f"{regressions[0]['case']}, {regressions[0]['field']}"
        sentence = f"Worse than the baseline in {len(regressions)} numbers, first {first}. {sentence}"
    lacking = [case for case in document["cases"] if case["verdict"] == "failed"]
    if lacking:
        sentence = f"{len(lacking)} of {len(document['cases'])} cases failed: {lacking[0]['reason']}. {sentence}"
    if document["partial"]:
        sentence = f"Interrupted after {len(document['cases'])} cases. {sentence}"
    if status != "fault" and (failed or regressions or lacking or document["partial"]):
        status = "failed"
    if document["inputs"]["proxy"]:
        sentence = f"{PROXY_MARK} inputs, not hidden states. {sentence}"
    return {"status": status, "sentence": f"{sentence}."}


def gate_words(gate: Record) -> str:
    """A gate's result in one line, with the gate that would have passed."""
    if gate["passed"]:
        return f"gate {gate['gate']}: passed ({gate['measured']} cases)"
    if not gate["measured"]:
        return f"gate {gate['gate']}: FAILED: nothing was measured ({gate['source']})"
    would = "" if gate["passing"] is None else f"; {gate['passing']} would have passed"
    return f"gate {gate['gate']}: FAILED ({gate['measured']} cases, {gate['source']}{would})"


def regression_words(regression: Record) -> str:
    """What became worse than a baseline, by how much, and the tolerance that would have passed."""
    r = regression
    if r["worse"] is None:
        after = "no number" if r["after"] is None else r["after"]
        return f"{r['case']}: {r['field']} {r['before']} -> {after}"
    return (
        f"{r['case']}: {r['field']} {r['before']:.6g} -> {r['after']:.6g}, worse by {r['worse']:.4g}, tolerance "
        f"{r['tolerance']:g}; {r['passing']} would have passed"
    )


def _verdict(document: Record) -> tuple[str, str]:
    cases = [case for case in document["cases"] if not case["what_if"]] or document["cases"]
    measured = [case for case in cases if is_measured(case)]
    if not measured:
        if all(case["verdict"] == "vacuous" for case in cases) and cases:
            return "untested", "Nothing was tested: no query sees more than k entries, so everything is selected"
        reason = next((case["reason"] for case in cases if case.get("reason")), "no case was finished")
        return "untested", f"Nothing was compared: {reason}"
    kernel = [case for case in measured if case["verdict"] == "kernel"]
    if kernel:
        return "fault", _kernel_words(kernel)
    config = [case for case in measured if case["verdict"] == "config"]
    if config:
        return "fault", _config_words(config, document["reference"])
    differing = [case for case in measured if case["verdict"] != "same"]
    if not differing:
        return "same", f"Selects what the reference selects in all {len(measured)} cases"
    worst = min(differing, key=lambda case: case["jaccard_tied"])
    return "differs", (
        f"No fault: only formats and roundings differ, most in {worst['precision']}{_effect(worst, differing)}"
    )


def _kernel_words(cases: list[Record]) -> str:
    worst = min(cases, key=lambda case: case["jaccard_kernel"])
    mine = [case for case in cases if case["precision"] == worst["precision"]]
    causes = dict.fromkeys(finding["meaning"] for case in mine for finding in case["findings"])
    steps = [step for case in mine for step in case.get("steps") or ()]
    if not causes and steps:
        step = max(steps, key=_badness)
        causes = {f"worst step {step['step']} by {step['backend']}": None}
    cause = f": {'; '.join(causes)}" if causes else ""
    return (
        f"Kernel fault: {worst['precision']} on {worst['backend']} departs from its own recipe in {layers_of(mine)} "
        f"(Jaccard {worst['jaccard_kernel']:.3f} with it in layer {worst['layer']}){cause}"
    )


def _config_words(cases: list[Record], reference: Record) -> str:
    worst = min(cases, key=lambda case: (-(case["needles_lost"] or 0), case["jaccard_tied"]))
    mine = [case for case in cases if case["precision"] == worst["precision"]]
    replaced = worst["replaced"]
    fields = {n: v for n, v in replaced.items() if n in STRUCTURE}
    if len({"q_hadamard", "k_hadamard"} & replaced.keys()) == 1:
        fields |= {n: v for n, v in replaced.items() if n in ("q_hadamard", "k_hadamard")}
    causes = ", ".join(f"{name} {value} instead of {was}" for name, value, was in differences(fields, reference))
    return f"Wrong setting: {worst['precision']} runs {causes}{_effect(worst, mine)}"


def _effect(worst: Record, cases: list[Record]) -> str:
    mine = [case for case in cases if case["precision"] == worst["precision"]]
    lost, had = (sum(case[n] or 0 for case in mine) for n in ("needles_lost", "needles_selected_reference"))
    seen = f", first seen at {worst['first_stage']}" if worst["first_stage"] else ""
    needles = f", losing {lost} of {had} needles" if lost else ", losing no needle" if had else ""
    least = min(mine, key=lambda case: case["jaccard_tied"])
    return f"{seen}{needles}, Jaccard {least['jaccard_tied']:.3f} at worst (layer {least['layer']})"


def summary(document: Record) -> list[str]:
    """The run in plain words: a line a precision, then what each what-if theta does to the first precision."""
    cases = document["cases"]
    lines = []
    if document["inputs"]["proxy"]:
        lines.append("PROXY inputs: embedding rows, not hidden states; the numbers show arithmetic, not the model.")
    for precision in dict.fromkeys(case["precision"] for case in cases):
        records = [r for r in cases if r["precision"] == precision and not r["what_if"]]
        if records:
            lines.append(f"{precision}: {_words(records)}")
    for setting in dict.fromkeys(case["theta_setting"] for case in cases if case["what_if"]):
        first = cases[0]["precision"]
        records = [r for r in cases if r["theta_setting"] == setting and r["precision"] == first]
        if records:
            lines.append(f"what if theta were {setting} ({first}): {_words(records)}")
    return lines


def step_lines(document: Record) -> list[str]:
    """Each step of the kernels that ran, worst over the cases: who ran it and how it compares with the emulation."""
    worst: dict[tuple[str, str, str], Record] = {}
    for case in document["cases"]:
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
            text = f"calc_diff {error(alone['calc_diff'])} alone, {error(chained['calc_diff'])} in the chain"
        else:
            causes = sorted({*alone["causes"], *chained["causes"]})
            text = "; ".join(MEANING[cause] for cause in causes) or "right"
        lines.append(f"{precision}: {name} by {backend}: {text}")
    return lines


def _badness(step: Record) -> float:
    chained = step["cumulative"]
    if "equal" in chained:
        return -float(chained["equal"])
    if "causes" in chained:
        return float(len({*chained["causes"], *step["isolated"]["causes"]}))
    return math.inf if chained["calc_diff"] is None else float(chained["calc_diff"])


def _words(records: list[Record]) -> str:
    refused = [r for r in records if r["verdict"] == "refused"]
    measured = [r for r in records if is_measured(r)]
    failed = [r for r in records if r["verdict"] == "failed"]
    if failed and not measured:
        return f"failed: {failed[0]['reason']}."
    if refused and not measured:
        return f"refused by {refused[0]['backend']}: {refused[0]['reason']}."
    if not measured:
        k = records[0]["k"]
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
        parts.append(f"LOSES {count} of {had} needles ({layers_of(lost)})")
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
