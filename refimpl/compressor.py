"""The compressor: four tokens become one index key, pooled over two windows that overlap.

Every token projects to kv and gate of 2*D columns each. Entry i pools 8 slots: the first D columns of the tokens of
window i-1 and the last D columns of the tokens of window i, weighted per channel by a softmax of the gates (to which
a learned row per position in the window, ape, was added). Entry 0 has no previous window: kv 0, gate -inf.

In a stream, what must survive between calls is the previous window and the at most three tokens of the open one. An
entry appears when its fourth token arrives. Letters: T tokens, E entries, D index head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 4
POOL_TILE = 64
"""Entries pooled together, fixed for the same reason as the row tiles of `linear`."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The end of a stream of projections: kv and gate (+ ape) fp32 [4 + open, 2D], open = position % 4.

    The first four rows are the last complete window (kv 0 and gate -inf before there is one).
    """

    kv: Tensor
    gate: Tensor

    @staticmethod
    def start(columns: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> PoolState:
        """The state before the first token."""
        kv = torch.zeros(WINDOW, columns, device=device, dtype=dtype)
        return PoolState(kv=kv, gate=torch.full_like(kv, -torch.inf))

    def then(self, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, PoolState]:
        """Append projections [T, 2D]; returns the windows kv, gate [E+1, 4, 2D] that can be pooled, and the new state.

        Windows i and i+1 of the result make entry i of this call.
        """
        kv, gate = torch.cat((self.kv, kv)), torch.cat((self.gate, gate))
        windows = kv.shape[0] // WINDOW
        keep = (windows - 1) * WINDOW
        state = PoolState(kv=kv[keep:].clone(), gate=gate[keep:].clone())
        shape = (windows, WINDOW, -1)
        return kv[: windows * WINDOW].view(shape), gate[: windows * WINDOW].view(shape), state


def window_slots(windows: Tensor) -> Tensor:
    """[n+1, 4, 2D] -> [n, 8, D]: first columns of the previous window, then last columns of the own one."""
    half = windows.shape[-1] // 2
    return torch.cat((windows[:-1, :, :half], windows[1:, :, half:]), dim=1)


def softmax_pool(kv: Tensor, gate: Tensor) -> Tensor:
    """Weighted sum over the 8 slots of kv, gate [n, 8, D], per channel -> [n, D], not rounded."""
    return (kv * gate.softmax(dim=1)).sum(dim=1)


def pool_windows(kv: Tensor, gate: Tensor, pool: Callable[[Tensor, Tensor], Tensor] = softmax_pool) -> Tensor:
    """Pool all windows [E+1, 4, 2D] to entries [E, D] in kv's dtype, POOL_TILE entries at a time."""
    entries = kv.shape[0] - 1
    out = torch.empty(entries, kv.shape[-1] // 2, dtype=kv.dtype, device=kv.device)
    for first in range(0, entries, POOL_TILE):
        count = min(POOL_TILE, entries - first)
        part = slice(first, first + count + 1)
        slots = [window_slots(t[part]) for t in (kv, gate)]
        if count < POOL_TILE:
            slots = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, POOL_TILE - count)) for t in slots]
        out[first : first + count] = pool(*slots)[:count]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, fp32 inside and out."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
