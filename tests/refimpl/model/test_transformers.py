"""The whole stack in exact numerics against transformers' `DeepseekV4ForCausalLM`, which shares no code with it.

Random small models with every kind of layer (ratios 0, 4, 128; hash and scored routing), all parameters random, clamps
reached; lengths with every remainder of 4 and around 128. The weights travel through transformers' `save_pretrained`.

| what | tolerance, relative L2 of the tensor |
|--|--|
| streams after each layer | LAYER_TOLERANCE |
| logits | LAYER_TOLERANCE |
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffcheck.checkpoint.model import open_model
from diffcheck.refimpl import InputError
from diffcheck.refimpl.model import EXACT, REFERENCE, LayerWeights, ModelConfig, logits, run_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

LAYER_TOLERANCE = 1e-5
RATIOS = (0, 4, 128, 4, 128, 0)


def released(seed, **changes):
    """A config.json in the released spelling, of random size."""
    rng = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=rng))]

    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": pick(32, 64, 96),
        "num_hidden_layers": len(RATIOS),
        "num_attention_heads": pick(4, 8),
        "num_key_value_heads": 1,
        "head_dim": pick(64, 96),
        "q_lora_rank": pick(32, 64),
        "qk_rope_head_dim": 32,
        "o_groups": pick(1, 2, 4),
        "o_lora_rank": pick(8, 16),
        # many heads: with few, whole rows of scores are zero after the ReLU and which entry wins is a coin toss
        "index_n_heads": pick(16, 24),
        "index_head_dim": pick(32, 64),
        "index_topk": pick(3, 6, 8),
        "rms_norm_eps": pick(1e-6, 1e-3),
        "rope_theta": pick(10000, 500),
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "compress_ratios": list(RATIOS),
        "vocab_size": 64,
        "sliding_window": pick(5, 8, 16),
        "n_routed_experts": pick(6, 8),
        "n_shared_experts": 1,
        "num_experts_per_tok": pick(2, 3),
        "moe_intermediate_size": pick(24, 32),
        "num_hash_layers": pick(1, 2, 3),
        "hc_mult": pick(4, 3),
        "hc_sinkhorn_iters": pick(20, 3),
        "hc_eps": pick(1e-6, 1e-3),
        "swiglu_limit": 1.5,
        "routed_scaling_factor": pick(1.5, 2.5),
        "scoring_func": "sqrtsoftplus",
        "pad_token_id": None,
    } | changes


def random_model(seed, **changes):
    """transformers' model with every parameter and table random, none left at its trivial initial value."""
    config = transformers.DeepseekV4Config.from_dict(released(seed, **changes))
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(-1)[:, : tensor.shape[1]])
            elif tensor.dim() == 1:
                tensor.copy_(torch.randn(tensor.shape) * 0.5 + ("norm" in name))
            elif name.endswith("position_bias"):
                tensor.copy_(torch.randn(tensor.shape))
            else:
                tensor.copy_(torch.randn(tensor.shape) * 2 * tensor.shape[-1] ** -0.5)
    return model


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def compare(model, checkpoint, tokens):
    """Streams after every layer and the logits; transformers replaces the last layer's streams by the normed output."""
    with torch.no_grad():
        theirs = model(tokens[None], output_hidden_states=True)
    opened = open_model(checkpoint)
    for result in run_model(opened.config, opened.load, tokens, numerics=EXACT):
        hidden = theirs.hidden_states[result.layer + 1][0]
        if result.layer + 1 < opened.config.layers:
            assert distance(result.streams, hidden) < LAYER_TOLERANCE, f"layer {result.layer}"
    top = LayerWeights(opened.load_head(), opened.config, "top")
    ours = logits(opened.config, top, result.streams, EXACT)
    assert distance(ours, theirs.logits[0]) < LAYER_TOLERANCE
    return ours


@pytest.mark.parametrize("seed", range(6))
def test_logits_and_every_layer(tmp_path, seed):
    model = random_model(seed)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 64, (257 + seed,), generator=torch.Generator().manual_seed(seed))
    compare(model, tmp_path, tokens)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 131])
