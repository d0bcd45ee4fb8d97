"""Main attention: a sliding window, and compressed entries beside it; one key-value head that all query heads share.

    qr = q_norm(wq_a x);  q = wq_b(qr), scaled per head to unit mean square;  kv = kv_norm(wkv x), key and value at once

RoPE turns the last dims of q and kv; because the value was turned too, the output is turned back at the query's own
position. A token reads the last `window` tokens, itself included, then in a layer of ratio 4 the entries that the
indexer selected and in one of ratio 128 every complete entry, all in one softmax whose denominator has one more term,
exp(sink of the head). Keys are kept e4m3-quantised outside their RoPE dims.

Queries run in blocks, so only a block's queries, logits and gathered keys exist at once. Letters: T tokens, H heads,
D head dim, N slots (keys that one query may read, -1 for none), E compressed entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compressor import PoolState, pool_windows, rms_norm, softmax_pool
from ..config import INDEXER_RATIO
from ..indexer import run_indexer
from ..linear import ROW_TILE, row_tiled_product
from ..rotation import apply_rope, inverse_frequencies, rope_table
from ..weights import IndexerWeights
from .config import ModelConfig
from .exact import exact_selection
from .weights import LayerWeights, Linear, Numerics

BUDGET_BYTES = 1 << 30
"""How much the temporaries of a block of query rows may take."""
MASS_ROWS = 16
"""Query rows whose logits against all entries exist at once."""


Select = Callable[[int, IndexerWeights, Tensor, Tensor], Tensor]
"""(layer, weights, x [T, hidden], qr [T, q_lora]) -> selected entries int64 [T, min(k, E)], -1 where empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecord:
    """What a layer's attention saw: x [T, hidden], its input after attn_norm, and qr [T, q_lora].

    In a layer of ratio 4 also `topk` [T, k], the indexer's selection, and for the query rows asked for `mass` fp32
    [rows, E], the softmax weight of each visible compressed entry among them all, mean over heads.
    """

    x: Tensor
    qr: Tensor
    topk: Tensor | None = None
    mass: Tensor | None = None


def attention(
    config: ModelConfig,
    layer: int,
    weights: LayerWeights,
    x: Tensor,
    numerics: Numerics,
    mass_queries: Tensor | None = None,
    select: Select | None = None,
) -> tuple[Tensor, AttentionRecord]:
    """The block's output [T, hidden] for x [T, hidden] from position 0 on; mass_queries: token positions, int64.

    select: what chooses the entries instead of the reference's indexer.
    """
    c, ratio = config.indexer, config.ratio(layer)
    theta, yarn = config.rope(layer)
    inv_freq = inverse_frequencies(theta, c.rope_head_dim, yarn)
    positions = torch.arange(x.shape[0])
    lowered = weights.linear("attn.wq_a", c.q_lora_rank, c.hidden_size)(x, numerics)
    qr = _norm(weights, "attn.q_norm", lowered, c.rms_norm_eps, numerics)
    key = weights.linear("attn.wkv", config.head_dim, c.hidden_size)(x, numerics)
    keys = _finish_keys(config, weights, "attn.kv_norm", key, positions, inv_freq, numerics)
    topk = mass = None
    compressed = keys[:0]
    if ratio:
        compressed = compress(config, layer, weights, x, inv_freq, numerics)
    if ratio == INDEXER_RATIO:
        if select is not None:
            topk = select(layer, weights.indexer(), x, qr)
        elif numerics.rounded:
            topk = run_indexer(c, weights.indexer(), x, qr)["topk"]
        else:
            topk = exact_selection(c, weights.indexer(), x, qr)
    wq_b = weights.linear("attn.wq_b", config.num_attention_heads * config.head_dim, c.q_lora_rank)
    if ratio == INDEXER_RATIO and mass_queries is not None:
        mass = _mass(config, wq_b, qr, mass_queries, inv_freq, compressed, numerics)
    out = _attend_all(config, layer, weights, wq_b, qr, torch.cat((keys, compressed)), topk, inv_freq, numerics)
    return out, AttentionRecord(x=x, qr=qr, topk=topk, mass=mass)


