"""A cheap stand-in for hidden states: embedding rows through the layer's own norm and query projection.

x = attn_norm(embedding row), qr = q_norm(wq_a x). The tokens are real, the mixing of forty layers is missing, so every
output that comes of it is called a proxy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checkpoint.model import ModelCheckpoint
from ..refimpl.compressor import rms_norm
from ..refimpl.linear import exact_matmul
from ..refimpl.model import REFERENCE, LayerWeights, embed

PROXY = "PROXY: embedding rows through each layer's norm, not a forward pass"
"""What every trace made here says of its source."""
_NAMES = ("attn_norm.weight", "attn.wq_a.weight", "attn.wq_a.scale", "attn.q_norm.weight")


def embedding_inputs(model: ModelCheckpoint, tokens: Sequence[int], layer: int) -> dict[str, Tensor]:
    """x bf16 [T, hidden] and qr bf16 [T, q_lora] of one layer; four of its tensors are read."""
    c = model.config.indexer
    ids = torch.tensor(list(tokens), dtype=torch.int64)
    top = LayerWeights(model.load(None, only=("embed.weight",)), model.config, "top")
    weights = LayerWeights(model.load(layer, only=_NAMES), model.config, f"layer {layer}")
    with torch.no_grad(), exact_matmul():
        row = embed(model.config, top, ids)[:, 0]
        x = rms_norm(row, weights.fp32("attn_norm.weight", c.hidden_size), c.rms_norm_eps).bfloat16()
        lowered = weights.linear("attn.wq_a", c.q_lora_rank, c.hidden_size)(x, REFERENCE)
        qr = rms_norm(lowered, weights.fp32("attn.q_norm.weight", c.q_lora_rank), c.rms_norm_eps).bfloat16()
    return {"x": x, "qr": qr}