def test_lengths_around_the_first_entry(tmp_path, length):
    model = random_model(11)
    model.save_pretrained(tmp_path)
    compare(model, tmp_path, torch.arange(length) * 7 % 64)


def test_clamps_are_reached(tmp_path):
    """Without its clamp the same model gives other logits, so the comparison above does see the clamps."""
    model = random_model(0)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(40)
    clamped = compare(model, tmp_path, tokens)
    config = json.loads((tmp_path / "config.json").read_text()) | {"swiglu_limit": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_model(tmp_path)
    *_, last = run_model(opened.config, opened.load, tokens, numerics=EXACT)
    free = logits(opened.config, LayerWeights(opened.load_head(), opened.config, "top"), last.streams, EXACT)
    assert distance(free, clamped) > 0.01


def test_released_spelling_gives_the_same_bits(tmp_path):
    """Names and config of save_pretrained and of the released layout are two spellings of one model."""
    saved, spelled = tmp_path / "saved", tmp_path / "released"
    random_model(1, head_dim=96).save_pretrained(saved)
    spelled.mkdir()
    tensors = {
        name.removeprefix("model.")
        .replace("embed_tokens", "embed")
        .replace("hc_head.hc_", "hc_head_")
        .replace("attn.norm.", "attn.kv_norm."): tensor
        for name, tensor in load_file(saved / "model.safetensors").items()
    }
    assert "layers.0.attn.kv_norm.weight" in tensors
    save_file(tensors, spelled / "model.safetensors")
    (spelled / "config.json").write_text(json.dumps(released(1, head_dim=96)))
    first, second = open_model(saved), open_model(spelled)
    assert first.config == second.config
    tokens = torch.arange(140) % 64
    for one, other in zip(*(run_model(m.config, m.load, tokens) for m in (first, second)), strict=True):
        assert torch.equal(one.streams, other.streams)
        assert one.streams.dtype == torch.bfloat16, "reference numerics"


@pytest.mark.parametrize("seed", range(4))
def test_a_config_saved_by_transformers_reads_the_same(tmp_path, seed):
    raw = released(seed)
    transformers.DeepseekV4Config.from_dict(dict(raw)).save_pretrained(tmp_path)
    assert ModelConfig.from_json(tmp_path / "config.json") == ModelConfig.from_dict(raw)


@pytest.mark.parametrize("length", [13, 70, 71, 133])
def test_a_prefix_does_not_depend_on_what_follows(tmp_path, length):
    """Causality, bit for bit, in the reference numerics."""
    random_model(2, head_dim=96, index_topk=8).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    tokens = torch.randint(0, 64, (200,), generator=torch.Generator().manual_seed(5))
    whole = run_model(opened.config, opened.load, tokens, numerics=REFERENCE)
    prefix = run_model(opened.config, opened.load, tokens[:length], numerics=REFERENCE)
    for long, short in zip(whole, prefix, strict=True):
        if opened.config.ratio(long.layer) == 128:
            break  # the number of entries sets the width of this softmax, and with it the order of a sum
        assert torch.equal(long.streams[:length], short.streams)
    assert long.layer == 2


def test_a_missing_tensor_is_named(tmp_path):
    random_model(0).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.attn.compressor.ape"]
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_model(tmp_path)
    with pytest.raises(InputError, match=r"layer 1: attn\.compressor\.ape is missing, expected shape \[4, "):
        list(run_model(opened.config, opened.load, torch.arange(9)))


def test_key_blocks_that_do_not_fit_are_refused(tmp_path):
    random_model(2, head_dim=64).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    with pytest.raises(InputError, match="less its RoPE dims is 32, expected a multiple of 64"):
        next(run_model(opened.config, opened.load, torch.arange(4)))


@pytest.mark.parametrize("tokens", [torch.tensor([1, 64]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([])])
def test_bad_tokens_are_refused(tmp_path, tokens):
    random_model(0).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    with pytest.raises(InputError, match="expected"):
        next(run_model(opened.config, opened.load, tokens))
