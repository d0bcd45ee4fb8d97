"""Hyper-connections: four residual streams, mixed before and after each block by weights made of the streams.

    flat = the 4 streams of a token side by side, fp32;  rms = rsqrt(mean square + rms_norm_eps);
    m    = (flat @ fn^T) * rms
    pre  = sigmoid(m[0:4] * scale0 + base) + eps           what each stream gives to the block's input
    post = 2 sigmoid(m[4:8] * scale1 + base)               what each stream takes of the block's output
    comb = m[8:24] as [from, to], softmax over `to`, then Sinkhorn's alternating normalisation: stream to stream

Letters: T tokens, S streams, C hidden size. All of this runs in fp32, on blocks of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear import row_tiled_product
from .config import ModelConfig
from .functions import sigmoid
from .weights import LayerWeights, Numerics

TOKEN_BLOCK = 1024
"""Tokens whose fp32 streams exist at once; a multiple of the row tile, so that no row's bits depend on it."""


def mixing_weights(config: ModelConfig, weights: LayerWeights, name: str, streams: Tensor) -> tuple[Tensor, ...]:
    """(pre [t, S], post [t, S], comb [t, S, S]) of a block `name` ("attn" or "ffn") for streams [t, S, C]."""
    count = config.hc_mult
    rows = (2 + count) * count
    mixed = _projected(config, weights.fp32(f"hc_{name}_fn", rows, count * config.indexer.hidden_size), streams)
    base, scale = weights.fp32(f"hc_{name}_base", rows), weights.fp32(f"hc_{name}_scale", 3)
    sizes = [count, count, count * count]
    (m_pre, m_post, m_comb), (b_pre, b_post, b_comb) = mixed.split(sizes, dim=-1), base.split(sizes)
    pre = sigmoid(m_pre * scale[0] + b_pre) + config.hc_eps
    post = 2 * sigmoid(m_post * scale[1] + b_post)
    comb = (m_comb * scale[2] + b_comb).unflatten(-1, (count, count)).softmax(dim=-1) + config.hc_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + config.hc_eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + config.hc_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + config.hc_eps)
    return pre, post, comb


def block_input(
    config: ModelConfig, weights: LayerWeights, name: str, streams: Tensor, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """(input [T, C], post [T, S], comb [T, S, S]) of a block for streams [T, S, C]."""
    parts = []
    for part in streams.split(TOKEN_BLOCK):
        pre, post, comb = mixing_weights(config, weights, name, part)
        parts.append((numerics.round((pre.unsqueeze(-1) * part.float()).sum(dim=1)), post, comb))
    mixed, post, comb = (torch.cat(column) for column in zip(*parts, strict=True))
    return mixed, post, comb


def block_output(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor, numerics: Numerics) -> Tensor:
    """The streams [T, S, C] after a block that returned `out` [T, C]: post_s out + sum_r comb[r, s] stream_r."""
    after = torch.empty_like(streams)
    for first in range(0, streams.shape[0], TOKEN_BLOCK):
        part = slice(first, first + TOKEN_BLOCK)
        carried = torch.einsum("trs,trc->tsc", comb[part], streams[part].float())
        after[part] = numerics.round(post[part].unsqueeze(-1) * out[part].float().unsqueeze(1) + carried)
    return after


def head_input(config: ModelConfig, weights: LayerWeights, streams: Tensor, numerics: Numerics) -> Tensor:
    """What the final norm sees of streams [t, S, C]: [t, C]."""
    count = config.hc_mult
    mixed = _projected(config, weights.fp32("hc_head_fn", count, count * config.indexer.hidden_size), streams)
    scale, base = weights.fp32("hc_head_scale", 1), weights.fp32("hc_head_base", count)
    pre = sigmoid(mixed * scale + base) + config.hc_eps
    return numerics.round((pre.unsqueeze(-1) * streams.float()).sum(dim=1))


def _projected(config: ModelConfig, fn: Tensor, streams: Tensor) -> Tensor:
    flat = streams.float().flatten(1)
    rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.indexer.rms_norm_eps)
    return row_tiled_product(flat, fn) * rms
