"""One layer, stage by stage: judge, explain, correct, go on.

The observed stages are taken in pipeline order. Each is predicted from the deployment's *own* preceding observations;
between two observations may lie stages that nobody saw, and then their fields are among the arms. Where the prediction
holds, the prediction stands in for the observation (it has the full precision of the recipe); where it does not, the
arms are searched, what they explain becomes a `Hit`, the recipe is corrected, and what follows is computed from what
the deployment really had there. So a second fault further down is seen for what it is.

Where nothing was declared the base is the reference, or the preset under which more observations hold; whole presets
are then arms too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerState
from ..refimpl.compressor import WINDOW, PoolState
from ..refimpl.trace import KEY_STAGES, STAGES
from ..stages import GRAPH, entry_positions
from .arms import Arm, make_arms, more_arms, preset_arms
from .base import choose_base
from .cache import take_pages
from .census import Breach, without_gaps
from .distance import HIDDEN_SCORE, Distance, distance, score_distance
from .evidence import Evidence
from .hints import config_hints, rotation_hints, score_hints, selection_hints
from .looks import StageLook, digits, restored, share, wide_rows
from .near import Within, theta_hints
from .scales import benign_scale, judge_gate, unscaled_scores
from .search import Found, Look, Ranked, search

NARROW_FLOPS = 2e9
NARROW_ROWS = (16, 64)
"""Query rows on which arms are compared: as many between these as NARROW_FLOPS of score products allow."""
SURE, NAMED = 0.9, 0.5
"""What arms must explain of a difference that rounding could make, and of one that it could not."""
DROPPED = 0.3
"""An arm without which this much or less is lost is left out again."""


@dataclass(slots=True, kw_only=True)
class Hit:
    """One explained (or unexplained: arm None) difference at an observed stage."""

    observed: str
    first: str
    arm: Arm | None
    old: Recipe
    explained: float
    base: Distance
    after: Distance
    ranking: list[Ranked] = field(default_factory=list)
    before: float = 0.0
    left: float = 0.0
    observation: Tensor | None = None
    prediction: Tensor | None = None
    positions: Tensor | None = None
    between: tuple[str, ...] = ()


class Engine:
    """Works through one layer; `run` fills `hits`, `notes`, `recipe` (the corrected one) and `base`."""

    def __init__(self, evidence: Evidence, declared: Recipe | None) -> None:
        self.evidence, self.declared = evidence, declared
        self.reference = Recipe.reference(evidence.config)
        self.hits: list[Hit] = []
        self.notes: list[str] = []
        self.reached: set[str] = set()
        self.breaches: list[Breach] = []
        self.unequal: dict[str, float] = {}
        self.rows = wide_rows(evidence.queries, declared.k if declared else self.reference.k)
        self.pipeline = self.new_pipeline(evidence.queries[self.rows])
        self.observed = {n: t[self.rows] if GRAPH[n].query_side else t for n, t in evidence.stages.items()}
        self.scale: Tensor | None = None
        self.coarse: dict[str, Tensor] = {}
        self.unscaled: dict[str, Tensor] = {}
        self.other_keys: dict[str, Tensor] = {}
        self.known = torch.arange(evidence.entries) >= evidence.first_known
        self.page_notes: list[str] = []
        if evidence.pages is not None:
            take_pages(self)
        elif set(KEY_STAGES) & set(self.observed):
            self.known = torch.arange(evidence.entries) >= evidence.start // WINDOW
        self.base = self.recipe = declared or choose_base(self)

    def new_pipeline(self, queries: Tensor, earlier: Tensor | None = None) -> Pipeline:
        """A pipeline on the layer; `earlier` keys [n, D] stand before the call's own where it continues a stream."""
        e = self.evidence
        state = None
        if e.start:
            dim, opened = e.config.index_head_dim, e.start % WINDOW
            kv = torch.zeros(WINDOW + opened, 2 * dim)
            # what came before is not in the trace; entries that depend on it are not compared
            state = IndexerState(
                position=e.start,
                pool=PoolState(kv=kv, gate=torch.full_like(kv, -torch.inf)),
                keys=torch.zeros(e.start // WINDOW, dim) if earlier is None else earlier,
            )
        return Pipeline(e.config, e.weights, e.x, e.qr, start=e.start, state=state, queries=queries)

    # -- one observation -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work through all observations in pipeline order."""
        for stage in STAGES[:-1]:
            if stage == "gate":
                judge_gate(self)
            elif stage in self.observed:
                self.judge(stage, self.observed[stage])
        if self.evidence.selected is not None:
            if self.evidence.foreign[0]:
                self.notes.append("the selection holds entries of another request and is not compared further")
            else:
                self._select(self.evidence.selected)

    def inside(self, stage: str) -> list[str]:
        """The stages between an observation and the observations before it, itself included, in pipeline order."""
        found, todo = set(), [stage]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [n for n in GRAPH[name].inputs if n not in self.pipeline.observed_names]
        return [name for name in GRAPH if name in found]

    def compare(self, stage: str, seen: Tensor, predicted: Tensor) -> Distance:
        """The distance of an observed stage, where it can be predicted."""
        if stage == "scores":
            return score_distance(seen, predicted, self.known)
        known = self._known_rows(stage)
        return distance(seen, predicted, None if known is None else known[:, None])

    def _known_rows(self, stage: str) -> Tensor | None:
        """Rows of a key-side stage that can be predicted, bool; None where all can."""
        e = self.evidence
        if GRAPH[stage].query_side or bool(self.known.all()):
            return None
        known = self.known[e.start // WINDOW :].clone()
        if "kv_gate" in self.inside(stage):
            known[: max(0, e.first_known - e.start // WINDOW)] = False
        return known

    def _standing_in(self, stage: str, seen: Tensor, predicted: Tensor) -> Tensor:
        """The prediction, with the observation where there is none."""
        known = self._known_rows(stage)
        return predicted if known is None else torch.where(known[:, None], predicted, seen.to(predicted.dtype))

    def _look(self, stage: str, rows: Tensor | None, seen: Tensor) -> Look:
        pipeline = self.pipeline if rows is None else self.pipeline.narrowed(rows)
        seen = seen if rows is None or not GRAPH[stage].query_side else seen[rows]
        return StageLook(pipeline, stage, lambda predicted: self.compare(stage, seen, predicted))

    def judge(self, stage: str, seen: Tensor) -> None:
        """Compare one observed stage, explain the difference, and let what follows see what the deployment had."""
        predicted = self.pipeline.stage(self.recipe, stage)
        whole = seen
        if stage == "scores":
            seen, broken = without_gaps(seen, predicted, self.known)
            self.breaches += broken
        base = self.compare(stage, seen, predicted)
        inside = self.inside(stage)
        fields = {f for name in inside for f in GRAPH[name].fields}
        self.unequal[stage] = base.differing / max(base.elements, 1)
        if not base.equal and self.recompute_coarse(stage, self._look(stage, None, seen), base):
            predicted = self.pipeline.stage(self.recipe, stage)
            base = self.compare(stage, seen, predicted)
        if base.equal:
            self.pipeline.observe(stage, self._standing_in(stage, seen, predicted))
            self._note_coarse(stage, seen, predicted)
        elif benign_scale(self, stage, seen, predicted):
            self.pipeline.observe(stage, seen)
            self.unscaled[stage] = predicted
        elif stage == "scores" and unscaled_scores(self, seen, base):
            pass
        else:
            rows = self.narrow(base.energy) if GRAPH[stage].query_side else None
            looks = (self._look(stage, None, seen), self._look(stage, rows, seen))

            def within(rows: Tensor, entries: Tensor) -> Look:
                counted = entries & self.known
                return StageLook(self.pipeline.narrowed(rows), stage, lambda p: score_distance(seen[rows], p, counted))

            found = self.search(looks[1], stage, seen, fields, within)
            self.accept(stage, seen, base, found, looks[0], predicted=predicted)
        if seen is not whole:
            self.pipeline.observe(stage, whole)
        self.reached |= fields

    def search(self, look: Look, stage: str, seen: Tensor, fields: set[str], within: Within) -> Found:
        """Arms in `fields` that explain what `look` sees under the present recipe.

        within: the same for pairs of some queries and entries, where `stage` is the scores or the selection.
        """
        far: dict[str, list[Any]] = {}

        def more(recipe: Recipe, arm: Arm) -> list[Arm]:
            return more_arms(recipe, arm, self.evidence.config)

        def late() -> list[Arm]:
            pipeline, e = self.pipeline, self.evidence
            far.update(theta_hints(stage, fields, within, self.recipe, pipeline.queries, e.entries, self.fewer()))
            return make_arms(self.recipe, fields & {"q_theta", "k_theta"}, self.evidence.config, far) if far else []

        return search(look, self.recipe, self.arms_of(stage, seen, fields, far), more, late, look(self.recipe))

    def recompute_coarse(self, stage: str, look: Look, base: Distance) -> bool:
        """Whether `stage` follows from an earlier observation as it is, in a coarser type than the recipe's.

        An observation that is the prediction rounded may have been rounded by whoever wrote the trace, or by the
        deployment itself. What was computed from it decides.
        """
        for name in [n for n in self.coarse if n in self.read_by(stage)]:
            kept = self.pipeline.seen(name)
            self.pipeline.observe(name, self.coarse[name])
            after = look(self.recipe)
            if share(base.total, after.total) >= SURE:
                self._coarser(name, stage, base, after)
                del self.coarse[name]
                return True
            self.pipeline.observe(name, kept)
        return False

    def _note_coarse(self, stage: str, seen: Tensor, predicted: Tensor) -> None:
        if digits(seen) < digits(predicted) and not torch.equal(seen.float(), predicted.float()):
            self.coarse[stage] = seen

    def _coarser(self, name: str, stage: str, base: Distance, after: Distance) -> None:
        field_name = {"scores": "round_score", "q": "round_q"}.get(name, f"round_{name}")
        rounding = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.coarse[name].dtype]
        if field_name not in Recipe.field_names():
            self.notes.append(f"{name}: rounded to {rounding}, which its format does not say")
            return
        arm = Arm(field_name, rounding, ((field_name, rounding),))
        if arm.apply(self.recipe) == self.recipe:
            return
        self.hits.append(
            Hit(
                observed=stage, first=name, arm=arm, old=self.recipe, explained=share(base.total, after.total),
                base=base, after=after, before=base.total, left=after.total, between=(name,),
            )
        )  # fmt: skip
        self.recipe = arm.apply(self.recipe)

    def read_by(self, stage: str) -> set[str]:
        """Observations that a stage is predicted from."""
        return {n for name in self.inside(stage) for n in GRAPH[name].inputs} & self.pipeline.observed_names

    def unexplained(
        self, stage: str, base: Distance, found: Found, seen: Tensor | None = None, predicted: Tensor | None = None
    ) -> None:
        """Note a difference that no arm explains; what was tried is kept for the report."""
        self.hits.append(
            Hit(
                observed=stage, first=stage, arm=None, old=self.recipe, explained=0.0, base=base, after=base,
                ranking=found.rankings[0] if found.rankings else [], before=base.total, left=base.total,
                observation=seen, prediction=predicted, positions=self.pipeline.queries,
                between=tuple(self.inside(stage)),
            )
        )  # fmt: skip

    def broken(self, stage: str, cause: str, failed: int, rows: int, wrong_values: int) -> None:
        """Note an invariant that does not hold."""
        self.breaches.append(Breach(stage=stage, cause=cause, failed=failed, rows=rows, wrong_values=wrong_values))

    def accept(
        self,
        stage: str,
        seen: Tensor,
        base: Distance,
        found: Found,
        look: Look,
        *,
        predicted: Tensor | None = None,
        quiet: bool = False,
    ) -> None:
        """Turn what the search found into hits, and let what follows see what the deployment had here."""
        after = look(found.recipe) if found.arms else base
        explained = share(base.total, after.total)
        if not found.arms or explained < (SURE if base.fits else NAMED):
            if not base.fits and not quiet:
                self.unexplained(stage, base, found, seen, predicted)
            self.observe(stage, seen)
            return
        old = self.recipe
        self.recipe = found.recipe
        # what the hit says of the base must not depend on the correction
        for number, arm in enumerate(found.arms):
            rest = old
            for other in found.arms[:number] + found.arms[number + 1 :]:
                rest = other.apply(rest)
            without = look(rest) if len(found.arms) > 1 else base
            alone = share(without.total, after.total)
            if alone <= DROPPED:
                self.recipe = restored(self.recipe, old, arm)
                continue
            self.hits.append(
                Hit(
                    observed=stage, first=self._first(stage, arm), arm=arm, old=old, explained=alone, base=without,
                    after=after, ranking=found.rankings[number], before=found.before[number],
                    left=next(r.left for r in found.rankings[number] if r.arm is arm),
                    observation=None if stage == "topk" else seen, prediction=predicted,
                    positions=self.pipeline.queries, between=tuple(self.inside(stage)),
                )
            )  # fmt: skip
        if after.equal and stage != "topk":
            predicted = self.pipeline.stage(self.recipe, stage)
            self._note_coarse(stage, seen, predicted)
            seen = self._standing_in(stage, seen, predicted)
        self.observe(stage, seen)

    def observe(self, stage: str, tensor: Tensor) -> None:
        """Let what follows be predicted from this; nothing follows a selection."""
        if stage != "topk":
            self.pipeline.observe(stage, tensor)

    def _first(self, stage: str, arm: Arm) -> str:
        """The first stage between the observations that reads what the arm changes, as traces name stages."""
        changed = {name for name, _ in arm.changes}
        for name in self.inside(stage):
            if changed & set(GRAPH[name].fields):
                return {"kv_gate": "pool", "gate_gemm": "gate"}.get(name, name)
        return stage

    def fewer(self) -> int:
        """How many query rows arms are compared on."""
        e = self.evidence
        cost = 2.0 * e.config.index_n_heads * e.config.index_head_dim * max(e.entries, 1)
        return int(min(max(NARROW_FLOPS / cost, NARROW_ROWS[0]), NARROW_ROWS[1]))

    def narrow(self, energy: Tensor) -> Tensor:
        """Rows to compare arms on: half of them where the difference is largest, half spread over all."""
        count = min(len(energy), self.fewer())
        spread: Tensor = torch.arange(0, len(energy), max(1, 2 * len(energy) // count))
        worst = energy.topk(min(count - count // 2, len(energy))).indices
        chosen: Tensor = torch.cat((spread, worst)).unique()
        return chosen

    def arms_of(
        self, stage: str, seen: Tensor, fields: set[str], found_late: dict[str, list[Any]]
    ) -> Callable[[Recipe], list[Arm]]:
        """A function from a recipe to its arms in `fields`, with what `seen` suggests and what is found meanwhile."""
        e, inside = self.evidence, self.inside(stage)
        shared = config_hints(e.config)
        for hit in self.hits:
            # what one side was found to have, the other may have too
            if hit.arm is not None and not hit.arm.preset and hit.arm.field[:2] in ("q_", "k_"):
                shared.setdefault(hit.arm.field[2:], []).append(hit.arm.value)

        def arms(recipe: Recipe) -> list[Arm]:
            hints = {name: list(values) for name, values in shared.items()}
            for name, values in found_late.items():
                hints.setdefault(name, []).extend(values)
            for side, source in (("q", "q"), ("k", "k_norm")):
                if stage.startswith(f"{side}_") and f"{side}_rope" in inside:
                    hints |= self._rotation(recipe, side, source, stage, seen)
            if stage == "scores":
                visible = (seen > HIDDEN_SCORE).sum(1)
                hints |= score_hints(visible, self.pipeline.queries, recipe, e.entries)
            if stage == "topk":
                hints |= selection_hints(seen, self.pipeline.queries, recipe, e.entries)
            found = make_arms(recipe, fields, e.config, hints, short=True)
            if self.declared is None:
                free = preset_arms(recipe, self.reference, e.config)
                kept = (Arm(a.field, a.value, tuple(c for c in a.changes if c[0] not in self.reached)) for a in free)
                # before the others: of two explanations the one that is no fault
                found = [a for a in kept if any(name in fields for name, _ in a.changes)] + found
            return found

        return arms

    def _rotation(self, recipe: Recipe, side: Any, source: str, stage: str, seen: Tensor) -> dict[str, list[Any]]:
        e = self.evidence
        before = self.observed[source] if source in self.observed else self.pipeline.stage(recipe, source)
        if side == "q":
            positions = self.pipeline.queries + recipe.q_position_offset
        else:
            entry = torch.arange(e.start // WINDOW, e.start // WINDOW + len(before))
            positions = entry_positions(recipe, entry) + recipe.k_position_offset
            skip = max(0, e.first_known - e.start // WINDOW)
            before, seen, positions = before[skip:], seen[skip:], positions[skip:]
        rotated = getattr(recipe, f"{side}_hadamard") and not stage.endswith("rope")
        return rotation_hints(before, seen, positions, recipe, side, rotated=rotated, start=e.start)

    # -- the selection ---------------------------------------------------------------------------------------------

    def _select(self, selected: Tensor) -> None:
        from .selection import Selector

        Selector(self, selected).run()
