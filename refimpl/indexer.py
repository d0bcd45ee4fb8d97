"""DeepSeek V4's indexer, end to end: the port that everything else is compared with.

One fixed composition of the small functions of this package, written to be read beside the published inference code:

    qr --wq_b--> q --RoPE--> q_rope --Hadamard--> q_hadamard --FP4 step--> q_quant ---.
    x  --weights_proj * constant--> gate -----------------------------------------------+--> scores --> topk
    x  --wkv, wgate, ape, softmax--> pool --> k_norm --> k_rope --> k_hadamard --> k_quant-'

Each stage is rounded once to bf16; the roundings are part of the function. The key's angle is that of its first
token (entry i: position 4i). Keys are kept as a bf16 cache *after* the FP4 step.

Prefill, prefill in chunks of any size and token-by-token decode give the same bits: products run in tiles of fixed
size, and `IndexerState` carries the open window, the previous window and the keys so far.

Letters: T tokens of this call, E entries so far, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compressor import WINDOW, PoolState, pool_windows, rms_norm
from .config import IndexerConfig
from .errors import InputError
from .formats import fp4_step
from .linear import exact_matmul, fp8_linear, row_tiled_product
from .rotation import apply_rope, hadamard, inverse_frequencies, rope_table
from .scoring import index_scores, select_topk, visible_entries
from .trace import Trace
from .weights import IndexerWeights, dequantise_weight

BUDGET_BYTES = 256 << 20
"""How much the temporaries of a block of query rows may take."""


@dataclass(frozen=True, slots=True)
class IndexerState:
    """What a stream of tokens must carry from call to call: tokens seen, the pooling state and keys [E, D]."""

    position: int
    pool: PoolState
    keys: Tensor


def run_indexer(
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    qr: Tensor,
    *,
    start: int = 0,
    state: IndexerState | None = None,
    queries: Tensor | None = None,
) -> Trace:
    """Run the reference indexer of one layer on T tokens that begin at position `start`.

    x: [T, hidden] bf16, the layer's attention input; qr: [T, q_lora] bf16, the normalised low-rank query.
    state: `trace.state` of the call before; required when start > 0. queries: absolute token positions (int64) of
    the query rows to compute, all T by default.

    Returns a Trace with x, qr, queries and every stage: q.. [rows, H, D], gate [rows, H], pool.. [entries completed
    in this call, D], scores [rows, E] bf16, topk [rows, min(index_topk, E)] int64. Raises InputError on bad input.
    """
    weights.check(config)
    rows, state = check_inputs(config, x, qr, start, state, queries)
    with torch.no_grad(), exact_matmul():
        inv_freq = inverse_frequencies(config.compress_rope_theta, config.rope_head_dim, config.yarn)
        stages, pool_state = _keys(config, weights, x, start, state.pool, inv_freq)
        keys = torch.cat((state.keys, stages["k_quant"]))
        wq_b = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block)
        blocks = [
            _queries(config, weights, x[part], qr[part], part + start, wq_b, keys, inv_freq)
            for part in rows.split(query_block(config, keys.shape[0]))
        ]
    for name in blocks[0]:
        stages[name] = torch.cat([block[name] for block in blocks]) if len(blocks) > 1 else blocks[0][name]
    stages |= {"x": x, "qr": qr, "queries": rows + start}
    new_state = IndexerState(position=start + x.shape[0], pool=pool_state, keys=keys)
    return Trace(stages, start=start, state=new_state)


def _keys(
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    start: int,
    pool_state: PoolState,
    inv_freq: Tensor,
) -> tuple[dict[str, Tensor], PoolState]:
    """Key side of the entries that these tokens complete."""
    position = torch.arange(start, start + x.shape[0], device=x.device)
    kv = row_tiled_product(x, weights.wkv.float())
    gate = row_tiled_product(x, weights.wgate.float()) + weights.ape.float()[position % WINDOW]
    kv, gate, pool_state = pool_state.then(kv, gate)
    first = start // WINDOW
    entry_position = WINDOW * torch.arange(first, first + kv.shape[0] - 1)
    pool = pool_windows(kv, gate).bfloat16()
    k_norm = rms_norm(pool, weights.norm, config.rms_norm_eps).bfloat16()
    k_rope = apply_rope(k_norm, *rope_table(entry_position, inv_freq)).bfloat16()
    k_hadamard = hadamard(k_rope).bfloat16()
    k_quant = fp4_step(k_hadamard).bfloat16()
    stages = {"pool": pool, "k_norm": k_norm, "k_rope": k_rope, "k_hadamard": k_hadamard, "k_quant": k_quant}
    return stages, pool_state


def _queries(
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    qr: Tensor,
    positions: Tensor,
    wq_b: Tensor,
    keys: Tensor,
    inv_freq: Tensor,
) -> dict[str, Tensor]:
    """Query side of a block of rows, against all keys so far."""
    flat = fp8_linear(qr, wq_b) if weights.quantised else row_tiled_product(qr, wq_b).bfloat16()
    q = flat.unflatten(-1, (config.index_n_heads, config.index_head_dim))
    q_rope = apply_rope(q, *rope_table(positions, inv_freq)).bfloat16()
    q_hadamard = hadamard(q_rope).bfloat16()
    q_quant = fp4_step(q_hadamard).bfloat16()
    gate = head_gates(row_tiled_product(x, weights.weights_proj.float()).bfloat16(), config.gate_scale).bfloat16()
    scores = index_scores(q_quant, keys, gate, positions)
    topk = select_topk(scores, visible_entries(positions), config.index_topk)
    names = ("q", "q_rope", "q_hadamard", "q_quant", "gate", "scores", "topk")
    return dict(zip(names, (q, q_rope, q_hadamard, q_quant, gate, scores, topk), strict=True))


def head_gates(projected: Tensor, gate_scale: float) -> Tensor:
    """Gate of each head: the projection times the constant, in fp32, not rounded (rounding comes once, after)."""
    scale = torch.tensor(gate_scale, dtype=torch.float32, device=projected.device)
    return projected * scale if projected.dtype == torch.float64 else projected.float() * scale


def query_block(config: IndexerConfig, entries: int) -> int:
    """Query rows whose temporaries (about eight fp32 copies of q, two of a score row) fit BUDGET_BYTES."""
    row_bytes = 32 * config.index_n_heads * config.index_head_dim + 16 * entries
    return max(1, BUDGET_BYTES // row_bytes)


def check_inputs(
    config: IndexerConfig,
    x: Tensor,
    qr: Tensor,
    start: int,
    state: IndexerState | None,
    queries: Tensor | None,
) -> tuple[Tensor, IndexerState]:
    """Validate one call's inputs; returns the queries' row numbers within the call, and the state to go on from."""
    for name, tensor, width in (("x", x, config.hidden_size), ("qr", qr, config.q_lora_rank)):
        if tensor.dim() != 2 or tensor.shape[1] != width:
            raise InputError(f"{name} has shape {list(tensor.shape)}, expected [T, {width}]")
        if tensor.dtype != torch.bfloat16:
            raise InputError(f"{name} has dtype {tensor.dtype}, expected torch.bfloat16")
        if not tensor.isfinite().all():
            raise InputError(f"{name} holds NaN or inf, expected finite values")
    if x.shape[0] != qr.shape[0] or x.shape[0] == 0:
        raise InputError(f"x has {x.shape[0]} rows and qr {qr.shape[0]}, expected the same number, at least 1")
    if state is None:
        if start != 0:
            raise InputError(f"start is {start} without a state, expected the state of the call that ended there")
        columns = 2 * config.index_head_dim
        keys = torch.empty(0, config.index_head_dim, dtype=torch.bfloat16, device=x.device)
        state = IndexerState(position=0, pool=PoolState.start(columns, x.device), keys=keys)
    elif state.position != start:
        raise InputError(f"start is {start} but the state ends at token {state.position}, expected the same position")
    if queries is None:
        return torch.arange(x.shape[0], device=x.device), state
    rows = queries.to(x.device).long() - start
    if rows.dim() != 1 or rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= x.shape[0]:
        raise InputError(f"queries must be a non-empty list of positions in {start}..{start + x.shape[0] - 1}")
    return rows, state
