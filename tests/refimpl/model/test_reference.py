"""The reference numerics of the stack against slow numpy, layer by layer.

numpy sums in fp64 and the port in fp32, so a value near a rounding boundary can fall to the other side, and what is
built on it moves along; what is compared is the share of equal bf16 values, which any missing rounding, quantisation or
swapped index brings down at once.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

from diffcheck.checkpoint.model import open_model
from diffcheck.refimpl import Trace
from diffcheck.refimpl.model import (
    REFERENCE,
    LayerWeights,
    attention,
    embed,
    run_layer,
    run_model,
    stack,
)
from diffcheck.refimpl.rotation import inverse_frequencies

TOKENS = 132
ATTENTION, FEED_FORWARD, STREAMS = 0.96, 0.9995, 0.94
"""Shares of values whose bits must agree: of each block on the port's own input, and of the whole layer."""


@pytest.fixture(scope="module")
def model(mini):
    return open_model(mini)


def as_numpy(tensors):
    kinds = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    }
    arrays = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e8m0fnu:
            arrays[name] = tensor.view(torch.uint8).numpy()
        elif tensor.dtype in kinds:
            bits, dtype = kinds[tensor.dtype]
            arrays[name] = tensor.view(bits).numpy().view(dtype)
        else:
            arrays[name] = tensor.numpy()
    return arrays


@pytest.mark.parametrize("layer", range(5))
def test_each_layer_against_numpy(numpy_layer, model, mini, layer, monkeypatch):
    c = model.config
    tokens = torch.tensor(json.loads((mini / "tokens.json").read_text()))[:TOKENS]
    top = LayerWeights(model.load(None), c, "top")
    streams = embed(c, top, tokens)
    for result in run_model(c, model.load, tokens, layers=range(layer)):
        streams = result.streams
    seen = {}
    for module, name in ((stack, "attention"), (stack, "feed_forward")):
        monkeypatch.setattr(module, name, recorded(seen, name, getattr(module, name)))
    ours = run_layer(c, layer, LayerWeights(model.load(layer), c, "layer"), streams, tokens)
    config = {
        "eps": c.indexer.rms_norm_eps, "hc_eps": c.hc_eps, "iterations": c.hc_sinkhorn_iters,
        "window": c.sliding_window,
        "heads": c.num_attention_heads, "dim": c.head_dim, "groups": c.o_groups, "chosen": c.num_experts_per_tok,
        "factor": c.routed_scaling_factor, "limit": c.swiglu_limit,
    }  # fmt: skip
    theta, yarn = c.rope(layer)
    frequencies = inverse_frequencies(theta, 64, yarn).numpy()
    topk = None if ours.record.topk is None else ours.record.topk.tolist()
    weights = as_numpy(model.load(layer))
    x, after = numpy_layer.layer(
        weights, streams.float().numpy(), tokens.tolist(), c.ratio(layer), topk, frequencies, config
    )
    assert equal(ours.record.x, x) > 0.999, "hyper-connections and attn_norm"
    (given, out), (ffn_given, ffn_out) = seen["attention"], seen["feed_forward"]
    want = numpy_layer.attention(weights, given, c.ratio(layer), topk, frequencies, config)
    assert equal(out[0], want) > ATTENTION
    want = [numpy_layer.feed_forward(weights, row, int(t), config) for row, t in zip(ffn_given, tokens, strict=True)]
    assert equal(ffn_out, np.array(want)) > FEED_FORWARD
    assert equal(ours.streams, after) > STREAMS


def test_queries_and_softmax_alone(numpy_layer, model, mini):
    """Each on the port's own input, so that nothing but its own roundings can differ."""
    c = model.config
    weights, stored = LayerWeights(model.load(0), c, "layer"), as_numpy(model.load(0))
    config = {"eps": c.indexer.rms_norm_eps, "heads": c.num_attention_heads, "dim": c.head_dim}
    frequencies = inverse_frequencies(c.rope_theta, 64, None)
    qr = Trace.load(mini / "trace.safetensors", layer=2)["qr"][:40]
    wq_b = weights.linear("attn.wq_b", c.num_attention_heads * c.head_dim, qr.shape[1])
    q = attention._queries(c, wq_b, qr, torch.arange(40), frequencies, REFERENCE)
    want = [
        numpy_layer.queries(stored, row, t, frequencies.numpy(), config) for t, row in enumerate(qr.float().numpy())
    ]
    assert equal(q, np.array(want)) > 0.9995
    rng = torch.Generator().manual_seed(0)
    keys, sink = torch.randn(30, c.head_dim, generator=rng).bfloat16(), torch.randn(q.shape[1], generator=rng)
    slots = torch.randint(-1, 30, (40, 20), generator=rng)
    out = attention.attend(q, keys, slots, sink, REFERENCE)
    want = [
        [numpy_layer.attend(head, keys[s[s >= 0]].float().numpy(), sink[h]) for h, head in enumerate(row)]
        for row, s in zip(q.float().numpy(), slots, strict=True)
    ]
    assert equal(out, np.array(want)) > 0.9995


def recorded(seen, name, function):
    def call(*arguments, **options):
        result = function(*arguments, **options)
        seen[name] = (arguments[3].float().numpy(), result)
        return result

    return call


def equal(ours, theirs):
    share = float(np.mean(ours.float().numpy() == theirs))
    print(f"{share:.4f} equal")
    return share
