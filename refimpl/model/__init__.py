"""The whole V4 stack around the indexer, so that its inputs are what a model really computes.

Streamed: one layer's weights in memory at a time, experts dequantised only where a token goes. `run_model` yields layer
by layer; `REFERENCE` has the published roundings, `EXACT` is the same function in plain fp32.
"""

from .attention import AttentionRecord, Select
from .config import ModelConfig
from .stack import LayerResult, Load, embed, logits, run_layer, run_model, stream_layers
from .weights import EXACT, REFERENCE, LayerWeights, Numerics

__all__ = [
    "EXACT",
    "REFERENCE",
    "AttentionRecord",
    "LayerResult",
    "LayerWeights",
    "Load",
    "ModelConfig",
    "Numerics",
    "Select",
    "embed",
    "logits",
    "run_layer",
    "run_model",
    "stream_layers",
]
