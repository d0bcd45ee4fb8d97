"""`capture`: what it records, that an interrupt costs nothing, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from diffcheck.capturing import capture_trace, load_text_inputs
from diffcheck.capturing.embedding import embedding_inputs
from diffcheck.capturing.forward import Captured, capture_forward
from diffcheck.errors import InputError
from diffcheck.refimpl import STAGES, load_traces, run_indexer
from diffcheck.refimpl.model import run_model
from diffcheck.refimpl.rotation import inverse_frequencies

LENGTH = 302


@pytest.fixture(scope="module")
def tokens(mini, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    path.write_text(json.dumps(json.loads((mini / "tokens.json").read_text())[:LENGTH]))
    return path


def inputs(checkpoint, tokens, **options):
    return load_text_inputs(checkpoint, text=None, tokens=tokens, layers=None, **options)


@pytest.fixture(scope="module")
def captured(mini, tokens, tmp_path_factory):
    """One whole capture with all stages, and the traces read back."""
    out = tmp_path_factory.mktemp("captured") / "trace.safetensors"
    capture_trace(inputs(mini, tokens), out, queries=40, stages=STAGES)
    assert sorted(p.name for p in out.parent.iterdir()) == ["trace.safetensors"], "the run directory is gone"
    return load_traces(out)


def test_holds_what_the_model_computes(mini, tokens, captured):
    asked = inputs(mini, tokens)
    assert sorted(captured) == list(asked.layers) == [2, 4]
    for result in run_model(asked.model.config, asked.model.load, torch.tensor(asked.tokens)):
        if result.layer in captured:
            trace = captured[result.layer]
            assert torch.equal(trace["x"], result.record.x)
            assert torch.equal(trace["qr"], result.record.qr)
            assert "forward pass of the reference, 302 tokens of tokens.json" in trace.metadata["source"]


def test_stages_are_those_of_the_indexer_on_the_recorded_inputs(support, mini, tokens, captured):
    asked = inputs(mini, tokens)
    for layer, trace in captured.items():
        weights = asked.model.checkpoint.load(layer)
        want = run_indexer(asked.model.config.indexer, weights, trace["x"], trace["qr"], queries=trace["queries"])
        assert len(trace["queries"]) == 40
        for name in STAGES:
            support.assert_same_bits(trace[name], want[name], name)


def test_attention_mass_is_the_softmax_over_visible_entries(mini, tokens, captured, numpy_layer):
    """Once more by hand: queries and compressed keys in numpy, one softmax a head, mean over heads."""
    c = inputs(mini, tokens).model.config
    config = {"eps": c.indexer.rms_norm_eps, "heads": c.num_attention_heads, "dim": c.head_dim}
    theta, yarn = c.rope(4)
    frequencies = inverse_frequencies(theta, 64, yarn).numpy()
    model = inputs(mini, tokens).model
    tensors = {k: v for k, v in model.load(4).items() if k.startswith(("attn.compressor", "attn.wq_b"))}
    w = {k: v.float().numpy() for k, v in tensors.items() if "wq_b" not in k}
    w["attn.wq_b.weight"] = tensors["attn.wq_b.weight"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    w["attn.wq_b.scale"] = tensors["attn.wq_b.scale"].view(torch.uint8).numpy()
    trace = captured[4]
    keys = np.array(
        numpy_layer.compressed_keys(w, trace["x"].float().numpy(), 4, c.head_dim, frequencies, config["eps"])
    )
    assert trace["attention_mass"].shape == (40, LENGTH // 4)
    chosen = [(row, t) for row, t in enumerate(trace["queries"].tolist()) if t % 4 == 3 or row % 8 == 0]
    assert any(t % 4 == 3 for _, t in chosen), "a token that completes an entry sees it"
    for row, t in chosen[:12]:
        seen = keys[: (t + 1) // 4].astype(np.float64)
        heads = numpy_layer.queries(w, trace["qr"][t].float().numpy(), t, frequencies, config)
        logits = np.array([seen @ q.astype(np.float64) for q in heads]) * c.head_dim**-0.5
        share = np.exp(logits - logits.max(1, keepdims=True))
        want = np.zeros(LENGTH // 4)
        want[: len(seen)] = (share / share.sum(1, keepdims=True)).mean(0)
        got = trace["attention_mass"][row].numpy()
        assert np.abs(got - want).max() < 0.01 * want.max()
        assert (got[len(seen) :] == 0).all()
        assert (got[: len(seen)] > 0).all()


@pytest.mark.parametrize("stop", [0, 2, 3])
def test_an_interrupted_run_goes_on_where_it_stopped(mini, tokens, tmp_path, captured, stop):
    """The second call runs the layers after the interrupt only, and the trace is the same to the bit."""
    out, lines = tmp_path / "trace.safetensors", []

    def interrupt(line):
        if line.startswith(f"layer {stop} "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_trace(inputs(mini, tokens), out, queries=40, say=interrupt)
    assert not out.exists()
    times = capture_trace(inputs(mini, tokens), out, queries=40, say=lines.append)
    assert [t.layer for t in times] == list(range(stop + 1, 5))
    assert f"layers 0 to {stop} are done" in lines[0]
    assert lines[-1].startswith("layer 4 of 0..4: ")
    for layer, trace in load_traces(out).items():
        for name in ("x", "qr", "attention_mass"):
            assert torch.equal(trace[name], captured[layer][name])


def test_only_the_newest_streams_are_kept(mini, tokens, tmp_path):
    wanted = Captured(layers=(2, 4), queries=torch.tensor([300]))
    asked = inputs(mini, tokens)
    capture_forward(asked.model, asked.tokens, wanted, tmp_path / "run")
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert names == ["layer-0002.safetensors", "layer-0004.safetensors", "run.json", "streams-0003.safetensors"]
    assert capture_forward(asked.model, asked.tokens, wanted, tmp_path / "run") == [], "all is done"


def test_another_text_or_checkpoint_is_refused(mini, tokens, tmp_path):
    copy = shutil.copytree(mini, tmp_path / "copy")
    wanted, run = Captured(layers=(2,), queries=torch.tensor([300])), tmp_path / "run"
    asked = inputs(copy, tokens)
    capture_forward(asked.model, asked.tokens, wanted, run)
    with pytest.raises(InputError, match="holds a run with other text, expected"):
        capture_forward(asked.model, (*asked.tokens[:-1], 1), wanted, run)
    with pytest.raises(InputError, match="other stages"):
        capture_forward(asked.model, asked.tokens, Captured(layers=(2,), queries=wanted.queries, stages=("q",)), run)
    shard = copy / "model-00002-of-00002.safetensors"
    os.utime(shard, (1, 1))
    with pytest.raises(InputError, match="other checkpoint, expected"):
        capture_forward(inputs(copy, tokens).model, asked.tokens, wanted, run)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not empty and holds no run.json"), ("[", "not readable as JSON"), ("{}", "is no file of schema")],
)
def test_a_directory_of_something_else_is_refused(mini, tokens, tmp_path, content, message):
    (tmp_path / ("notes.txt" if content is None else "run.json")).write_text(content or "mine")
    asked = inputs(mini, tokens)
    with pytest.raises(InputError, match=message):
        capture_forward(asked.model, asked.tokens, Captured(layers=(2,), queries=torch.tensor([300])), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "nothing was touched"


def test_embedding_proxy(mini, tokens, tmp_path):
    """x by hand: the embedding row over its RMS, times attn_norm; and it says that it is a proxy."""
    asked = inputs(mini, tokens, kind="embedding")
    made = embedding_inputs(asked.model, asked.tokens, 4)
    row = asked.model.load(None)["embed.weight"].double()[list(asked.tokens)]
    norm = asked.model.load(4)["attn_norm.weight"].double()
    want = row / (row.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm
    assert (made["x"].double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    assert made["qr"].shape == (LENGTH, 128)
    assert abs(float(made["qr"].float().square().mean()) - 1) < 2, "normalised"
    capture_trace(asked, tmp_path / "out.safetensors")
    for trace in load_traces(tmp_path / "out.safetensors").values():
        assert trace.metadata["source"].startswith("PROXY: ")
        assert "attention_mass" not in trace, "a proxy knows nothing of the attention"


def test_layers_beyond_what_the_checkpoint_holds(tmp_path, mini, tokens):
    copy = shutil.copytree(mini, tmp_path / "copy")
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if not name.startswith("layers.3.attn.wq_b")
    }
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="holds layers 0 to 2 whole, expected all up to layer 4"):
        load_text_inputs(copy, text=None, tokens=tokens, layers=[4])
    assert inputs(copy, tokens).layers == (2,), "what can be run is run"


def test_command_interrupted_and_given_again(mini, tokens, tmp_path):
    """A real SIGINT: exit code 130, where the finished layers are, and the same command goes on from there."""
    out = tmp_path / "trace.safetensors"
    command = [sys.executable, "-m", "diffcheck", "capture", "--checkpoint", mini, "--tokens", tokens, "--out", out]
    running = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    lines = []
    for line in running.stderr:
        lines.append(line)
        if line.startswith("layer 1 "):
            running.send_signal(signal.SIGINT)
    assert running.wait() == 130, lines
    assert lines[-1] == "diffcheck: interrupted\n"
    assert f"finished layers are kept in {out}.run: the same command goes on from there\n" in lines
    assert not out.exists()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    assert "are done, found in" in done.stderr
    assert sorted(load_traces(out)) == [2, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.safetensors"]
