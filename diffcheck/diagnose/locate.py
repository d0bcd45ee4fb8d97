"""Where an error lies and what shape it has, in words: dims, heads, positions, slots, pages; sign, factor, order.

Only what is true of the data is said: a part of the dims (or heads, or rows) is named when at least 99 % of the squared
error lies in it and it is no more than half of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..refimpl.compressor import WINDOW
from ..stages import GRAPH
from .distance import HIDDEN_SCORE
from .evidence import Evidence

if TYPE_CHECKING:
    from .engine import Hit

MOST = 0.99
PAGE = 64
"""Entries of a page."""


def locate(hit: Hit, evidence: Evidence) -> str:
    """Place and shape of the difference of a hit, "" where it says nothing."""
    if hit.observation is None or hit.prediction is None:
        return "" if hit.observed != "topk" else f"in {hit.base.rows} of {len(hit.base.energy)} rows"
    seen, predicted = hit.observation.float(), hit.prediction.float()
    gap = (seen - predicted).nan_to_num(0.0)
    if hit.observed == "scores":
        both = (seen > HIDDEN_SCORE) & (predicted > HIDDEN_SCORE)
        gap = torch.where(both, gap, 0.0)
    parts = []
    if hit.observed not in ("scores", "gate"):
        parts.append(_dims(gap, evidence, hit.observed))
    if gap.dim() == 3:
        parts.append(_heads(gap))
    parts.append(_rows(hit, evidence))
    if hit.observed == "scores":
        parts.append(_columns(gap, seen, predicted))
    parts.append(_shape(seen, predicted, gap, hit.observed))
    return ", ".join(part for part in parts if part)


def _dims(gap: Tensor, evidence: Evidence, stage: str) -> str:
    """A share of the dims that holds the error; said before the Hadamard rotation only, which mixes them."""
    if stage.endswith(("hadamard", "quant")):
        return ""
    energy = gap.double().square().flatten(0, -2).sum(0)
    total, dim = float(energy.sum()), len(energy)
    if total == 0:
        return ""
    rope = evidence.config.rope_head_dim
    named = {
        "rope dims only": slice(dim - rope, dim), "first dims only, as many as RoPE rotates": slice(0, rope),
        "dims without RoPE only": slice(0, dim - rope), "first half of the dims only": slice(0, dim // 2),
        "even dims only": slice(0, dim, 2), "odd dims only": slice(1, dim, 2),
    }  # fmt: skip
    for name, part in named.items():
        if float(energy[part].sum()) >= MOST * total and len(energy[part]) <= dim // 2:
            return name
    return "all dims"


def _heads(gap: Tensor) -> str:
    energy = gap.double().square().sum((0, 2))
    order = energy.argsort(descending=True)
    needed = int((energy[order].cumsum(0) < MOST * energy.sum()).sum()) + 1
    if needed > len(energy) // 2:
        return ""
    heads = sorted(order[:needed].tolist())
    return f"heads {', '.join(map(str, heads[:6]))}{' …' if len(heads) > 6 else ''} only"


def _rows(hit: Hit, evidence: Evidence) -> str:
    energy = hit.base.energy
    wrong = torch.nonzero(energy > 0).flatten()
    if not len(wrong):
        return ""
    if GRAPH[hit.observed].query_side:
        positions = hit.positions[wrong] if hit.positions is not None else wrong
        noun = "position"
    else:
        positions, noun = wrong + evidence.start // WINDOW, "entry"
        slots = (positions % PAGE).unique()
        if len(slots) <= PAGE // 4 and len(wrong) >= 4 * len(slots):
            return f"slots {', '.join(map(str, slots[:6].tolist()))} of each page only"
    first = int(positions[0])
    text = f"from {noun} {first} on" if len(wrong) > 0.5 * len(energy) else f"{len(wrong)} of {len(energy)} rows"
    if len(wrong) < 16:
        return text
    quarter = len(energy) // 4
    early, late = float(energy[:quarter].mean()), float(energy[-quarter:].mean())
    return text + (", growing with position" if quarter and late > 3 * early and early >= 0 else "")


def _columns(gap: Tensor, seen: Tensor, predicted: Tensor) -> str:
    """What is special about the entries of wrong scores."""
    here, there = seen > HIDDEN_SCORE, predicted > HIDDEN_SCORE
    more, fewer = int((here & ~there).sum()), int((there & ~here & ~seen.isnan()).sum())
    parts = []
    if more or fewer:
        parts.append(f"{more} entries visible that should not be, {fewer} hidden that should not be")
    zeros = (seen == 0) & (predicted != 0) & there
    rows = zeros.sum(1) == there.sum(1)
    if bool((rows & there.any(1)).any()):
        parts.append(f"all-zero rows: {int((rows & there.any(1)).sum())}")
    elif int(zeros.sum()) > 0.01 * int(there.sum()):
        parts.append(f"{int(zeros.sum())} exact zeros")
    if bool(seen.isnan().any()):
        parts.append(f"{int(seen.isnan().sum())} NaN")
    return ", ".join(parts)


def _shape(seen: Tensor, predicted: Tensor, gap: Tensor, stage: str) -> str:
    """Sign, constant factor, power of two, or a permutation of the dims."""
    if stage == "scores":
        both = (seen > HIDDEN_SCORE) & (predicted > HIDDEN_SCORE)
        a, b = seen[both], predicted[both]
    else:
        a, b = seen.flatten(), predicted.flatten()
    ok = a.isfinite() & b.isfinite()
    a, b = a[ok].double(), b[ok].double()
    power = float(b.square().sum())
    if not len(a) or power == 0:
        return ""
    factor = float((a * b).sum()) / power
    rest = float((a - factor * b).square().sum())
    if rest < 1e-4 * float(a.square().sum()) and abs(factor - 1) > 1e-3:
        two = torch.tensor(abs(factor)).log2()
        kind = "power of two" if abs(float(two) - round(float(two))) < 1e-3 else "constant factor"
        return "sign flipped" if abs(factor + 1) < 1e-3 else f"{kind} {factor:.4g}"
    if stage == "scores" or seen.dim() < 2 or seen.shape[-1] > 1024:
        return ""
    ordered = (seen.sort(-1).values - predicted.sort(-1).values).double().square().sum()
    if float(ordered) < 1e-4 * float(gap.double().square().sum()):
        return "the right values in another order of dims"
    if bool((seen.abs() == predicted.abs()).all()):
        return "right magnitudes, wrong signs"
    return ""
