"""One case: a deployment's trace against the reference, with the format's share told from the kernel's.

Three comparisons make a case. *Total*: deployment against reference. *Format*: the emulation of the deployment's
recipe against the reference, what its choices imply. *Kernel*: deployment against that emulation, what it does beyond
its choices. The metrics themselves are defined in `metrics`, `ranks` and `profiles`.

`first_stage` asks of each stage in pipeline order: given the reference's own preceding stage, does this recipe's stage
differ by more than rounding? That is: after rounding to the reference's type, more than 1 % of the elements are off
by more than one unit in the last place, or more than 5 % are unequal at all. A selection differs when more than 1 % of
its entries do, or when it holds a single entry that the row must not see.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from . import metrics, ranks
from .inputs.source import Needle
from .invariants import MEANING, check_selection
from .mass import lost_mass, lost_shares
from .pipeline import Pipeline
from .profiles import margin_histogram, overlap_by_visible, stage_errors
from .recipe import Recipe
from .refimpl import STAGES, Trace
from .refimpl.scoring import visible_entries
from .stages import visible_under
from .statistics import bootstrap, resampling_groups

OFF_BY_ULP_SHARE = 0.01
UNEQUAL_SHARE = 0.05
SAME_JACCARD = 0.995


@dataclass(frozen=True, slots=True)
class Targets:
    """What every case of a layer is compared with: reference and ideal scores and selections, and the needles."""

    reference: Recipe
    scores: Tensor
    topk: Tensor
    ideal_scores: Tensor
    ideal_topk: Tensor
    visible: Tensor
    k: int
    needle_rows: Tensor
    needle_spans: list[range]
    needle_reference: ranks.Needles
    mass: Tensor | None

    @staticmethod
    def of(pipeline: Pipeline, needles: tuple[Needle, ...], mass: Tensor | None = None) -> Targets:
        """Compute (or reuse) the targets of a layer; every needle's query must be among the pipeline's rows.

        mass: the main attention's weight of each entry for the pipeline's rows, fp32 [rows, E], where it is known.
        """
        config = pipeline.call.config
        reference, ideal = Recipe.reference(config), Recipe.ideal(config)
        scores, topk = pipeline.stage(reference, "scores"), pipeline.stage(reference, "topk")
        visible = visible_entries(pipeline.queries)
        row_of = {int(position): row for row, position in enumerate(pipeline.queries.tolist())}
        rows = torch.tensor([row_of[n.query] for n in needles], dtype=torch.int64, device=scores.device)
        spans = [range(n.entries.start, min(n.entries.stop, scores.shape[1])) for n in needles]
        found = ranks.needles(scores=scores[rows], selected=topk[rows], visible=visible[rows], spans=spans)
        return Targets(
            reference=reference,
            scores=scores,
            topk=topk,
            ideal_scores=pipeline.stage(ideal, "scores"),
            ideal_topk=pipeline.stage(ideal, "topk"),
            visible=visible,
            k=config.index_topk,
            needle_rows=rows,
            needle_spans=spans,
            needle_reference=found,
            mass=None if mass is None else mass.to(scores.device),
        )


def compare(pipeline: Pipeline, recipe: Recipe, deployed: Trace, targets: Targets) -> dict[str, Any]:
    """All metrics of a case as plain values (None where there is nothing to measure)."""
    t, selected, scores = targets, deployed["topk"], deployed["scores"]
    emulated_scores, emulated_topk = pipeline.stage(recipe, "scores"), pipeline.stage(recipe, "topk")
    rows = metrics.rows(t.visible, t.k)
    total = metrics.errors(scores=scores, target_scores=t.scores, visible=t.visible)
    emulated = scores is emulated_scores and selected is emulated_topk
    form = total if emulated else metrics.errors(scores=emulated_scores, target_scores=t.scores, visible=t.visible)
    kernel = metrics.errors(scores=scores, target_scores=emulated_scores, visible=t.visible)
    noise = metrics.row_noise(emulation_scores=emulated_scores, target_scores=t.scores, visible=t.visible)
    result: dict[str, Any] = {
        "queries": rows.queries,
        "visible": rows.visible if rows.visible is not None else int(t.visible.max()),
        "visible_min": rows.visible_min if rows.visible_min is not None else int(t.visible.min()),
        "vacuous": rows.vacuous,
        "discarded": None if rows.visible is None else 1 - t.k / rows.visible,
    }
    result |= _overlaps(selected, t.topk, t.scores, t)
    per_row = metrics.jaccards(selected=selected, target_selected=t.topk, entries=t.scores.shape[1])
    shares = None
    if t.mass is not None:
        shares = lost_shares(mass=t.mass, selected=selected, target_selected=t.topk, visible=t.visible, k=t.k)
    result |= _rows(per_row, selected, t, shares)
    ideal = _overlaps(selected, t.ideal_topk, t.ideal_scores, t)
    result |= {f"{name}_ideal": value for name, value in ideal.items()}
    own = _overlaps(selected, emulated_topk, emulated_scores, t)
    result |= {"jaccard_kernel": own["jaccard"], "jaccard_tied_kernel": own["jaccard_tied"]}
    lost = metrics.misses(
        selected=selected,
        target_selected=t.topk,
        target_scores=t.scores,
        visible=t.visible,
        k=t.k,
        noise=noise,
    )
    check = check_selection(selected, scores, visible_under(pipeline.call, recipe, pipeline.call.rows), recipe.k)
    result["topk_wrong_rows"] = check.wrong_rows
    result["findings"] = [
        {"stage": "topk", "cause": cause, "meaning": MEANING[cause], "rows": check.wrong_rows} for cause in check.causes
    ]
    result["misses"] = {"ties": lost.ties, "near_ties": lost.near_ties, "real": lost.real}
    result |= _needles(scores, selected, t)
    result |= _mass(pipeline.queries, shares)
    bins = ranks.survival(selected=selected, target_scores=t.scores, visible=t.visible, k=t.k)
    result["survival"] = [asdict(b) | {"p": metrics.finite(b.p)} for b in bins]
    profile = overlap_by_visible(jaccard=per_row, selected=selected, target_scores=t.scores, visible=t.visible, k=t.k)
    result["by_visible"] = [asdict(b) for b in profile]
    margins = metrics.margins(target_scores=t.scores, visible=t.visible, k=t.k, noise=noise)
    result["margins"] = asdict(margin_histogram(margins))
    result["stages"] = [asdict(s) for s in stage_errors(pipeline, recipe, deployed, t.reference)]
    result |= {
        "score_rel_error": metrics.finite(total.rel),
        "score_calc_diff": metrics.finite(total.calc_diff),
        "score_max_error": metrics.finite(total.max_abs),
        "format_error": metrics.finite(form.rel),
        "kernel_error": metrics.finite(kernel.rel),
        "kernel_calc_diff": metrics.finite(kernel.calc_diff),
        "margin": metrics.finite(metrics.margin(target_scores=t.scores, visible=t.visible, k=t.k, noise=noise)),
        "first_stage": first_stage(pipeline, recipe, t.reference),
        "bytes_per_entry": bytes_per_entry(recipe, pipeline.call.config.index_head_dim),
    }
    errors = {"score_rel_error": total.rel, "format_error": form.rel, "kernel_error": kernel.rel}
    result["nonfinite"] = [
        name for name, value in errors.items() if value is not None and metrics.finite(value) is None
    ]
    result["verdict"] = verdict(result, structure_differs=recipe.structure_differs(t.reference))
    return result


def _overlaps(selected: Tensor, target: Tensor, target_scores: Tensor, t: Targets) -> dict[str, Any]:
    entries = target_scores.shape[1]
    plain = metrics.overlap(selected=selected, target_selected=target, entries=entries, visible=t.visible, k=t.k)
    tied = metrics.tied_overlap(selected=selected, target_scores=target_scores, visible=t.visible, k=t.k)
    return asdict(plain) | asdict(tied)


def _rows(jaccard: Tensor, selected: Tensor, t: Targets, shares: Tensor | None) -> dict[str, Any]:
    """Metrics of each row that counts, and from them the interval of the Jaccard with the reference."""
    counted = metrics.counted_rows(t.visible, t.k)
    if not bool(counted.any()):
        return {"rows": {}}
    jaccard = jaccard[counted]
    hits, _ = metrics.tied_hits(selected=selected, target_scores=t.scores, visible=t.visible, k=t.k)
    interval = bootstrap(jaccard.cpu().numpy(), groups=resampling_groups(len(jaccard)))
    hit = hits[counted].double()
    rows = {"jaccard": _rounded(jaccard), "jaccard_tied": _rounded(hit / (2 * t.k - hit))}
    if shares is not None:
        rows["attention_mass_lost"] = _rounded(shares[counted])
    return {"jaccard_ci": interval.ci if interval else None, "rows": rows}


def _rounded(values: Tensor) -> list[float | None]:
    """Short decimals, for a record that stays small; None for NaN."""
    return [metrics.finite(float(f"{value:.4g}")) for value in values.tolist()]


def _needles(scores: Tensor, selected: Tensor, t: Targets) -> dict[str, Any]:
    """Needle fields: a plain value for one needle, lists for several, None without any."""
    rows = t.needle_rows
    found = ranks.needles(scores=scores[rows], selected=selected[rows], visible=t.visible[rows], spans=t.needle_spans)
    count = len(t.needle_spans)

    def one(values: list[Any]) -> Any:
        return None if count == 0 else values[0] if count == 1 else values

    had = sum(t.needle_reference.selected)
    lost = sum(was and not now for was, now in zip(t.needle_reference.selected, found.selected, strict=True))
    return {
        "needles": count,
        "needle_rank_reference": one(t.needle_reference.ranks),
        "needle_rank": one(found.ranks),
        "needle_selected_reference": one(t.needle_reference.selected),
        "needle_selected": one(found.selected),
        "needle_rank_reference_median": t.needle_reference.rank_median,
        "needle_rank_median": found.rank_median,
        "needles_selected_reference": had if count else None,
        "needles_lost": lost if count else None,
    }


def _mass(queries: Tensor, shares: Tensor | None) -> dict[str, Any]:
    """Attention mass on dropped entries; None for a trace without it."""
    lost = None if shares is None else lost_mass(shares)
    return {
        "attention_mass_lost": lost and lost.mean,
        "attention_mass_lost_worst": lost and lost.worst,
        "attention_mass_lost_worst_query": lost and int(queries[lost.worst_row]),
        "attention_mass_rows": lost and lost.rows,
    }


def first_stage(pipeline: Pipeline, recipe: Recipe, reference: Recipe) -> str | None:
    """The first stage at which the recipe itself departs from the reference; None if none does."""
    if not recipe.differences(reference):
        return None
    for name in STAGES:
        theirs = pipeline.stage(recipe, name, given=reference)
        ours = pipeline.stage(reference, name)
        if theirs is ours and name != "topk":
            continue
        if name == "topk":
            hidden = visible_entries(pipeline.queries)[:, None]
            if _selection_differs(theirs, ours) or bool((pipeline.stage(recipe, name) >= hidden).any()):
                return name
        elif stage_differs(theirs, ours):
            return name
    return None


def stage_differs(theirs: Tensor, ours: Tensor) -> bool:
    """Whether a stage differs by more than rounding (see the module docstring); equal infinities are equal."""
    theirs = theirs.to(ours.dtype)
    unequal = (theirs != ours) & ~(theirs.isnan() & ours.isnan())
    elements = int(ours.isfinite().sum()) or 1
    if int(unequal.sum()) > UNEQUAL_SHARE * elements:
        return True
    a, b = theirs[unequal].double(), ours[unequal]
    far = ~((a - b.double()).abs() <= metrics.ulp(b, ours.dtype).double())
    return int(far.sum()) > OFF_BY_ULP_SHARE * elements


def _selection_differs(theirs: Tensor, ours: Tensor) -> bool:
    if theirs.shape != ours.shape:
        return True
    entries = int(ours.max().clamp_min(theirs.max())) + 1
    kept = metrics.membership(theirs, entries) & metrics.membership(ours, entries)
    return int(kept.sum()) < (1 - OFF_BY_ULP_SHARE) * max(int((ours >= 0).sum()), int((theirs >= 0).sum()))


def bytes_per_entry(recipe: Recipe, dim: int) -> float:
    """Bytes of one key in the cache; keys that no format rounds are counted as fp32."""
    return 4.0 * dim if recipe.k_format is None else recipe.k_format.bytes_per_entry(dim)


def verdict(case: dict[str, Any], *, structure_differs: bool) -> str:
    """One word for the case: vacuous, kernel, same, config or format.

    "config" when the recipe differs in more than formats and roundings, such as theta or a one-sided Hadamard.
    """
    if case["vacuous"]:
        return "vacuous"
    if case["jaccard_kernel"] < SAME_JACCARD or case["topk_wrong_rows"]:
        return "kernel"
    if case["jaccard_tied"] >= SAME_JACCARD:
        return "same"
    return "config" if structure_differs else "format"
