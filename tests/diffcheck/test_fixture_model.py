"""Whole random checkpoints: complete, readable by what others wrote, of sane magnitude, resumable."""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from diffcheck.checkpoint import inspect_checkpoint
from diffcheck.checkpoint.model import open_model
from diffcheck.errors import InputError
from diffcheck.fixture import GEOMETRIES
from diffcheck.fixture_model import byte_tokeniser, layer_bytes, write_model
from diffcheck.refimpl import dequantise_weight
from diffcheck.refimpl.model import run_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("whole") / "model", like="mini", layers=5, seed=3)


def test_nothing_is_missing_and_nothing_is_foreign(whole):
    inspection = inspect_checkpoint(whole)
    assert inspection.findings == ()
    assert inspection.unmapped == ()
    for layer in inspection.layers:
        assert all(there == expected for there, expected in layer.groups.values())


def test_dtypes_and_shapes_are_those_of_the_trained_miniature(whole, mini):
    """The released layout as a released-format checkpoint has it, tensor by tensor."""

    def headers(directory):
        found = {}
        for file in directory.glob("model*.safetensors"):
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                    part = opened.get_slice(name)
                    found[name] = (part.get_dtype(), part.get_shape())
        return found

    assert headers(whole) == headers(mini)


def test_runs_and_stays_finite(whole):
    model = open_model(whole)
    *_, last = run_model(model.config, model.load, torch.arange(300))
    size = last.streams.float().square().mean().sqrt()
    assert 0.1 < size < 100
    kept = [len(row[row >= 0]) for row in last.record.topk[-4:]]
    assert kept == [64] * 4


def test_weights_have_the_size_that_keeps_activations(whole):
    """RMS near inputs^-0.5 for every kind of storage, and the index heads are no copies of each other."""
    tensors = open_model(whole).load(2)
    for name, inputs in (("attn.wq_b", 128), ("ffn.experts.3.w2", 128), ("ffn.shared_experts.w1", 256)):
        dense = dequantise_weight(tensors[f"{name}.weight"], tensors[f"{name}.scale"], (128, 128))
        assert 0.5 < float(dense.square().mean().sqrt()) * inputs**0.5 < 2, name
        assert abs(float(torch.corrcoef(dense[:2])[0, 1])) < 0.5


def test_a_table_row_names_different_experts(whole):
    table = open_model(whole).load(0)["ffn.gate.tid2eid"]
    assert table.shape == (512, 2)
    assert (table[:, 0] != table[:, 1]).all()
    assert set(table.unique().tolist()) == set(range(8))


def test_same_seed_same_bytes_and_interrupted_writing_goes_on(whole, tmp_path):
    """A shard that is there is kept, one that is not is made again; another seed is another checkpoint."""
    again = write_model(tmp_path / "again", like="mini", layers=5, seed=3)
    third = sorted(again.glob("model*.safetensors"))[2]
    original = third.read_bytes()
    third.unlink()
    first = sorted(again.glob("model*.safetensors"))[0]
    os.utime(first, (1, 1))
    (again / "model.safetensors.index.json").unlink()
    write_model(again, like="mini", layers=5, seed=3)
    assert third.read_bytes() == original == (whole / third.name).read_bytes()
    assert first.stat().st_mtime == 1, "a whole shard is not written again"
    other = write_model(tmp_path / "other", like="mini", layers=5, seed=4)
    assert (other / third.name).read_bytes() != original
    with pytest.raises(InputError, match="holds something else"):
        write_model(again, like="mini", layers=5, seed=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"like": "v5", "layers": 1}, "like is 'v5', expected one of v4-flash, v4-pro, mini"),
        ({"like": "mini", "layers": 6}, "layers is 6, expected 1 to 5"),
        ({"like": "mini", "layers": 0}, "layers is 0, expected 1 to 5"),
    ],
)
def test_bad_requests(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        write_model(tmp_path / "model", **options)


def test_flash_layers_have_the_published_size():
    """By hand from the table of shapes: experts 256 x 3 x (2048 x 4096 / 2 bytes, and a scale for each 32 of them)."""
    experts = 256 * 3 * 2048 * 4096 * (1 / 2 + 1 / 32)
    assert experts < layer_bytes("v4-flash", 3) < 1.1 * experts
    assert layer_bytes("v4-flash", 2) > layer_bytes("v4-flash", 1), "an indexer and a compressor more"


def test_tokeniser_is_one_token_a_byte(whole):
    tokenizers = pytest.importorskip("tokenizers")
    tokeniser = tokenizers.Tokenizer.from_file(str(whole / "tokenizer.json"))
    text = "A needle: naïve 7?\n\t\x00 done"
    assert tokeniser.encode(text).ids == list(text.encode())
    assert tokeniser.decode(list(text.encode())) == text
    assert len(byte_tokeniser()["model"]["vocab"]) == 256


def test_config_is_that_of_the_first_layers(whole):
    config = json.loads((whole / "config.json").read_text())
    assert config["compress_ratios"] == list(GEOMETRIES["mini"].compress_ratios)
    assert config["num_hidden_layers"] == 5
    codes = load_file(whole / "model-00003-of-00006.safetensors")["layers.2.attn.wq_a.weight"].view(torch.uint8)
    assert len(np.unique(codes.numpy())) > 64, "all kinds of codes"


@pytest.fixture(scope="module")
def measure_model(helper):
    return helper("../fixtures/measure_model")


def test_measurement_script_stops_in_time_and_goes_on(measure_model, tmp_path, monkeypatch, capsys):
    """No time at all: it ends with 75 and keeps what it wrote; called again it finishes, and prints a line a length."""
    command = ["measure_model.py", "--directory", str(tmp_path), "--like", "mini", "--layers", "5"]
    command += ["--lengths", "40,301", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [*command, "--seconds", "0"])
    assert measure_model.main() == 75
    monkeypatch.setattr(sys, "argv", command)
    assert measure_model.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "time is up" in "".join(lines)
    assert lines[-2].startswith("40 tokens: 5 layers in ")
    assert lines[-1].startswith("301 tokens: 5 layers in ")
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [t["ratio"] for t in runs[1]["times"]] == [0, 0, 4, 128, 4]
    assert not list(tmp_path.glob("run-*/streams-*")), "finished streams free the disk"


@pytest.mark.parametrize(("room_for", "layers"), [(0, 1), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_measurement_script_takes_the_layers_the_disk_holds(measure_model, tmp_path, monkeypatch, room_for, layers):
    """At least one, at most all, whatever this machine's disk has free."""
    free = measure_model.SPARE + 1 + sum(layer_bytes("mini", min(layer, 4)) for layer in range(room_for))
    monkeypatch.setattr(measure_model.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert measure_model.layers_that_fit("mini", tmp_path) == layers
