"""The indexer's structure against transformers' `DeepseekV4Indexer`, which shares no code with this project.

transformers has neither Hadamard nor FP4 step and takes fp32, so it is compared with the ideal recipe without
Hadamard: windows, overlap, ape, positions, YaRN, norm, gates, mask and the state of a stream, not roundings.

| what | tolerance |
|--|--|
| scores in fp32 | SCORE_TOLERANCE of the usual size of a score, see `tolerance` |
| selection | the kept scores beat the others by transformers' own scores, up to that tolerance |
| YaRN's angular frequencies | equal bits at the thetas in use; one fp32 step elsewhere (1 - (1 - ramp)) |
| keys, in the cache of transformers | KEY_TOLERANCE absolute, at unit RMS |
"""

import json

import pytest
import torch

from diffcheck import Recipe, evaluate
from diffcheck.refimpl import IndexerConfig, IndexerWeights
from diffcheck.refimpl.rotation import inverse_frequencies

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

SCORE_TOLERANCE = 2e-6
KEY_TOLERANCE = 1e-5
LAYER = 1


def released(seed):
    """A config.json in the released spelling, of random size."""
    rng = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=rng))]

    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": pick(64, 96, 128),
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": pick(64, 128, 512),
        "q_lora_rank": pick(96, 128, 160, 256),
        "qk_rope_head_dim": 64,
        "index_n_heads": pick(4, 8, 16),
        "index_head_dim": 128,
        "index_topk": pick(3, 5, 8),
        "rms_norm_eps": pick(1e-6, 1e-3),
        "rope_theta": 10000,
        "compress_rope_theta": pick(160000, 40000),
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "compress_ratios": [0, 4, 128, 4],
        "vocab_size": 64,
        "sliding_window": 8,
    }


class Layer:
    """transformers' indexer with random weights, the same weights for ours; a hook catches the scores."""

    def __init__(self, seed):
        self.raw = released(seed)
        self.config = IndexerConfig.from_dict(self.raw)
        self.theirs_config = transformers.DeepseekV4Config.from_dict(dict(self.raw))
        self.module = modeling.DeepseekV4Indexer(self.theirs_config).eval()
        rng = torch.Generator().manual_seed(100 + seed)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                scale = 1.0 if parameter.dim() == 1 or name == "position_bias" else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * scale)
        m = self.module
        self.weights = IndexerWeights(
            wq_b=m.q_b_proj.weight.detach(),
            wq_b_scale=None,
            weights_proj=m.scorer.weights_proj.weight.detach(),
            wkv=m.kv_proj.weight.detach(),
            wgate=m.gate_proj.weight.detach(),
            ape=m.position_bias.detach(),
            norm=m.kv_norm.weight.detach(),
        )
        self.recipe = Recipe.ideal(self.config).replace(hadamard=False)
        self.caught = []
        self.module.scorer.register_forward_hook(lambda _module, _inputs, scores: self.caught.append(scores[0]))

    def inputs(self, tokens, seed=0):
        rng = torch.Generator().manual_seed(200 + seed)
        x = torch.randn(tokens, self.config.hidden_size, generator=rng).bfloat16()
        return x, torch.randn(tokens, self.config.q_lora_rank, generator=rng).bfloat16()

    def theirs(self, x, qr, start=0, cache=None):
        """(scores [T, E so far] without the mask, top-k indices) of transformers."""
        positions = torch.arange(start, start + len(x)).unsqueeze(0)
        with torch.no_grad():
            topk = self.module(x.float().unsqueeze(0), qr.float().unsqueeze(0), positions, cache, LAYER)[0]
        return self.caught[-1], topk


def tolerance(trace):
    """SCORE_TOLERANCE times the usual size of each score: sum over heads of |gate| * |q| * |k| * D^-0.5.

    Not the score itself, which cancels to anything between heads of different sign.
    """
    q, k = trace["q_quant"].double().norm(dim=-1), trace.state.keys.double().norm(dim=-1)
    usual = (trace["gate"].double().abs() * q).sum(-1, keepdim=True) * k * trace["q_quant"].shape[-1] ** -0.5
    return SCORE_TOLERANCE * usual


