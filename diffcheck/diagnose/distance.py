"""How far an observed stage is from a predicted one.

Both are compared in the coarser of their two types: a bf16 dump of an fp32 stage is held against the prediction
rounded to bf16. An fp32 observation whose values all lie on the prediction's own bf16 (fp16) grid was only stored wide;
one whose values do not is compared as it is, because it then says something about a rounding that did not happen.

    energy  = sum of squared differences, by row; what an arm *explains* is the share of it that vanishes
    fits    = by the rule of `compare.first_stage`: at most 1 % of the elements off by more than one unit in the last
              place and at most 5 % unequal, after rounding to the coarser type
    equal   = no element differs. Two fp32 tensors are equal where they differ by less than summation order does

One unit of an fp32 stage is taken as 2^-14 of the larger of the element and its row's RMS: two programs that sum in
fp32 in different orders stay below it, a rounding to bf16 does not.

Scores are compared where both sides see them; an entry that only one side sees counts as wrong by twice the RMS of the
row. A selection has no energy: its distance counts the misses of each row (see `selection_distance`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compare import OFF_BY_ULP_SHARE, UNEQUAL_SHARE
from ..metrics import tie_bands

FP32_UNIT = 2.0**-14
FP32_NOISE = 2.0**-18
HIDDEN_SCORE = -1e30
"""Scores at or below this are masked, however a deployment spells it."""
_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
_LARGEST = 1e4
"""Values count at most as this many times the median of what was observed, so that garbage does not drown the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """See the module docstring. energy: fp64 [rows]; differing, far: elements; rows: how many rows differ."""

    energy: Tensor
    elements: int
    differing: int
    fits: bool

    @property
    def total(self) -> float:
        """The energy of all rows."""
        return float(self.energy.sum())

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.differing == 0

    @property
    def rows(self) -> int:
        """How many rows differ."""
        return int((self.energy > 0).sum())


def common_type(observed: Tensor, predicted: Tensor) -> torch.dtype:
    """The coarser type of the two; bf16 where they are bf16 and fp16."""
    return min((observed.dtype, predicted.dtype), key=_DIGITS.__getitem__)


