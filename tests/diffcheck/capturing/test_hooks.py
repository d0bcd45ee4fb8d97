"""`with diffcheck.capture(model)` on transformers' own model: prefill, chunks, decode, a batch."""

import inspect

import pytest
import torch

import diffcheck
from diffcheck import Recipe, evaluate
from diffcheck.checkpoint import Checkpoint
from diffcheck.errors import InputError
from diffcheck.refimpl import load_traces

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model, and the directory that it was saved in."""
    config = transformers.DeepseekV4Config(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=64, q_lora_rank=32,
        partial_rotary_factor=0.5, index_n_heads=16, index_head_dim=32, index_topk=4, o_groups=2, o_lora_rank=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe"] * 3, vocab_size=64, sliding_window=8, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, pad_token_id=None,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "default", "rope_theta": 160000, "partial_rotary_factor": 0.5},
        },
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scale = 1.0 if parameter.dim() == 1 or "bias" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape) * scale + ("norm" in name))
    directory = tmp_path_factory.mktemp("saved")
    made.save_pretrained(directory)
    return made, directory


def tokens(length, batch=1, seed=0):
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model, ids, chunks=None):
    """One call, or the same text in chunks through a cache."""
    with torch.no_grad():
        if chunks is None:
            model(ids)
            return
        cache, first = transformers.DynamicCache(config=model.config), 0
        # newer transformers has another name for it
        name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
        for length in chunks:
            model(ids[:, first : first + length], **{name: cache}, use_cache=True)
            first += length


def test_recorded_scores_are_those_of_the_recorded_inputs(model, tmp_path):
    """x and qr that were seen give the scores that were seen, in the ideal recipe without Hadamard."""
    made, directory = model
    with diffcheck.capture(made) as recorded:
        run(made, tokens(61))
    recorded.save(tmp_path / "trace.safetensors")
    checkpoint = Checkpoint(directory)
    for layer, trace in load_traces(tmp_path / "trace.safetensors").items():
        assert trace.metadata["source"] == "hooks on DeepseekV4ForCausalLM"
        recipe = Recipe.ideal(checkpoint.config).replace(hadamard=False)
        ours = evaluate(
            recipe, checkpoint.config, checkpoint.load(layer), trace["x"].bfloat16(), trace["qr"].bfloat16()
        )
        seen = ours["scores"].isfinite()
        assert torch.equal(seen, trace["scores"].isfinite()), "invisible scores are -inf"
        error = (ours["scores"] - trace["scores"])[seen].norm() / trace["scores"][seen].norm()
        assert error < 0.02, "only the rounding of x and qr to bf16 lies between"
        assert trace["observed_topk"].shape == (61, 4)
        best = trace["scores"][60].topk(4).indices
        assert set(trace["observed_topk"][60].tolist()) == set(best.tolist())


@pytest.mark.parametrize("chunks", [[40, 1, 1, 1, 1, 1], [3, 4, 21, 17], [44, 1]])
def test_chunks_and_decode_join_to_the_same_trace(model, chunks):
    made, _ = model
    with diffcheck.capture(made) as whole:
        run(made, tokens(45))
    with diffcheck.capture(made, layers=[2]) as parts:
        run(made, tokens(45), chunks)
    assert sorted(parts.traces()) == [2]
    one, other = whole.traces()[2], parts.traces()[2]
    for name in ("x", "qr", "scores"):
        seen = one[name].isfinite()
        assert torch.allclose(other[name][seen], one[name][seen], atol=2e-4), name
    assert torch.equal(other["scores"].isfinite(), one["scores"].isfinite())


def test_a_batch_is_requests(model):
    made, _ = model
    ids = tokens(24, batch=2)
    with diffcheck.capture(made) as both:
        run(made, ids)
    for request in (0, 1):
        with diffcheck.capture(made) as alone:
            run(made, ids[request : request + 1])
        assert torch.allclose(both.traces(request)[1]["x"], alone.traces()[1]["x"], atol=1e-5)
    with pytest.raises(InputError, match="request is 2, expected 0 to 1"):
        both.traces(2)


def test_hooks_are_gone_after_the_block_even_after_an_error(model):
    made, _ = model
    with pytest.raises(RuntimeError, match="mine"), diffcheck.capture(made):
        raise RuntimeError("mine")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())
    with diffcheck.capture(made) as recorded:
        pass
    run(made, tokens(9))
    with pytest.raises(InputError, match="nothing was recorded"):
        recorded.traces()


def test_two_texts_in_one_block_are_refused(model):
    made, _ = model
    with diffcheck.capture(made) as recorded:
        run(made, tokens(9))
        run(made, tokens(9))
    with pytest.raises(InputError, match="not one stream of tokens"):
        recorded.traces()


def test_layers_without_an_indexer(model):
    with pytest.raises(InputError, match=r"no indexer in layers \[0\]"), diffcheck.capture(model[0], layers=[0]):
        pass
    with pytest.raises(InputError, match="no indexer in layers at all"), diffcheck.capture(torch.nn.Linear(2, 2)):
        pass