def compress(
    config: ModelConfig, layer: int, weights: LayerWeights, x: Tensor, inv_freq: Tensor, numerics: Numerics
) -> Tensor:
    """The layer's compressed keys [E, D], one for each complete window of `ratio` tokens of x [T, hidden].

    Ratio 4 pools two overlapping windows of two halves as the indexer's compressor does, ratio 128 one window.
    """
    ratio, hidden = config.ratio(layer), config.indexer.hidden_size
    columns = config.head_dim * (2 if ratio == INDEXER_RATIO else 1)
    kv, gate = (
        row_tiled_product(x, weights.fp32(f"attn.compressor.{name}.weight", columns, hidden))
        for name in ("wkv", "wgate")
    )
    gate = gate + weights.fp32("attn.compressor.ape", ratio, columns).repeat(-(-x.shape[0] // ratio), 1)[: x.shape[0]]
    if ratio == INDEXER_RATIO:
        kv, gate, _ = PoolState.start(columns, x.device).then(kv, gate)
        pool = pool_windows(kv, gate)
    else:
        whole = x.shape[0] // ratio * ratio
        pool = softmax_pool(*(t[:whole].unflatten(0, (whole // ratio, ratio)) for t in (kv, gate)))
    first_tokens = ratio * torch.arange(pool.shape[0])
    pool = numerics.round(pool)
    return _finish_keys(config, weights, "attn.compressor.norm", pool, first_tokens, inv_freq, numerics)


def _norm(weights: LayerWeights, name: str, x: Tensor, eps: float, numerics: Numerics) -> Tensor:
    return numerics.round(rms_norm(x, weights.fp32(f"{name}.weight", x.shape[1]), eps))


def _finish_keys(
    config: ModelConfig,
    weights: LayerWeights,
    norm: str,
    key: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    numerics: Numerics,
) -> Tensor:
    key = _norm(weights, norm, key, config.indexer.rms_norm_eps, numerics)
    key = numerics.round(apply_rope(key, *rope_table(positions, inv_freq)))
    return numerics.quantise_key(key, config.indexer.rope_head_dim)


def _queries(
    config: ModelConfig, wq_b: Linear, qr: Tensor, positions: Tensor, inv_freq: Tensor, numerics: Numerics
) -> Tensor:
    """Queries [t, H, D] of qr [t, q_lora] at token positions [t]."""
    q = wq_b(qr, numerics).unflatten(-1, (config.num_attention_heads, config.head_dim))
    # each step is rounded here: in fp32 throughout a quarter of the elements would come out otherwise
    mean = numerics.round(numerics.round(q * q).float().mean(-1, keepdim=True))
    q = numerics.round(q * numerics.round(torch.rsqrt(numerics.round(mean + config.indexer.rms_norm_eps).float())))
    return numerics.round(apply_rope(q, *rope_table(positions, inv_freq)))


def _attend_all(
    config: ModelConfig,
    layer: int,
    weights: LayerWeights,
    wq_b: Linear,
    qr: Tensor,
    keys: Tensor,
    topk: Tensor | None,
    inv_freq: Tensor,
    numerics: Numerics,
) -> Tensor:
    """Output [T, hidden] of all queries; keys [T + E, D] are the tokens' and then the compressed ones."""
    heads, dim, groups, tokens = config.num_attention_heads, config.head_dim, config.o_groups, qr.shape[0]
    sink = weights.fp32("attn.attn_sink", heads)
    wo_a = _wo_a(config, weights)
    wo_b = weights.linear("attn.wo_b", config.indexer.hidden_size, groups * config.o_lora_rank)
    chosen = keys.shape[0] - tokens if topk is None else max(topk.shape[1], config.indexer.index_topk)
    slots_a_row = config.sliding_window + chosen
    row_bytes = 4 * (slots_a_row * (dim + 3 * heads) + 6 * heads * dim)
    block = max(1, BUDGET_BYTES // row_bytes // ROW_TILE) * ROW_TILE
    out = []
    for first in range(0, tokens, block):
        positions = torch.arange(first, min(first + block, tokens))
        q = _queries(config, wq_b, qr[first : first + block], positions, inv_freq, numerics)
        slots = _slots(config, layer, positions.to(q.device), tokens, keys.shape[0] - tokens, topk)
        o = attend(q, keys, slots, sink, numerics)
        cos, sin = rope_table(positions, inv_freq)
        o = numerics.round(apply_rope(o, cos, -sin)).flatten(1).unflatten(-1, (groups, -1))
        lowered = [row_tiled_product(o[:, g], wo_a[g]) for g in range(groups)]
        out.append(wo_b(numerics.round(torch.cat(lowered, dim=-1)), numerics))
    return torch.cat(out)


def _wo_a(config: ModelConfig, weights: LayerWeights) -> Tensor:
    """The grouped projection fp32 [G, o_lora, H/G * D]; stored fp8, its activation is not quantised all the same."""
    inputs = config.num_attention_heads // config.o_groups * config.head_dim
    weight = weights.linear("attn.wo_a", config.o_groups * config.o_lora_rank, inputs).weight
    return weight.view(config.o_groups, config.o_lora_rank, inputs)


def _slots(
    config: ModelConfig, layer: int, positions: Tensor, tokens: int, entries: int, topk: Tensor | None
) -> Tensor:
    """Which keys each query position may read, int64 [t, N] into tokens and then entries; -1 for none."""
    window = positions[:, None] - torch.arange(config.sliding_window - 1, -1, -1, device=positions.device)
    window = window.masked_fill(window < 0, -1)
    if topk is not None:
        chosen = topk[positions]
        # a fixed width, so that a row's bits do not depend on the length of the text
        missing = max(0, config.indexer.index_topk - chosen.shape[1])
        chosen = torch.nn.functional.pad(chosen, (0, missing), value=-1)
    else:
        entry = torch.arange(entries, device=positions.device).expand(len(positions), -1)
        seen = (positions + 1) // max(config.ratio(layer), 1)
        chosen = entry.masked_fill(entry >= seen[:, None], -1)
    return torch.cat((window, torch.where(chosen < 0, -1, chosen + tokens)), dim=1)


def attend(q: Tensor, keys: Tensor, slots: Tensor, sink: Tensor, numerics: Numerics) -> Tensor:
    """Softmax attention of q [t, H, D] over the keys [n, D] in slots [t, N], with a sink fp32 [H] -> [t, H, D]."""
    held = keys[slots.clamp_min(0)].float()
    logits = (q.float() @ held.mT) * float(q.shape[-1] ** -0.5)
    logits.masked_fill_(slots[:, None, :] < 0, -torch.inf)
    top = logits.amax(dim=-1, keepdim=True)
    weight = logits.sub_(top).exp_()
    total = weight.sum(dim=-1, keepdim=True) + (sink[:, None] - top).exp()
    return numerics.round((numerics.round(weight).float() @ held) / total)


def _mass(
    config: ModelConfig,
    wq_b: Linear,
    qr: Tensor,
    queries: Tensor,
    inv_freq: Tensor,
    compressed: Tensor,
    numerics: Numerics,
) -> Tensor:
    """Share of each entry in the softmax over all visible entries, mean over heads: fp32 [rows, E], on the CPU."""
    entry = torch.arange(compressed.shape[0], device=qr.device)
    rows = []
    for part in queries.cpu().split(MASS_ROWS):
        q = _queries(config, wq_b, qr[part.to(qr.device)], part, inv_freq, numerics)
        logits = (q.float() @ compressed.float().T) * float(config.head_dim**-0.5)
        hidden = entry >= ((part.to(qr.device) + 1) // INDEXER_RATIO)[:, None]
        share = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
        rows.append(share.nan_to_num(0).mean(dim=1).cpu())  # a row that sees no entry has no mass
    return torch.cat(rows)
