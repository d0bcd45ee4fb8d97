"""Scores and selection.

score[t, j] = sum over heads of gate[t, h] * relu(q[t, h] . k[j]). The dot is accumulated in fp32 and rounded to bf16,
the product with the gate is rounded to bf16, the sum over heads is fp32 inside and rounded to bf16. Entry j is visible
to token t iff j < (t + 1) // 4: a token may read the entry that it completes. Invisible scores are -inf.

The [T, H, E] products never exist at once: they are made in tiles of fixed size, which also keeps a score's bits
independent of how many rows and entries are computed with it. Letters: T query rows, H heads, E entries, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .compressor import WINDOW

ENTRY_TILE = 512
TILE_ROWS = 256
"""Rows (queries x heads) of one product on the CPU, sized so that a tile's temporaries stay in cache."""
CUDA_TILE_FACTOR = 16
"""How many times more rows and entries together a tile has on CUDA, where launches cost more than cache misses."""

Reduce = Callable[[Tensor, Tensor], Tensor]
"""(dots fp32 [t, H, e], gate [t, H]) -> scores [t, e]."""


def visible_entries(positions: Tensor) -> Tensor:
    """How many entries each token position may read, int64."""
    return (positions + 1) // WINDOW


def tiled_scores(
    q: Tensor,
    k: Tensor,
    gate: Tensor,
    visible: Tensor,
    reduce: Reduce,
    dtype: torch.dtype,
    compute: torch.dtype,
) -> Tensor:
    """Scores [T, E] of q [T, H, D] against k [E, D]; entries at or beyond a row's `visible` are -inf.

    `reduce` turns one tile of dot products (in `compute`, fp32 or fp64) into scores of `dtype`.
    """
    rows, heads, _ = q.shape
    entries = k.shape[0]
    scores = torch.full((rows, entries), -torch.inf, dtype=dtype, device=q.device)
    factor = CUDA_TILE_FACTOR if q.is_cuda else 1
    row_tile = max(1, TILE_ROWS * factor // heads)
    entry_tile = ENTRY_TILE * factor
    columns = torch.arange(entries, device=q.device)
    bounds = visible.clamp(max=entries).tolist()
    padded_k = _pad_rows(k.to(compute), -(-max(entries, 1) // entry_tile) * entry_tile)
    for first in range(0, rows, row_tile):
        last = min(first + row_tile, rows)
        bound = max(bounds[first:last])
        q_tile = _pad_rows(q[first:last].to(compute), row_tile).flatten(0, 1)
        gate_tile = _pad_rows(gate[first:last], row_tile)
        for start in range(0, bound, entry_tile):
            dots = (q_tile @ padded_k[start : start + entry_tile].T).view(row_tile, heads, entry_tile)
            stop = min(start + entry_tile, entries)
            tile = reduce(dots, gate_tile)[: last - first, : stop - start]
            hidden = columns[start:stop] >= visible[first:last, None]
            scores[first:last, start:stop] = tile.masked_fill(hidden, -torch.inf)
    return scores


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat((x, x.new_zeros(rows - x.shape[0], *x.shape[1:])))


def reduce_heads_bf16(dots: Tensor, gate: Tensor) -> Tensor:
    """The reference's reduction: bf16 after the dot, after the gate product and after the sum over heads."""
    terms = dots.bfloat16().relu_() * gate.unsqueeze(-1)
    return terms.sum(dim=1, dtype=torch.float32).bfloat16()


def index_scores(q: Tensor, k: Tensor, gate: Tensor, positions: Tensor) -> Tensor:
    """The reference's scores, bf16 [T, E]; q, k, gate bf16, positions int64 [T]."""
    visible = visible_entries(positions)
    return tiled_scores(q, k, gate, visible, reduce_heads_bf16, torch.bfloat16, torch.float32)


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Indices int64 [T, min(k, E)] of the best entries, best first; slots beyond the visible count are -1.

    The published code leaves the order of equal scores open; here the lower index wins, so the result is a function.
    NaN ranks below every number. Runs on blocks of rows, since the sort keys take 8 bytes an entry.
    """
    rows, entries = scores.shape
    width = min(k, entries)
    out = torch.empty(rows, width, dtype=torch.int64, device=scores.device)
    if width == 0:
        return out
    index = torch.arange(entries, device=scores.device)
    block = max(1, (16 << 20) // entries)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        keys = sort_keys(scores[part]).masked_fill_(index >= visible[part, None], torch.iinfo(torch.int64).min)
        chosen = keys.topk(width, dim=1).indices
        empty = torch.arange(width, device=scores.device) >= visible[part, None]
        out[part] = chosen.masked_fill(empty, -1)
    return out


def sort_keys(scores: Tensor) -> Tensor:
    """int64 keys [T, E], all different within a row: ordered by score, then by lower index; NaN lowest.

    The high half is the score's bits made monotone (fp64 scores are ranked first, having too many bits); the low
    half counts down with the index.
    """
    entries = scores.shape[1]
    countdown = torch.arange(entries - 1, -1, -1, device=scores.device)
    if scores.dtype == torch.float64:
        order = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        high = torch.stack([torch.unique(row, return_inverse=True)[1] for row in order])
    else:
        bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes -0 equal to 0
        high = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        high = high.masked_fill(scores.isnan(), torch.iinfo(torch.int32).min)
    return (high << 32) | countdown
