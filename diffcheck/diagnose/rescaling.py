"""Positive factors that change no selection.

Multiplying one token's query (every head alike) or one row of scores by a positive number leaves the order of that
row's scores as it is; so does a factor for each token and head that is divided out of the gates again, as engines do
with the scale of quantised queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compare import OFF_BY_ULP_SHARE
from .distance import score_distance

FEW_ULPS = 2.0**-7
"""Two bf16 units: a rounding of the scaled value, and one of the scale."""


def row_scale(seen: Tensor, predicted: Tensor, *, hidden: float | None = None) -> Tensor | None:
    """Factors [rows, H] (or [rows, 1]) by which `seen` is `predicted` up to rounding; None if it is not.

    seen, predicted: [rows, H, D], or [rows, n] with one factor a row. hidden: scores at or below are left out.
    """
    a, b = seen.float(), predicted.float()
    if hidden is not None:
        both = (a > hidden) & (b > hidden)
        a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    if not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        return None
    power = b.square().sum(-1)
    scale = (a * b).sum(-1) / power.clamp_min(1e-30)
    scale = torch.where(power > 0, scale, 1.0)
    if not bool((scale > 0).all()):
        return None
    factors = scale if scale.dim() == 2 else scale[:, None]
    if bool(((factors - 1).abs() < 1e-3).all()):
        return None
    restored = a / scale.unsqueeze(-1)
    if hidden is not None:
        masked = torch.where(seen.float() > hidden, restored, -torch.inf)
        return factors if score_distance(masked, predicted, torch.ones(seen.shape[1], dtype=torch.bool)).fits else None
    # a factor that is no power of two moves the last digit of every element
    close = (restored - b).abs() <= FEW_ULPS * b.abs()
    return factors if float(close.float().mean()) >= 1 - OFF_BY_ULP_SHARE else None
