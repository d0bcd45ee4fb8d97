"""Ideal scores of one sequence, for planting: the reference's formulas with no rounding and no quantisation.

Weights are the stored values, dequantised; the RoPE table is the reference's; everything else is exact up to
the precision it runs in. Keys of the whole sequence are fp32, computed once; a query row, a single key and
the gradient are fp64. The Hadamard rotation is left out: applied to both sides it cancels from an exact dot
product.

    score (t, j) = sum over heads of gate[t, h] * relu(q[t, h] . k[j])

Letters: T tokens, E entries, V visible entries, H heads, D index head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..refimpl.compressor import WINDOW, pool_windows, rms_norm, softmax_pool, window_slots
from ..refimpl.config import IndexerConfig
from ..refimpl.errors import InputError
from ..refimpl.indexer import check_inputs
from ..refimpl.linear import exact_matmul, row_tiled_product
from ..refimpl.rotation import inverse_frequencies, rope_table
from ..refimpl.weights import IndexerWeights, dequantise_weight


@dataclass(frozen=True, slots=True)
class Windows:
    """What one entry pools, fp64 [8, 2D]: kv and gate + ape of tokens 4j-4 .. 4j+3 (absent ones: kv 0, gate
    -inf)."""

    kv: Tensor
    gate: Tensor


class IdealSequence:
    """A sequence and its ideal keys. `x` (bf16 [T, hidden], a copy) may be changed; `refresh` then updates
    the keys.

    Building it takes 4 * D * hidden multiplications a token. Raises InputError for x, qr or weights that do
    not fit the config.
    """

    def __init__(self, config: IndexerConfig, weights: IndexerWeights, x: Tensor, qr: Tensor) -> None:
        weights.check(config)
        check_inputs(config, x, qr, 0, None, None)
        self.config, self.weights, self.qr = config, weights, qr
        self.x = x.clone()
        inv_freq = inverse_frequencies(config.compress_rope_theta, config.rope_head_dim, config.yarn)
        cos, sin = rope_table(torch.arange(x.shape[0]), inv_freq)
        self._table = (cos.to(x.device), sin.to(x.device))
        # kv and gate columns together, so that every product reads x once
        self._project = torch.cat((weights.wkv, weights.wgate)).double()
        self._ape = weights.ape.double()
        self._wq_b = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block)
        self._query: tuple[int, Tensor] | None = None
        with torch.no_grad(), exact_matmul():
            self._keys = self._all_keys()

    def _all_keys(self) -> Tensor:
        """Keys fp32 [E, D]."""
        entries = self.x.shape[0] // WINDOW
        projected = row_tiled_product(self.x[: WINDOW * entries], self._project.float())
        kv, gate = projected.view(entries, WINDOW, -1).chunk(2, dim=-1)
        gate = gate + self._ape.float()
        absent = torch.zeros_like(kv[:1]), torch.full_like(kv[:1], -torch.inf)
        pooled = pool_windows(torch.cat((absent[0], kv)), torch.cat((absent[1], gate)))
        normed = rms_norm(pooled, self.weights.norm, self.config.rms_norm_eps)
        return self._rotate(normed, WINDOW * torch.arange(entries, device=self.x.device))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on the last dims of x [n, ..., D] in x's own precision; `apply_rope` of the reference is fp32
        only."""
        cos, sin = (table[positions].to(x.dtype) for table in self._table)
        shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
        cos, sin = cos.view(shape), sin.view(shape)
        plain = x.shape[-1] - self.config.rope_head_dim
        head, tail = x[..., :plain], x[..., plain:]
        a, b = tail[..., ::2], tail[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        return torch.cat((head, turned), dim=-1)

    def query(self, query: int) -> Tensor:
        """Query vectors of one row, rotated: fp64 [H, D]. The last one asked for is kept."""
        if self._query is None or self._query[0] != query:
            flat = self._wq_b.double() @ self.qr[query].double()
            q = flat.view(1, self.config.index_n_heads, self.config.index_head_dim)
            self._query = (query, self._rotate(q, torch.tensor([query], device=q.device))[0])
        return self._query[1]

    def gates(self, row: Tensor) -> Tensor:
        """Head gates of one row of x (any float [hidden]): fp64 [H], times head_dim^-0.5 * heads^-0.5."""
        return self.weights.weights_proj.double() @ row.double() * self.config.gate_scale

    def active(self, query: int) -> Tensor:
        """relu(q . k) of a row with its visible entries, fp64 [H, V] (the keys in it are fp32)."""
        visible = (query + 1) // WINDOW
        return (self.query(query) @ self._keys[:visible].double().T).relu()

    def scores(self, query: int) -> Tensor:
        """Ideal scores of a row over its visible entries, fp64 [V]."""
        return self.gates(self.x[query]) @ self.active(query)

    def measure(self, query: int, entry: int) -> tuple[float, int]:
        """(ideal score, rank) of an entry in a row of the present x; rank counts strictly better ones, 0 is
        best.

        Raises InputError when the query is outside the sequence or does not see the entry.
        """
        if not 0 <= query < self.x.shape[0] or not 0 <= entry < (query + 1) // WINDOW:
            raise InputError(
                f"entry {entry} is not visible to query {query}, expected a query below {self.x.shape[0]} "
                "and an entry that is complete there"
            )
        scores = self.scores(query)
        return float(scores[entry]), int((scores > scores[entry]).sum())

    def windows(self, entry: int, rows: Tensor) -> Windows:
        """Projections of the entry's own rows (fp64 [4, hidden], differentiable) and of the window before, as
        in x."""
        first = WINDOW * entry
        kv, gate = (rows @ self._project.T).chunk(2, dim=-1)
        kv_before, gate_before = torch.zeros_like(kv), torch.full_like(gate, -torch.inf)
        if entry:
            before = self.x[first - WINDOW : first].double() @ self._project.T
            kv_before, gate_before = before.chunk(2, dim=-1)
        return Windows(torch.cat((kv_before, kv)), torch.cat((gate_before + self._ape, gate + self._ape)))

    def key(self, entry: int, windows: Windows) -> Tensor:
        """Key fp64 [D] of an entry from what it pools."""
        kv, gate = (window_slots(t.view(2, WINDOW, -1)) for t in (windows.kv, windows.gate))
        normed = rms_norm(softmax_pool(kv, gate), self.weights.norm, self.config.rms_norm_eps)
        return self._rotate(normed, torch.tensor([WINDOW * entry], device=normed.device))[0]

    def gradient(self, query: int, entry: int, rows: Tensor) -> Tensor:
        """Gradient fp64 [4, hidden] of the score (query, entry) with respect to the entry's four rows, taken
        at `rows`.

        The head gates count when the query is one of those rows. Where a head's dot is zero its relu has
        slope 0.
        """
        own = query - WINDOW * entry
        with torch.enable_grad():
            rows = rows.detach().clone().requires_grad_()
            gates = self.gates(rows[own] if 0 <= own < WINDOW else self.x[query])
            dots = self.query(query) @ self.key(entry, self.windows(entry, rows))
            (gradient,) = torch.autograd.grad((gates * dots.relu()).sum(), rows)
        return gradient

    def refresh(self, entry: int) -> None:
        """Recompute, after a change of an entry's own rows in x, the keys that pool them: its own and the
        next."""
        for number in range(entry, min(entry + 2, self._keys.shape[0])):
            rows = self.x[WINDOW * number : WINDOW * (number + 1)].double()
            self._keys[number] = self.key(number, self.windows(number, rows)).float()
