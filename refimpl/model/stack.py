"""The stack, streamed: embedding, one layer after another, head; a layer's weights exist only while it runs.

    streams = four copies of the embedding row
    layer:    x = attn_norm(mix(streams)); streams = mix back attention(x); the same with ffn_norm and the experts
    head:     logits = head @ norm(mix(streams)), fp32

Weights come from a function `load(layer)` that returns the layer's tensors by their released names inside it (None: the
tensors outside the layers). While a layer runs, the next one is read by a thread into host memory.

Letters: T tokens, S streams, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compressor import rms_norm
from ..errors import InputError
from ..linear import exact_matmul, row_tiled_product
from .attention import AttentionRecord, Select, attention
from .config import ModelConfig
from .experts import feed_forward
from .hyper import block_input, block_output, head_input
from .weights import REFERENCE, LayerWeights, Numerics

Load = Callable[[int | None], Mapping[str, Tensor]]
"""Tensors of a layer by their names inside it (attn.wq_a.weight, …); of the top (embed.weight, …) for None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """The streams [T, S, C] after a layer, and what its attention saw."""

    layer: int
    streams: Tensor
    record: AttentionRecord


def embed(config: ModelConfig, top: LayerWeights, tokens: Tensor, numerics: Numerics = REFERENCE) -> Tensor:
    """Streams [T, S, C] of token ids int64 [T], on the ids' device. InputError for an id outside the vocabulary."""
    if tokens.dim() != 1 or tokens.numel() == 0 or tokens.is_floating_point():
        raise InputError(f"tokens have shape {list(tokens.shape)} and dtype {tokens.dtype}, expected a list of ids")
    wrong = (tokens < 0) | (tokens >= config.vocab_size)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise InputError(f"token {first} has id {int(tokens[first])}, expected 0 to {config.vocab_size - 1}")
    table = top.raw("embed.weight", config.vocab_size, config.indexer.hidden_size)
    rows = numerics.round(table[tokens.to(table.device)]).to(tokens.device)
    return rows.unsqueeze(1).repeat(1, config.hc_mult, 1)


def run_layer(
    config: ModelConfig,
    layer: int,
    weights: LayerWeights,
    streams: Tensor,
    tokens: Tensor,
    *,
    numerics: Numerics = REFERENCE,
    mass_queries: Tensor | None = None,
    select: Select | None = None,
) -> LayerResult:
    """One layer on streams [T, S, C] of token ids [T], a whole text from position 0 on.

    Weights, streams and tokens are on one device. mass_queries: token positions whose attention mass is recorded.
    select: what chooses the entries instead of the reference's indexer.
    """
    eps, width = config.indexer.rms_norm_eps, config.indexer.hidden_size
    with torch.no_grad(), exact_matmul():
        mixed, post, comb = block_input(config, weights, "attn", streams, numerics)
        x = numerics.round(rms_norm(mixed, weights.fp32("attn_norm.weight", width), eps))
        out, record = attention(config, layer, weights, x, numerics, mass_queries, select)
        streams = block_output(streams, out, post, comb, numerics)
        mixed, post, comb = block_input(config, weights, "ffn", streams, numerics)
        x = numerics.round(rms_norm(mixed, weights.fp32("ffn_norm.weight", width), eps))
        out = feed_forward(config, layer, weights, x, tokens, numerics)
        return LayerResult(layer=layer, streams=block_output(streams, out, post, comb, numerics), record=record)


def logits(config: ModelConfig, top: LayerWeights, streams: Tensor, numerics: Numerics = REFERENCE) -> Tensor:
    """fp32 [t, vocab] of the last layer's streams [t, S, C]; pass only the rows wanted."""
    width = config.indexer.hidden_size
    with torch.no_grad(), exact_matmul():
        x = head_input(config, top, streams, numerics)
        x = numerics.round(rms_norm(x, top.fp32("norm.weight", width), config.indexer.rms_norm_eps))
        return row_tiled_product(x, top.fp32("head.weight", config.vocab_size, width))


def stream_layers(
    config: ModelConfig, load: Load, layers: range, device: torch.device | str
) -> Iterator[tuple[int, LayerWeights]]:
    """(layer, its weights on `device`) for each layer, the next one being read meanwhile."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(load, layers[0]) if layers else None
        for layer in layers:
            assert coming is not None, "a layer was asked for, so it is being read"
            weights = LayerWeights(coming.result(), config, f"layer {layer}")
            coming = reader.submit(load, layer + 1) if layer + 1 in layers else None
            weights = weights.to(device)
            yield layer, weights
            del weights  # before the next layer is moved, so that the device never holds two


def run_model(
    config: ModelConfig,
    load: Load,
    tokens: Tensor,
    *,
    layers: range | None = None,
    streams: Tensor | None = None,
    device: torch.device | str = "cpu",
    numerics: Numerics = REFERENCE,
    mass_queries: Tensor | None = None,
    select: Select | None = None,
) -> Iterator[LayerResult]:
    """Run `layers` (all by default) on token ids int64 [T]; yields each layer's result as it is done.

    `streams` are those after the layer before the first one; without them the text starts at its embedding. select:
    what chooses the entries in layers of ratio 4 instead of the reference's indexer.
    """
    layers = range(config.layers) if layers is None else layers
    tokens = tokens.to(device)
    if streams is None:
        if layers and layers[0] != 0:
            raise InputError(f"layer {layers[0]} cannot be the first one without the streams before it")
        streams = embed(config, LayerWeights(load(None), config, "top"), tokens, numerics)
    streams = streams.to(device)
    for layer, weights in stream_layers(config, load, layers, device):
        result = run_layer(
            config, layer, weights, streams, tokens, numerics=numerics, mass_queries=mass_queries, select=select
        )
        del weights
        streams = result.streams
        yield result
