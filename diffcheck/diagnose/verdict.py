"""From hits to findings: what counts as a fault, and how sure that is.

A fault is told from a choice by what was declared. Fields of configuration and structure are never excused. Where
nothing was declared a deployment may run any preset, so formats and roundings that belong to the preset it fits best
are information, and so are roundings, gate types and FP4 steps that any preset has. Hadamard on both sides or on
neither gives the same exact scores: only one side alone is a fault. Scores in a finer type than the recipe's are
harmless in both cases.

A setting that a deployment has once (theta, YaRN, mscale, pairing, slice, position) and that is wrong in the same way
on both sides is one finding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..presets import CHANGES, build
from ..recipe import STRUCTURE, Recipe, plain
from ..refimpl.trace import STAGES
from ..statistics import bootstrap, resampling_groups
from .arms import MERGED, Arm, cause_of, shown
from .engine import Engine, Hit
from .locate import locate
from .looks import share

TOO_CLOSE = 0.005
"""Arms that explain this much less than the best are not told from it."""
_DIGITS = {"none": 24, "fp16": 11, "bf16": 8}
_SCORES = ("round_dot", "round_product", "round_score")
_FREE = ("round_", "q_fp4", "k_fp4")
"""Fields that only a declared recipe makes wrong."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """One fault of one layer; the fields are those of the report (see docs/diagnose.md)."""

    layer: int
    stage: str
    cause: str
    field: str | None
    value: Any
    expected: Any = None
    explained: float
    explained_ci: tuple[float, float] | None = None
    runner_up: str | None = None
    runner_up_explained: float | None = None
    rows: int
    rows_affected: int = 0
    undecidable_with: list[str] = dataclasses.field(default_factory=list)
    decided_by: str | None = None
    observed_at: str = ""
    where: str = ""
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self) | {"value": plain(self.value), "expected": plain(self.expected)}


@dataclass(frozen=True, slots=True)
class _Change:
    """One field of an accepted arm, with the hit that it came from."""

    name: str
    old: Any
    new: Any
    hit: Hit


def findings_of(engine: Engine) -> tuple[list[Finding], list[str]]:
    """Findings in pipeline order and notes of an engine that has run."""
    changes, unknown = _changes(engine)
    base, notes = engine.base, list(engine.notes)
    nearest = _nearest_preset(engine) if engine.declared is None else None
    if nearest is not None:
        base = nearest
        differing = nearest.differences(engine.reference)
        if differing:
            listed = ", ".join(f"{name} {shown(value)}" for name, value in list(differing.items())[:6])
            more = f" and {len(differing) - 6} more" if len(differing) > 6 else ""
            notes.append(f"runs {nearest.name}'s recipe: differs from the reference in {listed}{more}")
    faults = []
    for change in changes:
        reason = _excuse(engine, change, base)
        if reason is None:
            faults.append(change)
        elif reason:
            notes.append(reason)
    faults += _missed_formats(engine, base, faults, changes)
    found = [_finding(engine, group) for group in _merged(faults)]
    found += [_unknown(engine, hit) for hit in unknown]
    found += [_breach(engine, breach) for breach in engine.breaches]
    order = {name: i for i, name in enumerate((*STAGES[:-1], "pages", "topk"))}
    found.sort(key=lambda f: order.get(f.stage, len(order)))
    return found, list(dict.fromkeys(notes))


def _changes(engine: Engine) -> tuple[list[_Change], list[Hit]]:
    changes: dict[str, _Change] = {}
    unknown = []
    for hit in engine.hits:
        if hit.arm is None:
            unknown.append(hit)
            continue
        for name, new in hit.arm.changes:
            if hit.arm.preset and getattr(engine.recipe, name) != new:
                continue
            old = changes[name].old if name in changes else getattr(engine.base, name)
            if old != new:
                changes[name] = _Change(name, old, new, hit)
    return [changes[name] for name in Recipe.field_names() if name in changes], unknown


def _nearest_preset(engine: Engine) -> Recipe:
    """The preset from which the corrected recipe differs in fewest choices, among the fields that were observed."""
    config, recipe = engine.evidence.config, engine.recipe
    seen = engine.reached - STRUCTURE

    def apart(preset: Recipe) -> int:
        # formats decide what an engine is; a rounding may be anybody's
        weights = {"q_format": 4, "k_format": 4, "q_hadamard": 2, "k_hadamard": 2}
        return sum(weights.get(name, 1) for name in preset.differences(recipe) if name in seen)

    return min((build(name, config) for name in ("reference", "bf16", *CHANGES)), key=apart)


def _excuse(engine: Engine, change: _Change, base: Recipe) -> str | None:
    """Why a change is no fault (a note, or "" where nothing needs saying); None if it is one."""
    name, old, new = change.name, getattr(base, change.name), change.new
    final = engine.recipe
    if getattr(final, name) != new or new == old:
        return ""
    if name in ("q_hadamard", "k_hadamard"):
        if final.q_hadamard == final.k_hadamard:
            state = "both sides" if final.q_hadamard else "neither side"
            return f"Hadamard on {state}: the exact scores are the same"
        other = "k_hadamard" if name[0] == "q" else "q_hadamard"
        if engine.declared is None and other not in engine.reached:
            state = "applied" if new else "not applied"
            return f"Hadamard {state} to {name[0]}; whether the other side agrees was not observed"
        return None
    if name in _SCORES:
        finer = _DIGITS[new] >= _DIGITS[change.old]
        if finer or engine.declared is None:
            return f"scores: {name} is {new}, harmless" if finer else f"scores: {name} is {new}"
        return None
    if name in STRUCTURE or name == "round_ape":
        return None
    if engine.declared is None and name.startswith(_FREE) and not name.endswith("format"):
        known = {getattr(build(n, engine.evidence.config), name) for n in ("reference", "bf16", *CHANGES)}
        if new in known:
            return f"{name} is {shown(new)}, the reference has {shown(old)}; a fault only if the recipe says so"
    return None


def _missed_formats(engine: Engine, base: Recipe, faults: list[_Change], changes: list[_Change]) -> list[_Change]:
    """Formats that belong to no preset together, where nothing was declared and the base came from a vote."""
    if engine.declared is not None:
        return []
    named = {change.name for change in faults}
    by_name = {change.name: change for change in changes}
    return [
        dataclasses.replace(by_name[name], old=getattr(base, name))
        for name in ("q_format", "k_format")
        if name in by_name and name not in named and getattr(engine.recipe, name) != getattr(base, name)
    ]


def _merged(faults: list[_Change]) -> list[list[_Change]]:
    """Changes grouped into findings: the same setting on both sides with the same value, and the score type's parts."""
    groups: dict[Any, list[_Change]] = {}
    for change in faults:
        bare = change.name[2:] if change.name[:2] in ("q_", "k_") else change.name
        key: Any = change.name
        if bare in MERGED:
            key = (bare, _rounded(change.new))
        elif change.name in _SCORES:
            key = "score_dtype"
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _rounded(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def _finding(engine: Engine, group: list[_Change]) -> Finding:
    first = min(group, key=lambda c: _position(c.hit, c.name))
    hit, name = first.hit, first.name
    bare = name[2:] if name[:2] in ("q_", "k_") and len(group) > 1 else name
    value = first.new
    if name in _SCORES:
        bare, value = "score_dtype", "/".join(str(getattr(engine.recipe, n)) for n in _SCORES)
    cause = cause_of(name, first.old, first.new)
    explained = min(c.hit.explained for c in group)
    runner, share_of = _runner_up(hit, cause, engine)
    rivals = _rivals(hit, cause, name)
    where = locate(hit, engine.evidence)
    finding = Finding(
        layer=engine.evidence.layer, stage=_stage_of(hit, name), cause=cause, field=bare, value=value,
        expected=first.old, explained=explained, explained_ci=_interval(hit), runner_up=runner,
        runner_up_explained=share_of, rows=len(hit.base.energy), rows_affected=hit.base.rows,
        undecidable_with=rivals, decided_by=_decided_by(engine, hit) if rivals else None,
        observed_at=hit.observed, where=where,
    )  # fmt: skip
    finding.sentence = _sentence(finding)
    return finding


def _position(hit: Hit, name: str) -> int:
    return STAGES.index(_stage_of(hit, name)) if _stage_of(hit, name) in STAGES else 0


def _stage_of(hit: Hit, name: str) -> str:
    """First stage that reads a field, not before the one at which the hit begins."""
    from ..stages import GRAPH

    readers = [s for s in GRAPH if name in GRAPH[s].fields]
    named = [{"kv_gate": "pool", "gate_gemm": "gate"}.get(s, s) for s in readers]
    if name == "mask_shift":
        return "topk"  # where a mask acts, whatever shows it
    return named[0] if named else hit.observed


def _runner_up(hit: Hit, cause: str, engine: Engine) -> tuple[str | None, float | None]:
    for ranked in hit.ranking:
        if _cause(ranked.arm, engine) != cause and ranked.arm.field != (hit.arm.field if hit.arm else None):
            return f"{ranked.arm.field} {shown(ranked.arm.value)}", share(hit.before, ranked.left)
    return None, None


def _cause(arm: Arm, engine: Engine) -> str:
    name, new = arm.changes[0]
    return cause_of(name, getattr(engine.base, name), new)


def _rivals(hit: Hit, cause: str, name: str) -> list[str]:
    """Other changes that the observations do not tell from the one found."""
    if not hit.ranking or (hit.left <= 0 and sum(r.left <= 0 for r in hit.ranking) < 2):
        return []
    best = hit.left
    close = [
        r for r in hit.ranking
        if share(hit.before, r.left) >= share(hit.before, best) - TOO_CLOSE
        and (best > 0 or r.left <= 0)
        and name not in {n for n, _ in r.arm.changes}
    ]  # fmt: skip
    return [f"{r.arm.field} {shown(r.arm.value)}" for r in close[:8]]


def _decided_by(engine: Engine, hit: Hit) -> str | None:
    """The first stage in between that nobody saw: observing it would tell the rivals apart."""
    inside = [s for s in STAGES if s in hit.between]
    return next((s for s in inside if s != hit.observed), None)


def _interval(hit: Hit) -> tuple[float, float] | None:
    before, after = hit.base.energy.numpy(), hit.after.energy.numpy()
    if len(before) != len(after) or before.sum() <= 0:
        return None
    found = bootstrap(after, weights=before, groups=resampling_groups(len(before)), resamples=500)
    if found is None or found.ci is None:
        return None
    return max(0.0, 1 - found.ci[1]), max(0.0, 1 - found.ci[0])


def _unknown(engine: Engine, hit: Hit) -> Finding:
    runner = hit.ranking[0] if hit.ranking else None
    finding = Finding(
        layer=engine.evidence.layer, stage=hit.first, cause="unknown", field=None, value=None, explained=0.0,
        runner_up=f"{runner.arm.field} {shown(runner.arm.value)}" if runner else None,
        runner_up_explained=share(hit.before, runner.left) if runner else None,
        rows=len(hit.base.energy), rows_affected=hit.base.rows, observed_at=hit.observed,
        where=locate(hit, engine.evidence),
    )  # fmt: skip
    finding.sentence = _sentence(finding)
    return finding


def _breach(engine: Engine, breach: Any) -> Finding:
    text = {
        "topk_drop": f"{breach.wrong_values} dropped entries score more than a kept one",
        "topk_slots": "places are empty, repeated or impossible",
        "mask": "entries that the row must not see are selected",
        "cross_request": "entries of another request are selected",
    }.get(breach.cause, "")
    where = f"{text}, in {breach.failed} of {breach.rows} rows" if not breach.where else breach.where
    finding = Finding(
        layer=engine.evidence.layer, stage=breach.stage, cause=breach.cause, field=breach.field, value=breach.value,
        explained=breach.explained, rows=breach.rows, rows_affected=breach.failed, observed_at=breach.stage,
        where=where,
    )  # fmt: skip
    finding.sentence = f"layer {finding.layer}: {finding.stage} breaks an invariant ({breach.cause}): {where}"
    if breach.where:
        finding.sentence = f"layer {finding.layer}: {finding.stage}: {where} ({breach.cause})"
    return finding


def _sentence(f: Finding) -> str:
    """The verdict of one finding."""
    seen = "" if f.observed_at == f.stage else f", seen at {f.observed_at}"
    start = f"layer {f.layer}: first wrong stage {f.stage} ({f.where or 'everywhere'}{seen})"
    if f.cause == "unknown" and f.field is None:
        text = f"{start}; no known cause fits"
        if f.runner_up:
            text += f" (closest: {f.runner_up}, explains {f.runner_up_explained or 0:.1%} of the difference)"
        return text
    name = f"{f.cause}, {f.field} {shown(f.value)}" if f.cause != f.field else f"{f.field} {shown(f.value)}"
    text = f"{start}; best matching cause: {name} instead of {shown(f.expected)} (explains {f.explained:.1%}"
    text += f" of the difference, next best {f.runner_up} {f.runner_up_explained or 0:.1%})" if f.runner_up else ")"
    if f.undecidable_with:
        text += f"; undecidable from what was observed: {', '.join(f.undecidable_with)}"
        text += f"; {f.decided_by} would decide" if f.decided_by else ""
    return text
