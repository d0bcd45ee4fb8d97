"""Every number that a comparison reports, defined once; ranks and what follows from them are in `ranks`.

**Arguments.** A row is one query; its entries are the compressed positions 0 … E-1, of which it sees the
first `visible` and may select k. The *target* is what a deployment is compared with: the reference, the ideal
or the emulation of a recipe. These mean the same in every function:

- `selected`, `target_selected`: int32 or int64 [rows, places], the entries that the deployment (set S) or the
  target (set R) selected; -1 is an empty place, a repeat counts once, another index outside is an
  AssertionError.
- `scores`, `target_scores`, `emulation_scores`: any float dtype [rows, E]. 16-bit scores are compared as
  fp32, which holds them exactly. Scores of invisible entries are never read, and NaN ranks last, level with
  -inf.
- `visible`: int [rows], 0 … E. `entries`: E. `k`: places in a selection, at least 1.
- `noise`: float [rows], the recipe's own score noise from `row_noise`.
- `score_dtype`: the dtype in which the target's scores were computed, where they are stored in another one.

What breaks these rules otherwise is a ValueError. Functions that give one number a row give it for *all*
rows, though it means nothing where visible <= k; those that summarise leave such rows out and return plain
records.

**Rows.** With visible <= k everything is selected and nothing can differ, so only rows with visible > k
count. A comparison without such a row is vacuous: it has no metrics, and it did not pass.

**Overlap.** jaccard = |S ∩ R| / |S ∪ R| and recall = |S ∩ R| / |R| in each row; then their means over rows,
and of the recall also the 1st percentile (interpolated linearly) and the worst.

**Ties.** Two correct programs may break a tie differently. Let tau be the k-th largest visible score and e
the spacing of the target's score format at tau (`tie_band`). Entries above tau + e (set A, fewer than k of
them) must be selected; those within e of tau (set B) are interchangeable and fill what is left of the k
places: hit = |A ∩ S| + min(k - |A|, |B ∩ S|), recall_tied = hit / k, jaccard_tied = hit / (2k - hit). Where
NaN leaves fewer than k scores, tau is -inf and e is 0.

**Misses** (R without S) are ties (within e of tau), near-ties (within 3 times the recipe's own score noise in
that row: the RMS of emulation minus target) or real. A missed entry is judged by its own score alone, so ties
may outnumber what jaccard_tied forgives: that also asks what was selected instead.

**Errors** over visible (row, entry) pairs, a being the deployment and b the target: rel = ‖a-b‖ / ‖b‖,
calc_diff = 1 - 2<a,b> / (<a,a> + <b,b>), computed as the equal ‖a-b‖² / (‖a‖² + ‖b‖²), which does not cancel,
and max_abs = max |a-b|. A pair that is the same infinity, or NaN on both sides, agrees and adds nothing; NaN
or infinity on one side only makes the errors NaN or infinite.

**Margin** = (tau - the next lower score) / noise: by how many times its own noise a recipe stays clear of
another choice at the k-th place. "Next lower" is strictly lower, ties having been dealt with above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NEAR_TIE_NOISES = 3
BLOCK_ELEMENTS = 1 << 18  # scores taken to fp64 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How many rows count, and the largest and smallest `visible` among them."""

    queries: int
    visible: int | None
    visible_min: int | None
    vacuous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Set overlap over the rows that count; None where there are none."""

    jaccard: float | None
    recall_mean: float | None
    recall_p1: float | None
    recall_worst: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedOverlap:
    """Mean tie-tolerant overlap and the widest band; None where no row counts."""

    jaccard_tied: float | None
    recall_tied: float | None
    tie_band: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """How many entries of the target's sets were not selected, over the rows that count."""

    ties: int
    near_ties: int
    real: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Score errors over `pairs` visible pairs; None without a pair. They may be NaN or infinite."""

    rel: float | None
    calc_diff: float | None
    max_abs: float | None
    pairs: int


def counted_rows(visible: Tensor, k: int) -> Tensor:
    """Say which rows count: bool [rows], visible > k."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    return visible > k


def rows(visible: Tensor, k: int) -> Rows:
    """Count the rows that enter a mean."""
    counted = visible[counted_rows(visible, k)]
    n = counted.numel()
    least, most = (int(counted.min()), int(counted.max())) if n else (None, None)
    return Rows(queries=n, visible=most, visible_min=least, vacuous=n == 0)