def aligned(observed: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both as fp32, the prediction rounded to what was observed, and the type in which they can be compared."""
    dtype = common_type(observed, predicted)
    if dtype is observed.dtype:
        return observed.float(), predicted.to(dtype).float(), dtype
    narrowed = observed.to(dtype)
    stored_wide = torch.equal(narrowed.to(observed.dtype).nan_to_num(), observed.nan_to_num())
    return observed.float(), predicted.float(), dtype if stored_wide else torch.float32


def distance(observed: Tensor, predicted: Tensor, mask: Tensor | None = None) -> Distance:
    """Distance of two stages of the same shape; `mask` (broadcast) leaves elements out."""
    a, b, dtype = aligned(observed, predicted)
    rows = a.shape[0]
    a, b = a.reshape(rows, -1), b.reshape(rows, -1)
    seen = torch.ones_like(a, dtype=torch.bool) if mask is None else mask.expand_as(observed).reshape(rows, -1)
    return _distance(a, b, dtype, common_type(observed, predicted), seen)


def _distance(a: Tensor, b: Tensor, dtype: torch.dtype, coarse: torch.dtype, seen: Tensor) -> Distance:
    count = seen.sum(1).clamp_min(1)
    known = torch.where(seen & b.isfinite(), b, 0.0)
    rms = (known.square().sum(1) / count).sqrt()
    # by what was observed, so that it is the same for every arm
    bound = _LARGEST * max(float(a[seen].abs().nanmedian()) if bool(seen.any()) else 0.0, 1e-30)
    same = (a == b) | (a.isnan() & b.isnan()) | ~seen
    gap = (a.clamp(-bound, bound) - b.clamp(-bound, bound)).nan_to_num(nan=bound)
    gap = torch.where(same, 0.0, gap)
    if dtype is torch.float32:
        gap = torch.where(gap.abs() <= FP32_NOISE * torch.maximum(b.abs(), rms[:, None]), 0.0, gap)
    elements = int(seen.sum())
    return Distance(
        energy=gap.double().square().sum(1),
        elements=elements,
        differing=int(gap.count_nonzero()),
        fits=_fits(a, b, coarse, rms, seen, elements),
    )


def _fits(a: Tensor, b: Tensor, dtype: torch.dtype, rms: Tensor, seen: Tensor, elements: int) -> bool:
    if dtype in (torch.float32, torch.float64):
        unit = FP32_UNIT * torch.maximum(b.abs(), rms[:, None])
        gap = (a - b).abs()
        unequal = (gap > unit) & seen & ~(a == b)
        return int(unequal.sum()) <= OFF_BY_ULP_SHARE * elements
    a, b = a.to(dtype).float(), b.to(dtype).float()
    unequal = (a != b) & ~(a.isnan() & b.isnan()) & seen
    if int(unequal.sum()) > UNEQUAL_SHARE * elements:
        return False
    ulp = torch.exp2(torch.floor(torch.log2(b[unequal].abs().clamp_min(1e-30)))) * 2.0 ** (1 - _DIGITS[dtype])
    far = ~((a[unequal] - b[unequal]).abs() <= ulp * 1.001)
    return int(far.sum()) <= OFF_BY_ULP_SHARE * elements


def score_distance(observed: Tensor, predicted: Tensor, known: Tensor) -> Distance:
    """Distance of scores [rows, E]; `known` bool [E] are the columns that can be predicted."""
    here, there = observed > HIDDEN_SCORE, predicted > HIDDEN_SCORE
    here, there = here | observed.isnan(), there | predicted.isnan()
    both = here & there & known
    a, b, dtype = aligned(observed, predicted)
    found = _distance(a, b, dtype, common_type(observed, predicted), both)
    one_sided = ((here != there) & known).sum(1)
    if not int(one_sided.sum()):
        return found
    value = torch.where(both & b.isfinite(), b, 0.0).double()
    scale = value.square().sum(1) / both.sum(1).clamp_min(1)
    scale = torch.where(scale > 0, scale, scale.mean().clamp_min(1e-30))
    return Distance(
        energy=found.energy + 4 * scale * one_sided,
        elements=found.elements + int(one_sided.sum()),
        differing=found.differing + int(one_sided.sum()),
        fits=False,
    )


def selection_distance(
    selected: Tensor, scores: Tensor, known: Tensor, expected: Tensor, *, bands: float = 1.0
) -> Distance:
    """Misses of selections int64 [rows, places] against predicted scores [rows, E].

    Of a row that selected n of the known entries, the n best by the predicted scores should have been selected; within
    one unit of the score's type at the n-th score any will do. Each entry selected instead of one of those is a miss,
    and so is each entry too many or too few (`expected` int64 [rows], counted over all entries). bands: units of the
    score's type within which scores count as equal.
    """
    rows, entries = scores.shape
    keys = torch.where(scores.isnan() | ~known, -torch.inf, scores.float())
    keys = torch.where(keys <= HIDDEN_SCORE, -torch.inf, keys)
    held = torch.zeros(rows, entries + 1, dtype=torch.bool)
    inside = (selected >= 0) & (selected < entries)
    held.scatter_(1, torch.where(inside, selected, entries), True)
    held = held[:, :entries]
    total = held.sum(1)
    own = held & known
    n = own.sum(1)
    width = int(n.max()) if rows else 0
    misses = torch.zeros(rows, dtype=torch.float64)
    if width:
        best = keys.topk(width, dim=1).values
        tau = best.gather(1, (n - 1).clamp_min(0)[:, None]).double()
        band = bands * tie_bands(tau, scores.dtype)
        must = (best.double() > tau + band).sum(1)
        above = (own & (keys.double() > tau + band)).sum(1)
        level = (own & (keys.double() >= tau - band) & (keys > -torch.inf) & (keys.double() <= tau + band)).sum(1)
        misses = (n - above - torch.minimum(n - must, level)).double()
    misses += (total - expected).abs()
    return Distance(
        energy=misses, elements=int(expected.sum()), differing=int(misses.sum()), fits=not bool(misses.any())
    )
