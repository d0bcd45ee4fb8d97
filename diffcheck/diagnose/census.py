"""Invariants of scores that need no arm: NaN, exact zeros by page, rows of nothing but zeros.

A score is exactly zero only where no head's product is positive. Where a whole page of entries is zero and the
prediction is not, the page was not read (an offset that overflowed); NaN from finite queries and keys is memory that
nobody wrote; a row of zeros is a row that was not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .distance import HIDDEN_SCORE

PAGE = 64
MOST = 0.9
FEWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """Something that must not be, whatever the recipe, in `failed` of `rows` rows (or entries, for pages)."""

    stage: str
    cause: str
    failed: int
    rows: int
    wrong_values: int = 0
    where: str = ""
    field: str | None = None
    value: Any = None
    explained: float = 1.0


def without_gaps(seen: Tensor, predicted: Tensor, known: Tensor) -> tuple[Tensor, list[Breach]]:
    """Scores [rows, E] with the prediction in the place of what was never computed, and what that was.

    known: bool [E], columns that can be predicted. Returns `seen` itself where nothing is wrong.
    """
    there = (predicted > HIDDEN_SCORE) & known
    nan = seen.isnan() & there & ~predicted.isnan()
    zero = (seen == 0) & (predicted != 0) & there
    found: list[Breach] = []
    rows = len(seen)
    if bool(nan.any()):
        columns = nan.any(0).nonzero().flatten()
        text = f"{int(nan.sum())} scores are NaN, entries {int(columns[0])} to {int(columns[-1])}"
        text += ": unwritten memory was scored"
        found.append(
            Breach(stage="scores", cause="stale_page", failed=int(nan.any(1).sum()), rows=rows, where=text, value="NaN")
        )
    nothing = (zero.sum(1) >= MOST * there.sum(1)) & (there.sum(1) >= FEWEST)
    if bool(nothing.any()):
        text = f"all scores are zero in {int(nothing.sum())} of {rows} rows"
        found.append(
            Breach(stage="scores", cause="unknown", failed=int(nothing.sum()), rows=rows, where=text, explained=0.0)
        )
    partly = zero & ~nothing[:, None]
    seeing = (there & ~nothing[:, None]).sum(0)
    empty = (partly.sum(0) >= MOST * seeing) & (seeing > 0)
    pages = [p for p in range(-(-len(empty) // PAGE)) if _whole(empty, seeing, p)]
    gone = torch.zeros_like(empty)
    if pages:
        for page in pages:
            gone[page * PAGE : (page + 1) * PAGE] = True
        listed = ", ".join(map(str, pages[:6]))
        text = f"scores of whole pages are exactly zero: entries of logical pages {listed}"
        touched = (zero & gone).any(1)
        found.append(
            Breach(
                stage="scores", cause="page_offset", failed=int(touched.sum()), rows=rows, where=text,
                value=f"pages {listed}",
            )
        )  # fmt: skip
    if not found:
        return seen, []
    patch = nan | (zero & nothing[:, None]) | (zero & gone)
    return torch.where(patch, predicted.to(seen.dtype), seen), found


def _whole(empty: Tensor, seeing: Tensor, page: int) -> bool:
    part = slice(page * PAGE, (page + 1) * PAGE)
    seen = seeing[part] > 0
    return bool(seen.any()) and bool(empty[part][seen].float().mean() >= MOST)
