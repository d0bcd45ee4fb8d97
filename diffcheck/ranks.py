"""Where entries rank by score, and which ranks are selected: ranks, needles and survival.

Arguments are those of `metrics`, and so are the rows that count.

**Rank** of an entry = the number of visible entries with a strictly larger score, so 0 is best and equal
scores share a rank. A needle is a span of tokens that a query should find; it lives in all entries whose own
window of 4 tokens holds one of them. Its rank is the best of their ranks and it is selected if one of them
is. An entry that its row cannot see has no rank and is never found.

**Survival.** Entries are binned by r/k, r being the rank by the target's scores. p is the share of a bin's
entries that is selected, pooled over rows, with a bootstrap interval. Below 1 that is survival; [1, 1.5)
holds false admissions. Because ties share a rank, all that tie at the k-th place have r < k and a perfect
selection keeps p < 1 there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .metrics import (
    best_keys,
    check_range,
    check_rows,
    check_scores,
    counted_rows,
    membership,
    ordering_keys,
    selected_keys,
)
from .refimpl.compressor import WINDOW
from .statistics import bootstrap, resampling_groups

BIN_EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """Rank (None: not visible) and selection of each needle, and the median of the ranks there are."""

    ranks: list[int | None]
    selected: list[bool]
    rank_median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Entries with lo <= r/k < hi: the share p selected of n, and its interval; None: nothing to estimate."""

    lo: float
    hi: float
    p: float | None
    n: int
    ci: tuple[float, float] | None


def ranks(*, scores: Tensor, visible: Tensor, entries: Tensor) -> Tensor:
    """Rank `entries`, int [rows, m] with -1 for none: int64 [rows, m], -1 for what the row cannot see."""
    check_rows(visible, entries)
    keys = ordering_keys(scores, visible)
    check_range(entries, keys.shape[1])
    index = entries.long()
    on_host = keys.device.type == "cpu"  # where numpy sorts several times faster than torch
    rising = torch.from_numpy(np.sort(keys.numpy(), axis=1)) if on_host else keys.sort(dim=1).values
    larger = keys.shape[1] - torch.searchsorted(rising, keys.gather(1, index.clamp_min(0)), right=True)
    return torch.where((index >= 0) & (index < visible[:, None]), larger, -1)


def needle_entries(first_token: int, last_token: int) -> range:
    """Give the entries whose own window holds one of the tokens first_token … last_token, both included."""
    if not 0 <= first_token <= last_token:
        raise ValueError(f"tokens {first_token} to {last_token} are no needle")
    return range(first_token // WINDOW, last_token // WINDOW + 1)


def needles(*, scores: Tensor, selected: Tensor, visible: Tensor, spans: Sequence[range]) -> Needles:
    """Say of each needle where it ranks and whether it was selected.

    Row i is the query of needle i, and spans[i] its entries from `needle_entries`, which must end within E.
    """
    check_scores(scores, visible)
    check_rows(visible, selected)
    if len(spans) != len(visible):
        raise ValueError(f"{len(spans)} needles for {len(visible)} query rows")
    found_ranks: list[int | None] = []
    found: list[bool] = []
    for row, span in enumerate(spans):
        if not 0 <= span.start < span.stop <= scores.shape[1]:
            raise ValueError(f"needle {row} lies in {span} of {scores.shape[1]} entries")
        one = slice(row, row + 1)
        entries = torch.arange(span.start, span.stop, device=scores.device)[None]
        rank = ranks(scores=scores[one], visible=visible[one], entries=entries)
        seen = rank >= 0
        found_ranks.append(int(rank[seen].min()) if seen.any() else None)
        found.append(bool((membership(selected[one], scores.shape[1]).gather(1, entries) & seen).any()))
    known = [rank for rank in found_ranks if rank is not None]
    return Needles(ranks=found_ranks, selected=found, rank_median=float(np.median(known)) if known else None)


def survival(
    *,
    selected: Tensor,
    target_scores: Tensor,
    visible: Tensor,
    k: int,
    sequences: Tensor | None = None,
    seed: int = 0,
) -> list[Bin]:
    """Give the share selected by rank, a `Bin` for each two neighbours in BIN_EDGES.

    `sequences`, int [rows], says which sequence a row belongs to (None: there is one); `seed` is that of the
    bootstrap. Nothing is ranked: r < c exactly if the score is at least the c-th largest, so a few order
    statistics of a row decide every bin.
    """
    counted = counted_rows(visible, k)
    keys = ordering_keys(target_scores, visible)
    edges = [math.ceil(edge * k) for edge in BIN_EDGES]  # r/k < edge exactly if r < ceil(edge * k)
    best = best_keys(keys, edges[-1])
    own, held = selected_keys(keys, selected, visible)
    level_last = (keys >= best[:, -1:]).count_nonzero(1)[:, None]
    below_n, below_found = [torch.zeros_like(level_last)], [torch.zeros_like(level_last)]
    for edge in edges[1:]:
        floor = best[:, edge - 1 : edge]
        # What ties with the last of `best` goes on beyond it, and -inf is also what invisible entries score.
        size = torch.where(floor == best[:, -1:], level_last, (best >= floor).sum(1, keepdim=True))
        below_n.append(torch.where(floor == -torch.inf, visible[:, None], size))
        below_found.append((held & (own >= floor)).sum(1, keepdim=True))
    n_bins = torch.cat(below_n, 1)[counted].diff(dim=1).cpu().numpy()
    found_bins = torch.cat(below_found, 1)[counted].diff(dim=1).cpu().numpy()
    sequence = None if sequences is None else sequences[counted].cpu().numpy()
    groups = resampling_groups(len(n_bins), sequences=sequence)
    bins = []
    for (lo, hi), n, found in zip(pairwise(BIN_EDGES), n_bins.T, found_bins.T, strict=True):
        share = bootstrap(found, weights=n, groups=groups, seed=seed)
        p, ci = (share.estimate, share.ci) if share else (None, None)
        bins.append(Bin(lo=lo, hi=hi, p=p, n=int(n.sum()), ci=ci))
    return bins
