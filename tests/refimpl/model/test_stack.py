"""How the stack is streamed: one layer at a time, the next one read meanwhile, experts only where a token goes."""

import json
import threading

import pytest
import torch

from diffcheck.checkpoint.model import open_model
from diffcheck.refimpl import InputError
from diffcheck.refimpl.model import EXACT, REFERENCE, ModelConfig, embed, experts, functions, run_model, stream_layers
from diffcheck.refimpl.model.weights import LayerWeights, Linear


@pytest.fixture(scope="module")
def model(mini):
    return open_model(mini)


def test_only_experts_with_a_token_are_dequantised(model, monkeypatch):
    """Three tokens of two experts each in a hash layer: at most six of the eight, and exactly those of the table."""
    used = set()
    original = LayerWeights.linear

    def linear(self, name, *shape):
        used.add((self.where, name.removeprefix("ffn.experts.").split(".")[0]))
        return original(self, name, *shape)

    monkeypatch.setattr(LayerWeights, "linear", linear)
    tokens = torch.tensor([7, 7, 19])
    next(run_model(model.config, model.load, tokens))
    table = model.load(0)["ffn.gate.tid2eid"]
    assert {e for where, e in used if where == "layer 0" and e.isdecimal()} == {
        str(int(e)) for e in table[[7, 19]].unique()
    }


def test_the_next_layer_is_read_while_one_runs(model):
    """And only the next one: at most two layers have been asked for beyond those that are done."""
    read, arrived = [], threading.Semaphore(0)

    def load(layer):
        read.append(layer)
        arrived.release()
        return {}

    for layer, _ in stream_layers(model.config, load, range(5), "cpu"):
        for _ in range(1 if 0 < layer < 4 else 2 if layer == 0 else 0):
            assert arrived.acquire(timeout=10), f"layer {layer + 1} is being read while layer {layer} runs"
        assert read == list(range(min(layer + 2, 5)))


def test_resuming_from_streams_gives_the_same_bits(model):
    tokens = torch.arange(70)
    whole = list(run_model(model.config, model.load, tokens))
    rest = list(run_model(model.config, model.load, tokens, layers=range(3, 5), streams=whole[2].streams))
    assert [r.layer for r in rest] == [3, 4]
    assert torch.equal(rest[-1].streams, whole[-1].streams)
    with pytest.raises(InputError, match="layer 3 cannot be the first one"):
        next(run_model(model.config, model.load, tokens, layers=range(3, 5)))


def test_streams_start_as_copies_of_the_embedding(model):
    top = LayerWeights(model.load(None), model.config, "top")
    streams = embed(model.config, top, torch.tensor([3, 500]))
    table = model.load(None)["embed.weight"]
    assert streams.shape == (2, 4, 256)
    assert torch.equal(streams[:, 2], table[[3, 500]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"o_groups": 3}, "expected a divisor of the 8 heads"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"num_experts_per_tok": 9}, "9 experts a token of 8"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, "expected hash_moe layers and then moe layers"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_configs_that_cannot_be(mini, change, message):
    raw = json.loads((mini / "config.json").read_text()) | change
    with pytest.raises(InputError, match=message):
        ModelConfig.from_dict({key: value for key, value in raw.items() if value is not None})


def test_the_inference_spelling(mini):
    """DeepSeek's own config names the same numbers otherwise."""
    raw = json.loads((mini / "config.json").read_text())
    inference = {
        "dim": 256, "n_layers": 5, "n_heads": 8, "head_dim": 128, "q_lora_rank": 128, "rope_head_dim": 64,
        "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 64,
        "window_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "n_activated_experts": 2,
        "moe_inter_dim": 128, "n_hash_layers": 2, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000, "rope_factor": 16, "beta_fast": 32,
        "beta_slow": 1, "original_seq_len": 65536, "vocab_size": 512, "score_func": "sqrtsoftplus",
        "route_scale": 1.5, "swiglu_limit": 10.0, "compress_ratios": [0, 0, 4, 128, 4],
    }  # fmt: skip
    assert ModelConfig.from_dict(inference) == ModelConfig.from_dict(raw)


@pytest.mark.parametrize("bad", [-1, 8])
def test_a_routing_table_that_names_no_expert(model, bad):
    table = torch.zeros(512, 2, dtype=torch.int64)
    table[5, 1] = bad
    tensors = model.load(0) | {"ffn.gate.tid2eid": table}
    weights = LayerWeights(tensors, model.config, "layer 0")
    with pytest.raises(InputError, match=r"names an expert outside 0\.\.7"):
        experts.route(model.config, 0, weights, torch.zeros(1, 256).bfloat16(), torch.tensor([5]))


def test_a_plain_weight_leaves_its_activation_alone():
    """Stored bf16: one product, rounded once. Stored e4m3: the activation is quantised, in the reference only."""
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 128, generator=rng).bfloat16(), torch.randn(7, 128, generator=rng)
    whole = x.float() @ weight.T
    plain, stored = Linear(weight, quantised=False), Linear(weight, quantised=True)
    assert (plain(x, REFERENCE).float() - whole).abs().max() <= 2.0**-8 * whole.abs().max()
    assert (stored(x, EXACT) - whole).abs().max() < 1e-5 * whole.abs().max()
    assert (stored(x, REFERENCE).float() - whole).abs().max() > 0.02 * whole.abs().max()
    assert plain(x, REFERENCE).dtype == torch.bfloat16
    assert plain(x, EXACT).dtype == torch.float32
    with pytest.raises(InputError, match="96 inputs of a quantised weight"):
        Linear(weight[:, :96], quantised=True)(x[:, :96], REFERENCE)


@pytest.mark.parametrize("function", [functions.sigmoid, functions.silu, functions.softplus])
def test_activations_do_not_depend_on_the_place(function):
    """Bits of an element are the same at any length of the tensor, and right: against fp64."""
    x = 8 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    whole = function(x)
    for rows in range(1, 200):
        assert torch.equal(function(x[:rows]), whole[:rows])
    exact = getattr(torch.nn.functional, function.__name__)(x.double())
    assert ((whole - exact).abs() <= 1e-6 * exact.abs() + 1e-12).all()
