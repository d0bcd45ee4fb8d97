"""Values that the observations themselves suggest, so that a wrong number need not be in any list.

RoPE multiplies the complex pair i of a row at position p by m * exp(1j * f_i * p). With the pairs before and after,
c_i(p) = sum over heads of after * conj(before) has that phase, whatever the data are. So theta is the one that
maximises sum_i sum_p Re c_i(p) exp(-1j f_i(theta) p), a matched filter over a fine logarithmic grid that is then
refined; the mscale is that sum over the energy before the rotation; an offset of the position maximises the same sum.
"After" may be any later stage on the same side: the Hadamard rotation is its own inverse, and quantisation is noise
that averages out.

From a selection: k and the mask follow from how many entries rows select and which is the largest.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..recipe import Recipe
from ..refimpl import IndexerConfig, Yarn
from ..refimpl.compressor import WINDOW
from ..refimpl.rotation import hadamard, inverse_frequencies

_GRID = 2400
_LOWEST, _HIGHEST = 5e2, 2e8
_ROWS = 192
_SHIFTS = (0, 3, 4, -1, 1, 2, -2, -3, -4, 7, 8, -8)
_OFFSETS = torch.arange(-16, 17)


def rotation_hints(
    before: Tensor,
    after: Tensor,
    positions: Tensor,
    recipe: Recipe,
    side: Literal["q", "k"],
    *,
    rotated: bool,
    start: int,
) -> dict[str, list[Any]]:
    """Theta, mscale and position offset of one side, by full field name; values to try, likeliest first.

    before, after: [rows, (heads,) D] of the same rows, float; after through the Hadamard rotation if `rotated`.
    positions: token position that the recipe gives each row, offset included.
    """
    step = max(1, len(positions) // _ROWS)
    before, after, positions = before[::step].float(), after[::step].float(), positions[::step]
    if rotated:
        after = hadamard(after)
    ok = after.flatten(1).isfinite().all(1) & before.flatten(1).isfinite().all(1)
    before, after, positions = before[ok], after[ok], positions[ok].double()
    if not len(positions):
        return {}
    z, w = (_pairs(t, recipe, side) for t in (before, after))
    turn = (w * z.conj()).flatten(1, -2).sum(1) if z.dim() > 2 else w * z.conj()
    energy = float(z.abs().square().sum())
    if energy == 0 or float(turn.abs().sum()) == 0:
        return {}
    turn = turn.to(torch.complex64)
    yarn, theta = getattr(recipe, f"{side}_yarn"), getattr(recipe, f"{side}_theta")
    found: dict[str, list[Any]] = {}
    thetas: list[float] = []
    for ramp in dict.fromkeys((yarn, None)):
        best = _best_theta(turn, positions, recipe.rope_dims, ramp)
        thetas += [float(f"{best:.{digits}g}") for digits in (1, 2, 3, 4, 6)]
    found[f"{side}_theta"] = list(dict.fromkeys(thetas))
    frequencies = inverse_frequencies(theta, recipe.rope_dims, yarn).double()
    scale = _match(turn, positions, frequencies) / energy
    if 0.1 < scale < 10:
        found[f"{side}_mscale"] = list(dict.fromkeys(float(f"{scale:.{digits}g}") for digits in (2, 3, 4, 6)))
    offset = int(
        _OFFSETS[int(torch.tensor([_match(turn, positions + int(o), frequencies) for o in _OFFSETS]).argmax())]
    )
    current = getattr(recipe, f"{side}_position_offset")
    restart = -(start // WINDOW * WINDOW if side == "k" else start)
    found[f"{side}_position_offset"] = [current + o for o in dict.fromkeys((offset, restart)) if o]
    return found


def _pairs(x: Tensor, recipe: Recipe, side: str) -> Tensor:
    """Complex pairs [..., R/2] of the dims that the recipe rotates."""
    dims = recipe.rope_dims
    part = x[..., :dims] if getattr(recipe, f"{side}_slice") == "first" else x[..., -dims:]
    if getattr(recipe, f"{side}_pairing") == "half":
        return torch.complex(part[..., : dims // 2].contiguous(), part[..., dims // 2 :].contiguous())
    return torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())


def _match(turn: Tensor, positions: Tensor, frequencies: Tensor) -> float:
    angle = (positions[:, None] * frequencies).float()
    return float((turn.real * angle.cos() + turn.imag * angle.sin()).double().sum())


def _best_theta(turn: Tensor, positions: Tensor, dims: int, yarn: Yarn | None) -> float:
    def scores(thetas: Tensor) -> Tensor:
        table = torch.stack([inverse_frequencies(float(t), dims, yarn) for t in thetas]).double()
        values = []
        for part in table.split(64):
            angle = (positions[None, :, None] * part[:, None, :]).float()
            values.append((turn.real * angle.cos() + turn.imag * angle.sin()).sum((1, 2)))
        return torch.cat(values)

    grid = torch.logspace(math.log10(_LOWEST), math.log10(_HIGHEST), _GRID, dtype=torch.float64)
    value = scores(grid)
    ratio = float(grid[1] / grid[0])
    best, height = float(grid[int(value.argmax())]), -torch.inf
    for start in value.topk(min(6, len(value))).indices.tolist():
        centre, width = float(grid[start]), ratio
        for _ in range(5):
            fine = centre * width ** torch.linspace(-1, 1, 33, dtype=torch.float64)
            found = scores(fine)
            centre, width = float(fine[int(found.argmax())]), width ** (1 / 12)
        if float(found.max()) > height:
            best, height = centre, float(found.max())
    return best


def selection_hints(selected: Tensor, queries: Tensor, recipe: Recipe, entries: int) -> dict[str, list[Any]]:
    """k and mask_shift that explain how many entries each row selects and which is the largest.

    selected int64 [rows, places] without repeats; queries are token positions; entries exist in all.
    """
    count, largest = (selected >= 0).sum(1), selected.amax(1)
    k = int(count.max())
    found: dict[str, list[Any]] = {"k": [k] if k else []}
    for shift in (recipe.mask_shift, *_SHIFTS, WINDOW * entries):
        visible = ((queries + 1 + shift) // WINDOW).clamp(0, entries)
        agreed = [int(((count == visible.clamp(max=n)) & (largest < visible)).sum()) for n in (k, recipe.k)]
        if max(agreed) >= 0.99 * len(count):
            found["mask_shift"] = [shift]
            break
    return found


def score_hints(scores_visible: Tensor, queries: Tensor, recipe: Recipe, entries: int) -> dict[str, list[Any]]:
    """mask_shift that explains how many scores each row sees (int64 [rows])."""
    for shift in (recipe.mask_shift, *_SHIFTS, WINDOW * entries):
        visible = ((queries + 1 + shift) // WINDOW).clamp(0, entries)
        if int((visible == scores_visible).sum()) >= 0.99 * len(queries):
            return {"mask_shift": [shift]}
    return {}


def config_hints(config: IndexerConfig) -> dict[str, list[Any]]:
    """Values that a careless reader of the config takes: the main attention's theta beside the compressed layers'."""
    return {"theta": [10000.0]} if config.compress_rope_theta != 10000.0 else {}
