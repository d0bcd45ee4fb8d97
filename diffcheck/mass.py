"""Lost attention mass: how much of the main attention's weight lies on entries that a deployment drops.

The weight of an entry is its share in the softmax over all visible compressed entries, mean over heads, recorded by the
forward pass. Lost is the part of a row's weight on entries that the target selects and the deployment does not. Where
only an indexer's trace exists the weight is unknown, and so is this number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .metrics import check_rows, counted_rows, membership


@dataclass(frozen=True, slots=True, kw_only=True)
class LostMass:
    """Mean and worst of the rows' lost shares, the row number of the worst, and how many rows count."""

    mean: float
    worst: float
    worst_row: int
    rows: int


def lost_mass(*, mass: Tensor, selected: Tensor, target_selected: Tensor, visible: Tensor, k: int) -> LostMass | None:
    """Lost share of the rows that see more than k entries; None where no such row has its mass.

    mass fp32 [rows, E], NaN throughout a row without it; selected, target_selected int [rows, any], -1 for none.
    """
    check_rows(visible, selected)
    check_rows(visible, target_selected)
    entries = mass.shape[1]
    dropped = membership(target_selected, entries) & ~membership(selected, entries)
    share = mass.double().masked_fill(~dropped, 0).sum(1)
    known = counted_rows(visible, k) & mass[:, 0].isfinite()
    if not known.any():
        return None
    share = share.masked_fill(~known, -1.0)
    worst = int(share.argmax())
    return LostMass(mean=float(share[known].mean()), worst=float(share[worst]), worst_row=worst, rows=int(known.sum()))