def membership(selected: Tensor, entries: int) -> Tensor:
    """Turn index lists into sets: bool [rows, E]."""
    index = _distinct(selected, entries)
    held = torch.zeros(index.shape[0], entries + 1, dtype=torch.bool, device=index.device)
    held.scatter_(1, torch.where(index < 0, entries, index), True)  # the extra column takes the empty places
    return held[:, :entries]


def jaccards(*, selected: Tensor, target_selected: Tensor, entries: int) -> Tensor:
    """Give the jaccard of each row: fp64 [rows], NaN where both sets are empty."""
    both, own, target = _sizes(selected, target_selected, entries)
    return both.double() / (own + target - both)


def recalls(*, selected: Tensor, target_selected: Tensor, entries: int) -> Tensor:
    """Give the recall of each row: fp64 [rows], NaN where the target's set is empty."""
    both, _, target = _sizes(selected, target_selected, entries)
    return both.double() / target


def overlap(*, selected: Tensor, target_selected: Tensor, entries: int, visible: Tensor, k: int) -> Overlap:
    """Summarise jaccard and recall; an empty target in a row that counts is an AssertionError."""
    counted = counted_rows(visible, k)
    check_rows(visible, selected, target_selected)
    if not counted.any():
        return Overlap(jaccard=None, recall_mean=None, recall_p1=None, recall_worst=None)
    both, own, target = (size.double() for size in _sizes(selected[counted], target_selected[counted], entries))
    assert bool((target > 0).all()), "the target selected nothing in a row with more than k entries"
    recall = both / target
    return Overlap(
        jaccard=float((both / (own + target - both)).mean()),
        recall_mean=float(recall.mean()),
        recall_p1=float(torch.quantile(recall, 0.01)),
        recall_worst=float(recall.min()),
    )


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the unit in the last place of the float `dtype` at x: fp64, exact, the shape of x.

    The step from |x| to the next larger number of `dtype`, which is the smallest subnormal at 0 and below the
    normal range. Infinity gives infinity and NaN gives NaN, as in math.ulp.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} has no unit in the last place")
    info = torch.finfo(dtype)
    digits, lowest = -round(math.log2(info.eps)), round(math.log2(info.tiny))
    magnitude = x.detach().double().abs().cpu().numpy()
    _, exponent = np.frexp(magnitude)  # magnitude = m * 2**exponent with m in [0.5, 1)
    step = np.ldexp(1.0, np.where(magnitude == 0, lowest, np.maximum(exponent - 1, lowest)) - digits)
    return torch.from_numpy(np.where(np.isfinite(magnitude), step, magnitude)).to(x.device)