def compare(trace, scores, topk):
    """Assert that transformers' scores and selection are those of the trace."""
    ours = trace["scores"]
    assert ours.dtype == torch.float32
    allowed = tolerance(trace)
    seen = ours.isfinite()
    visible = (trace.queries + 1) // 4
    assert torch.equal(seen, torch.arange(ours.shape[1]) < visible[:, None])
    error = torch.where(seen, (ours.double() - scores.double()).abs(), 0)
    used = (error / allowed).nan_to_num(0)[seen]
    print(f"scores use {float(used.max()) if len(used) else 0:.2f} of the tolerance")
    assert (error <= allowed)[seen].all()
    assert topk.shape == trace["topk"].shape
    for t, count in enumerate(visible.tolist()):
        mine, other = (set(kept[t][kept[t] >= 0].tolist()) for kept in (trace["topk"], topk))
        assert len(mine) == len(other) == min(count, topk.shape[1])
        for a in mine - other:
            margin = 2 * allowed[t].max()
            assert all(abs(scores[t, a] - scores[t, b]) <= margin for b in other - mine)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [61, 90])
def test_prefill(seed, tokens):
    layer = Layer(seed)
    x, qr = layer.inputs(tokens, seed)
    scores, topk = layer.theirs(x, qr)
    compare(evaluate(layer.recipe, layer.config, layer.weights, x, qr), scores, topk)


@pytest.mark.parametrize("chunks", [[1] * 26, [3, 1, 5, 4, 2, 8, 1, 7], [22, 1, 1, 1, 1, 30], [2, 40]])
def test_decode_with_a_cache_equals_prefill(support, chunks):
    layer = Layer(len(chunks))
    x, qr = layer.inputs(sum(chunks))
    cache = transformers.DynamicCache(config=layer.theirs_config)
    whole = evaluate(layer.recipe, layer.config, layer.weights, x, qr)
    prefill, _ = layer.theirs(x, qr)
    start, state = 0, None
    for length in chunks:
        part = slice(start, start + length)
        trace = evaluate(layer.recipe, layer.config, layer.weights, x[part], qr[part], start=start, state=state)
        state = trace.state
        scores, topk = layer.theirs(x[part], qr[part], start, cache)
        compare(trace, scores, topk)
        support.assert_same_bits(
            trace["scores"], whole["scores"][part, : trace["scores"].shape[1]], f"tokens {start}.."
        )
        assert torch.allclose(scores, prefill[part, : scores.shape[1]], atol=1e-5), "transformers' own decode"
        start += length
    keys = cache.layers[LAYER].compressed_kv["indexer"][0]
    assert (keys - state.keys).abs().max() < KEY_TOLERANCE
    assert state.position % 4 == cache.layers[LAYER].buffer_kv["indexer"].shape[1]


@pytest.mark.parametrize(("theta", "steps"), [(160000, 0), (40000, 0), (10000, 1), (500000, 1)])
def test_yarn_table(theta, steps):
    raw = released(0) | {"compress_rope_theta": theta}
    module = modeling.DeepseekV4Indexer(transformers.DeepseekV4Config.from_dict(raw))
    ours = IndexerConfig.from_dict(raw)
    assert ours.compress_rope_theta == theta
    assert module.rotary_emb.compress_attention_scaling == 1.0, "no mscale"
    table = inverse_frequencies(ours.compress_rope_theta, ours.rope_head_dim, ours.yarn)
    # bits of positive floats count in steps; transformers keeps 1 - ramp and takes its complement once more
    theirs = module.rotary_emb.compress_inv_freq
    assert (table.view(torch.int32) - theirs.view(torch.int32)).abs().max() <= steps


def test_plain_rope_table_is_bit_equal(support):
    module = modeling.DeepseekV4Indexer(transformers.DeepseekV4Config.from_dict(released(0)))
    table = inverse_frequencies(10000.0, 64, None)
    support.assert_same_bits(table, module.rotary_emb.main_inv_freq, "inverse frequencies")


@pytest.mark.parametrize("seed", range(4))
def test_a_config_saved_by_transformers_reads_the_same(tmp_path, seed):
    layer = Layer(seed)
    layer.theirs_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in saved
    assert "rope_scaling" not in saved
    read = IndexerConfig.from_json(tmp_path / "config.json")
    assert read == layer.config
    assert read.indexer_layers == (1,)


def test_casting_the_whole_module_to_bf16_is_a_trap():
    """It also casts the rotary buffers, and the angles with them; only the linear layers may be cast."""
    layer = Layer(0)
    before = layer.module.rotary_emb.compress_inv_freq.clone()
    layer.module.to(torch.bfloat16)
    after = layer.module.rotary_emb.compress_inv_freq
    assert after.dtype == torch.bfloat16
    assert (after.float() / before - 1).abs().max() > 1e-3
