"""Lost attention mass: how much of the main attention's weight lies on entries that a deployment drops.

The weight of an entry is its share in the softmax over all visible compressed entries, mean over heads, recorded by the
forward pass. Lost is the part of a row's weight on entries that the target selects and the deployment does not. Where
only an indexer's trace exists the weight is unknown, and so is this number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .metrics import check_rows, counted_rows, membership


@dataclass(frozen=True, slots=True, kw_only=True)
class LostMass:
    """Mean and worst of the rows' lost shares, the row number of the worst, and how many rows count."""

    mean: float
    worst: float
    worst_row: int
    rows: int


def lost_shares(*, mass: Tensor, selected: Tensor, target_selected: Tensor, visible: Tensor, k: int) -> Tensor:
    """Lost share of each row, fp64 [rows]; NaN in a row that sees at most k entries or has no mass.

    mass fp32 [rows, E], NaN throughout a row without it; selected, target_selected int [rows, any], -1 for none.
    """
    check_rows(visible, selected)
    check_rows(visible, target_selected)
    entries = mass.shape[1]
    dropped = membership(target_selected, entries) & ~membership(selected, entries)
    known = counted_rows(visible, k) & mass[:, 0].isfinite()
    return mass.double().masked_fill(~dropped, 0).sum(1).masked_fill(~known, torch.nan)


def lost_mass(shares: Tensor) -> LostMass | None:
    """Summarise `lost_shares`; None where no row has one."""
    known = ~shares.isnan()
    if not known.any():
        return None
    worst = int(shares.masked_fill(~known, -1.0).argmax())
    return LostMass(
        mean=float(shares[known].mean()), worst=float(shares[worst]), worst_row=worst, rows=int(known.sum())
    )
