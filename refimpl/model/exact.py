"""The indexer in plain fp32, for the exact numerics: same windows, positions and mask, no rounding, no FP4 step.

The Hadamard rotation is left out as well: applied to both sides it changes no exact score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compressor import WINDOW, PoolState, pool_windows, rms_norm
from ..config import IndexerConfig
from ..indexer import head_gates
from ..linear import row_tiled_product
from ..rotation import apply_rope, inverse_frequencies, rope_table
from ..scoring import select_topk, tiled_scores, visible_entries
from ..weights import IndexerWeights, dequantise_weight


def exact_selection(config: IndexerConfig, weights: IndexerWeights, x: Tensor, qr: Tensor) -> Tensor:
    """Selected entries int64 [T, min(index_topk, E)], -1 for none, for x fp32 [T, hidden] and qr fp32 [T, q_lora]."""
    inv_freq = inverse_frequencies(config.compress_rope_theta, config.rope_head_dim, config.yarn)
    positions = torch.arange(x.shape[0], device=x.device)
    kv = row_tiled_product(x, weights.wkv.float())
    gate = row_tiled_product(x, weights.wgate.float()) + weights.ape.float()[positions % WINDOW]
    kv, gate, _ = PoolState.start(kv.shape[1], x.device).then(kv, gate)
    keys = rms_norm(pool_windows(kv, gate), weights.norm, config.rms_norm_eps)
    keys = apply_rope(keys, *rope_table(WINDOW * torch.arange(len(keys)), inv_freq))
    wq_b = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block)
    q = row_tiled_product(qr, wq_b).unflatten(-1, (config.index_n_heads, config.index_head_dim))
    q = apply_rope(q, *rope_table(positions, inv_freq))
    gates = head_gates(row_tiled_product(x, weights.weights_proj.float()), config.gate_scale)
    visible = visible_entries(positions)

    def reduce(dots: Tensor, gate: Tensor) -> Tensor:
        return (dots.relu() * gate.unsqueeze(-1)).sum(dim=1)

    scores = tiled_scores(q, keys, gates, visible, reduce, torch.float32, torch.float32)
    return select_topk(scores, visible, config.index_topk)