def thresholds(*, target_scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Give tau of each row: fp64 [rows]."""
    return best_keys(ordering_keys(target_scores, visible), k)[:, -1].double()


def tie_bands(taus: Tensor, score_dtype: torch.dtype) -> Tensor:
    """Give e, the tie band at each tau, 0 at an infinite one: fp64, the shape of `taus`."""
    return torch.where(torch.isfinite(taus), ulp(taus, score_dtype), 0.0)


def tied_hits(
    *,
    selected: Tensor,
    target_scores: Tensor,
    visible: Tensor,
    k: int,
    score_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Give the tie-tolerant hits of each row, int64 [rows] in 0 … k, and its band e, fp64 [rows]."""
    keys = ordering_keys(target_scores, visible)
    best = best_keys(keys, k).double()
    taus = best[:, -1:]
    bands = tie_bands(taus, score_dtype or target_scores.dtype)
    own, held = selected_keys(keys, selected, visible)
    above = held & (own > taus + bands)
    level = held & (own >= taus - bands) & ~above
    must = (best > taus + bands).sum(1)
    return above.sum(1) + torch.minimum(k - must, level.sum(1)), bands[:, 0]


def tied_overlap(
    *,
    selected: Tensor,
    target_scores: Tensor,
    visible: Tensor,
    k: int,
    score_dtype: torch.dtype | None = None,
) -> TiedOverlap:
    """Summarise the tie-tolerant overlap."""
    counted = counted_rows(visible, k)
    hits, bands = tied_hits(
        selected=selected, target_scores=target_scores, visible=visible, k=k, score_dtype=score_dtype
    )
    if not counted.any():
        return TiedOverlap(jaccard_tied=None, recall_tied=None, tie_band=None)
    hit = hits[counted].double()
    return TiedOverlap(
        jaccard_tied=float((hit / (2 * k - hit)).mean()),
        recall_tied=float((hit / k).mean()),
        tie_band=float(bands[counted].max()),
    )


def row_noise(*, emulation_scores: Tensor, target_scores: Tensor, visible: Tensor) -> Tensor:
    """Give the RMS of emulation minus target of each row: fp64 [rows], NaN in a row that sees nothing."""
    noise = torch.full(visible.shape, torch.nan, dtype=torch.float64, device=visible.device)
    for block, a, b in _blocks(emulation_scores, target_scores, visible):
        noise[block] = ((a - b).square().sum(1) / visible[block]).sqrt()
    return noise


def misses(
    *,
    selected: Tensor,
    target_selected: Tensor,
    target_scores: Tensor,
    visible: Tensor,
    k: int,
    noise: Tensor,
    score_dtype: torch.dtype | None = None,
) -> Misses:
    """Divide the misses into ties, near-ties and real ones; NaN or infinite noise makes none a near-tie."""
    counted = counted_rows(visible, k)
    check_rows(visible, selected, target_selected, noise)
    keys = ordering_keys(target_scores, visible)
    taus = best_keys(keys, k)[:, -1:].double()
    bands = tie_bands(taus, score_dtype or target_scores.dtype)
    index = _distinct(target_selected, keys.shape[1])
    place = index.clamp_min(0)
    missed = (index >= 0) & ~membership(selected, keys.shape[1]).gather(1, place) & counted[:, None]
    lost = keys.gather(1, place).double()
    # Compared with the ends of the band: a distance from -inf to -inf is no number.
    tie = missed & (lost >= taus - bands) & (lost <= taus + bands)
    reach = torch.where(noise.isfinite(), NEAR_TIE_NOISES * noise.double(), -1.0)[:, None]
    near = missed & ~tie & ((lost - taus).abs() <= reach)
    return Misses(ties=int(tie.sum()), near_ties=int(near.sum()), real=int((missed & ~tie & ~near).sum()))


def margins(*, target_scores: Tensor, visible: Tensor, k: int, noise: Tensor) -> Tensor:
    """Give the margin of each row: fp64 [rows], infinite without noise, NaN where no score is below tau."""
    check_rows(visible, noise)
    return _gaps(target_scores, visible, k) / noise.double()


def margin(*, target_scores: Tensor, visible: Tensor, k: int, noise: Tensor) -> float | None:
    """Give the median margin of rows with a score below tau, None without any; a NaN noise makes it NaN."""
    check_rows(visible, noise)
    gaps = _gaps(target_scores, visible, k)
    kept = ~gaps.isnan()  # never in a row with visible <= k, where nothing is below the k-th
    return float(np.median((gaps / noise.double())[kept].cpu().numpy())) if kept.any() else None


def errors(*, scores: Tensor, target_scores: Tensor, visible: Tensor) -> Errors:
    """Compare scores over all visible pairs, in fp64, some rows at a time; equal ones give exactly 0."""
    distance = own = target = worst = torch.zeros((), dtype=torch.float64, device=scores.device)
    for _, a, b in _blocks(scores, target_scores, visible):
        distance = distance + (a - b).square().sum()
        own, target = own + a.square().sum(), target + b.square().sum()
        worst = torch.maximum(worst, (a - b).abs().amax())  # unlike Python's max it keeps a NaN
    pairs = int(visible.sum())
    if pairs == 0:
        return Errors(rel=None, calc_diff=None, max_abs=None, pairs=0)
    if worst == 0:
        return Errors(rel=0.0, calc_diff=0.0, max_abs=0.0, pairs=pairs)
    rel, calc_diff = (distance / target).sqrt(), distance / (own + target)
    return Errors(rel=float(rel), calc_diff=float(calc_diff), max_abs=float(worst), pairs=pairs)


def check_rows(visible: Tensor, *others: Tensor) -> None:
    """Refuse a tensor without a row for each of `visible`."""
    for other in others:
        if other.shape[:1] != visible.shape:
            raise ValueError(f"{tuple(other.shape)} does not have a row for each of {tuple(visible.shape)}")


def check_scores(scores: Tensor, visible: Tensor) -> None:
    """Refuse scores that are not float [rows, E], and `visible` outside 0 … E."""
    if scores.ndim != 2 or not scores.dtype.is_floating_point:
        raise ValueError(f"scores must be float [rows, E], not {scores.dtype} {tuple(scores.shape)}")
    check_rows(visible, scores)
    if len(visible) and not 0 <= int(visible.min()) <= int(visible.max()) <= scores.shape[1]:
        raise ValueError(f"visible must lie in 0 … {scores.shape[1]}")


def check_range(index: Tensor, entries: int) -> None:
    """Refuse indices of another type or shape; one outside -1 … E-1 is an AssertionError."""
    if index.ndim != 2 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices must be int32 or int64 [rows, places], not {index.dtype} {index.ndim}-d")
    if index.numel():
        assert int(index.min()) >= -1, f"entry {int(index.min())}"
        assert int(index.max()) < entries, f"entry {int(index.max())} of {entries}"


def _distinct(index: Tensor, entries: int) -> Tensor:
    """Sort the indices of each row and turn repeats into -1: int64 [rows, places]."""
    check_range(index, entries)
    ordered = index.long().sort(dim=1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(repeated, -1)


def _sizes(selected: Tensor, target_selected: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give |S ∩ R|, |S| and |R|: int64 [rows] each."""
    if selected.shape[:1] != target_selected.shape[:1]:
        raise ValueError(f"{selected.shape[0]} rows are compared with {target_selected.shape[0]}")
    own, target = membership(selected, entries), membership(target_selected, entries)
    return (own & target).count_nonzero(1), own.count_nonzero(1), target.count_nonzero(1)


def ordering_keys(scores: Tensor, visible: Tensor) -> Tensor:
    """Copy scores for ordering, fp32 or fp64 [rows, max(E, 1)]: -inf where NaN or invisible."""
    check_scores(scores, visible)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if wide.shape[1] == 0:  # one column stays for a gather to point at
        return wide.new_full((wide.shape[0], 1), -torch.inf)
    entry = torch.arange(wide.shape[1], device=wide.device)
    return torch.where((entry >= visible[:, None]) | wide.isnan(), -torch.inf, wide)


def best_keys(keys: Tensor, count: int) -> Tensor:
    """Give the `count` largest keys of each row in falling order, then -inf: [rows, count]."""
    if count < 1:
        raise ValueError(f"k must be at least 1, not {count}")
    best = keys.topk(min(count, keys.shape[1]), dim=1).values
    return torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-torch.inf)


def selected_keys(keys: Tensor, selected: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Give the key of each selected entry, and whether it counts: visible, and the first of its kind."""
    check_rows(visible, selected)
    index = _distinct(selected, keys.shape[1])
    return keys.gather(1, index.clamp_min(0)), (index >= 0) & (index < visible[:, None])


def _gaps(target_scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Give tau minus the largest score strictly below it: fp64 [rows], NaN if there is none."""
    keys = ordering_keys(target_scores, visible)
    taus = best_keys(keys, k)[:, -1:]
    lower = keys.masked_fill_(keys >= taus, -torch.inf).amax(1).double()
    return torch.where(lower == -torch.inf, torch.nan, taus[:, 0].double() - lower)


def _blocks(a: Tensor, b: Tensor, visible: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Give blocks of rows in fp64, 0 on both sides where invisible or the same infinity or NaN."""
    check_scores(a, visible)
    check_scores(b, visible)
    if a.shape != b.shape:
        raise ValueError(f"scores {tuple(a.shape)} are compared with {tuple(b.shape)}")
    entry = torch.arange(a.shape[1], device=a.device)
    step = max(1, BLOCK_ELEMENTS // max(1, a.shape[1]))
    for start in range(0, a.shape[0] if a.shape[1] else 0, step):
        block = slice(start, start + step)
        wide_a, wide_b = a[block].double(), b[block].double()
        agreed = (wide_a.isnan() & wide_b.isnan()) | (wide_a.isinf() & (wide_a == wide_b))
        left_out = agreed | (entry >= visible[block, None])
        yield block, wide_a.masked_fill(left_out, 0.0), wide_b.masked_fill(left_out, 0.0)


def finite(value: float | None) -> float | None:
    """JSON has no NaN or inf: those become None."""
    return value if value is None or math.isfinite(value) else None
