"""What must hold of a selection, whatever selected it: no reference needed, only the scores it was made from.

Of a row that sees V entries and keeps k: the number of selected entries is min(k, V); they are all different, in
range, and visible; no kept entry scores less than a dropped one (`min kept >= max dropped`); the same call gives the
same set again. `tie mass` is how many visible entries have exactly the k-th score: where it exceeds the places left,
several selections are right and a kernel may differ from run to run.

Causes are named as faults are: `topk_drop` (winners dropped), `topk_slots` (missing, repeated or impossible entries),
`mask` (an entry that the row must not see).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

MEANING = {
    "topk_drop": "top-k drops winners: a dropped entry scores more than a kept one",
    "topk_slots": "top-k leaves places empty, repeats entries or returns impossible ones",
    "mask": "top-k returns entries that the row must not see",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCheck:
    """Numbers of rows in which each invariant fails, out of `rows`.

    count, unique, in_range, causal, order: see the module; wrong_values: entries missing from the sets of rows that
    drop winners; unrepeatable: rows whose set changed on a repeated call (None if it was not repeated); tied: rows
    where the k-th score leaves a choice.
    """

    rows: int
    count: int
    unique: int
    in_range: int
    causal: int
    order: int
    wrong_values: int
    unrepeatable: int | None
    tied: int

    @property
    def causes(self) -> list[str]:
        """Ids of the faults that the failed invariants mean; empty when the selection is right."""
        found = ["topk_slots"] if self.count or self.unique or self.in_range else []
        found += ["mask"] if self.causal else []
        return found + (["topk_drop"] if self.order else [])

    @property
    def wrong_rows(self) -> int:
        """Rows that fail the invariant that most rows fail."""
        return max(self.count, self.unique, self.in_range, self.causal, self.order)

    def to_json(self) -> dict[str, Any]:
        """All numbers and the causes."""
        return asdict(self) | {"causes": self.causes}


def check_selection(
    selected: Tensor, scores: Tensor, visible: Tensor, k: int, *, again: Sequence[Tensor] = ()
) -> SelectionCheck:
    """Check int [rows, places] selections (-1 empty) against the scores [rows, E] that they were made from.

    visible: int [rows], entries that each row may read. `again` are selections of repeated calls. NaN scores rank
    below all others. Runs on blocks of rows.
    """
    rows, entries = scores.shape
    failed = dict.fromkeys(("count", "unique", "in_range", "causal", "order", "wrong_values", "tied"), 0)
    block = max(1, (1 << 24) // max(entries, 1))
    changed = 0
    for first in range(0, rows, block):
        part = slice(first, first + block)
        for name, value in _check_block(selected[part].long(), scores[part], visible[part].long(), k).items():
            failed[name] += value
        sets = [_sorted(s[part]) for s in (selected, *again)]
        changed += int(torch.stack([(s != sets[0]).any(1) for s in sets]).any(0).sum())
    return SelectionCheck(rows=rows, unrepeatable=changed if again else None, **failed)


def _sorted(selected: Tensor) -> Tensor:
    return selected.long().sort(dim=1).values


def _check_block(selected: Tensor, scores: Tensor, visible: Tensor, k: int) -> dict[str, int]:
    rows, entries = scores.shape
    used = selected >= 0
    ranged = used & (selected < entries)
    kept = torch.zeros(rows, entries + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, torch.where(ranged, selected, entries), True)
    kept = kept[:, :entries]
    seen = torch.arange(entries, device=scores.device) < visible[:, None]
    wanted = visible.clamp(max=k)
    values = scores.float().nan_to_num(nan=-torch.inf)
    # torch.where and not masked_fill, so that an infinite score stays what it is
    lowest_kept = torch.where(kept & seen, values, torch.inf).amin(1)
    highest_dropped = torch.where(seen & ~kept, values, -torch.inf).amax(1)
    order = highest_dropped > lowest_kept
    best = torch.where(seen, values, -torch.inf).topk(min(k, entries), dim=1).values
    kth = best.gather(1, (wanted - 1).clamp_min(0)[:, None])
    must = ((values > kth) & seen & ~kept).sum(1)
    level = ((values == kth) & seen).sum(1)
    places = wanted - ((values > kth) & seen).sum(1)
    return {
        "count": int((used.sum(1) != wanted).sum()),
        "unique": int((kept.sum(1) != ranged.sum(1)).sum()),
        "in_range": int((used != ranged).any(1).sum()),
        "causal": int((kept & ~seen).any(1).sum()),
        "order": int(order.sum()),
        "wrong_values": int(must[order].sum()),
        "tied": int(((level > places) & (wanted > 0)).sum()),
    }
