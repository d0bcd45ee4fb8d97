"""The feed-forward block: a few routed experts a token, and one shared expert that all tokens pass.

s = sqrt(softplus(x @ gate^T)) in fp32. The experts of a token are the best of s + bias (the bias only chooses), or in
the first layers a row of a table by token id. A chosen expert weighs s / (sum of the chosen s) * routed_scaling_factor.

Expert weights are dequantised one expert at a time and only where a token was routed to it. Letters: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..linear import row_tiled_product
from .config import ModelConfig
from .functions import silu, softplus
from .weights import LayerWeights, Numerics

TOKEN_BLOCK = 4096
"""Tokens of one expert's activations that exist at once; a multiple of the row tile."""


def route(config: ModelConfig, layer: int, weights: LayerWeights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(chosen experts int64 [T, n], their weights fp32 [T, n]) for x [T, hidden] of the token ids [T]."""
    experts, count = config.n_routed_experts, config.num_experts_per_tok
    scores = softplus(row_tiled_product(x, weights.fp32("ffn.gate.weight", experts, x.shape[1]))).sqrt()
    if layer < config.num_hash_layers:
        table = weights.raw("ffn.gate.tid2eid", config.vocab_size, count)
        if table.is_floating_point():
            raise InputError(f"{weights.where}: ffn.gate.tid2eid has dtype {table.dtype}, expected integers")
        if int(table.min()) < 0 or int(table.max()) >= experts:
            raise InputError(f"{weights.where}: ffn.gate.tid2eid names an expert outside 0..{experts - 1}")
        chosen = table[tokens].long()
    else:
        chosen = (scores + weights.fp32("ffn.gate.bias", experts)).topk(count, dim=-1).indices
    share = scores.gather(1, chosen)
    return chosen, share / share.sum(dim=-1, keepdim=True) * config.routed_scaling_factor


def run_expert(
    config: ModelConfig, weights: LayerWeights, name: str, x: Tensor, share: Tensor | None, numerics: Numerics
) -> Tensor:
    """One expert on its tokens: x [n, hidden] and routing weights fp32 [n] (None: 1) -> [n, hidden]."""
    inner, hidden, limit = config.moe_intermediate_size, x.shape[1], config.swiglu_limit
    w1, w3 = (weights.linear(f"{name}.{part}", inner, hidden) for part in ("w1", "w3"))
    w2 = weights.linear(f"{name}.w2", hidden, inner)
    out = []
    for first in range(0, x.shape[0], TOKEN_BLOCK):
        part = x[first : first + TOKEN_BLOCK]
        a, u = w1(part, numerics).float(), w3(part, numerics).float()
        if limit:
            a, u = a.clamp(max=limit), u.clamp(-limit, limit)
        h = silu(a) * u
        if share is not None:
            h = share[first : first + TOKEN_BLOCK, None] * h
        out.append(w2(numerics.round(h), numerics))
    return torch.cat(out)


def feed_forward(
    config: ModelConfig, layer: int, weights: LayerWeights, x: Tensor, tokens: Tensor, numerics: Numerics
) -> Tensor:
    """The block's output [T, hidden] for x [T, hidden]: experts summed in fp32, ascending, the shared one last."""
    chosen, share = route(config, layer, weights, x, tokens)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, slot = (chosen == expert).nonzero(as_tuple=True)
        out = run_expert(config, weights, f"ffn.experts.{expert}", x[rows], share[rows, slot], numerics)
        total.index_add_(0, rows, out.float())
    total += run_expert(config, weights, "ffn.shared_experts", x, None, numerics).float()
    return numerics.round(total)
