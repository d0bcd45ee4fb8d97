"""How a case's numbers are spread: overlap by what a row sees, margins at the k-th place, and errors stage by stage.

Arguments are those of `metrics`, and so are the rows that count (visible > k). Everything is binned, so that a report
stays small at any number of rows, and the bin edges are the same in every run, so that two reports can be compared.

**Overlap by visible.** Rows are grouped by how many entries they see, lo < visible <= hi, with lo rising from k by a
factor of sqrt(2) and rounded down: k, 1.41 k, 2 k, … A row at token t sees (t + 1) // 4 entries, so this is overlap
against length. Of each group that has rows: their number, the mean jaccard, the mean tie-tolerant jaccard and the
worst jaccard.

**Margins.** The margin of a row is (tau - next lower score) / its score noise (see `metrics.margins`): below about 1
the noise decides which of the two is selected. Counted are rows with lo <= margin < hi for neighbouring edges, the last
bin open; rows whose scores have no noise, so that their margin is infinite, are counted apart, and rows without a lower
score or with a NaN not at all.

**Stage errors.** ||a - b|| / ||b|| over all elements of a stage, for scores over visible pairs. total: what was
observed of the deployment against the reference; format: the emulation of its recipe against the reference; kernel: the
deployment against that emulation. None where the deployment did not show the stage. The stages follow one another, so
an error also holds what came before it; `first_stage` says where it begins. A rotation that both sides share (Hadamard
on neither) makes the rotated stages differ without moving a score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .metrics import counted_rows, errors, finite, tied_hits
from .pipeline import Pipeline
from .recipe import Recipe
from .refimpl import STAGES, Trace
from .refimpl.scoring import visible_entries

MARGIN_EDGES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BLOCK_ELEMENTS = 1 << 18  # elements of a stage taken to fp64 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleBin:
    """Rows that see more than lo and at most hi entries: how many, and their overlap with the target."""

    lo: int
    hi: int
    queries: int
    jaccard: float
    jaccard_tied: float
    jaccard_worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginHistogram:
    """Numbers of rows between neighbouring edges, beyond the last one too; `noiseless` have an infinite margin."""

    edges: tuple[float, ...]
    counts: list[int]
    noiseless: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageError:
    """Relative L2 errors of one stage; None where the deployment did not show it, or where one is no number."""

    stage: str
    total: float | None
    format: float | None
    kernel: float | None


def visible_edges(k: int, largest: int) -> list[int]:
    """Edges from k up to the first one that is not below `largest`: floor(k * sqrt(2)**i), all different."""
    edges, power = [k], 0
    while edges[-1] < largest:
        power += 1
        edge = math.isqrt(k * k << power)
        if edge > edges[-1]:
            edges.append(edge)
    return edges


def overlap_by_visible(
    *, jaccard: Tensor, selected: Tensor, target_scores: Tensor, visible: Tensor, k: int
) -> list[VisibleBin]:
    """Overlap of the rows that count, grouped by the number of entries that they see; groups without rows left out.

    jaccard: fp64 [rows], from `metrics.jaccards`.
    """
    counted = counted_rows(visible, k)
    if not bool(counted.any()):
        return []
    hits = tied_hits(selected=selected, target_scores=target_scores, visible=visible, k=k)[0].double()
    tied = hits / (2 * k - hits)
    bins = []
    for lo, hi in pairwise(visible_edges(k, int(visible.max()))):
        here = (visible > lo) & (visible <= hi)
        if rows := int(here.sum()):
            plain = jaccard[here]
            bins.append(
                VisibleBin(
                    lo=lo,
                    hi=hi,
                    queries=rows,
                    jaccard=float(plain.mean()),
                    jaccard_tied=float(tied[here].mean()),
                    jaccard_worst=float(plain.min()),
                )
            )
    return bins


def margin_histogram(margins: Tensor) -> MarginHistogram:
    """Count the margins of rows, fp64 [rows] from `metrics.margins`."""
    edges = torch.tensor(MARGIN_EDGES, dtype=torch.float64, device=margins.device)
    known = margins[margins.isfinite()]
    bins = torch.bucketize(known, edges, right=True) - 1
    counts = torch.bincount(bins, minlength=len(MARGIN_EDGES))
    return MarginHistogram(edges=MARGIN_EDGES, counts=counts.tolist(), noiseless=int(margins.isinf().sum()))


def stage_errors(pipeline: Pipeline, recipe: Recipe, deployed: Trace, reference: Recipe) -> list[StageError]:
    """Errors of all stages but the selection, in pipeline order."""
    found = []
    for name in STAGES[: STAGES.index("topk")]:
        emulated, target = pipeline.stage(recipe, name), pipeline.stage(reference, name)
        shown = deployed.get(name)
        form = _relative(pipeline, name, emulated, target)
        total = form if shown is emulated else _relative(pipeline, name, shown, target)
        found.append(
            StageError(stage=name, total=total, format=form, kernel=_relative(pipeline, name, shown, emulated))
        )
    return found


def _relative(pipeline: Pipeline, name: str, ours: Tensor | None, target: Tensor) -> float | None:
    if ours is None:
        return None
    if ours is target:
        return 0.0
    if name == "scores":
        return finite(errors(scores=ours, target_scores=target, visible=visible_entries(pipeline.queries)).rel)
    distance = size = torch.zeros((), dtype=torch.float64, device=target.device)
    rows = max(1, BLOCK_ELEMENTS * len(target) // max(1, target.numel()))
    for a, b in zip(ours.split(rows), target.split(rows), strict=True):
        distance = distance + (a.double() - b.double()).square().sum()
        size = size + b.double().square().sum()
    return 0.0 if distance == 0 else finite(float((distance / size).sqrt()))
