"""Every remainder of T mod 4, prefill in chunks, decode steps and two requests give `run` the same numbers.

A server's dump of a text in pieces is converted, run, and compared with the run on the text in one piece: however the
tokens arrived, the comparison sees one stream of them.
"""

import json
from itertools import pairwise

import pytest
import torch

from diffcheck.capturing.convert import convert_dump
from diffcheck.cli import app
from diffcheck.errors import InputError
from diffcheck.refimpl import Trace, save_traces


def cases(mini, trace, tmp_path, *options):
    out = tmp_path / "out.json"
    what = ["--layers", "4", "--precision", "fp8", "--theta", "checkpoint", "--queries", "8", "--json", out]
    app([str(a) for a in ("run", "--checkpoint", mini, "--trace", trace, *what, *options)], standalone_mode=False)
    return [{**case, "seconds": 0} for case in json.loads(out.read_text())["cases"]]


def whole(mini, tmp_path, first, last):
    """A trace of the recorded tokens first..last-1 as if they were a text of their own."""
    source = Trace.load(mini / "trace.safetensors", layer=4)
    path = tmp_path / f"whole-{first}.safetensors"
    save_traces(path, [Trace({name: source[name][first:last] for name in ("x", "qr")}, layer=4)])
    return path


def dump(mini, directory, passes):
    """passes: lists of (first row in the recorded trace, position, length), the requests' parts of one batch."""
    source = Trace.load(mini / "trace.safetensors", layer=4)
    directory.mkdir(parents=True)
    for number, batch in enumerate(passes):
        rows = torch.cat([torch.arange(row, row + length) for row, _, length in batch])
        torch.save(
            {
                "model.layers.4.input_layernorm": source["x"][rows],
                "model.layers.4.self_attn.q_norm": source["qr"][rows],
                "model.forward_batch_info.positions": torch.cat(
                    [torch.arange(position, position + length) for _, position, length in batch]
                ),
            },
            directory / f"Pass{number:05d}.pt",
        )


@pytest.mark.parametrize("length", [320, 321, 322, 323])
def test_chunks_and_decode_steps(mini, tmp_path, length):
    """Chunks of odd sizes and then single tokens, for every remainder of the length."""
    cuts = [0, 130, 257, 309, *range(310, length + 1)]
    passes = [[(a, a, b - a)] for a, b in pairwise(cuts)]
    dump(mini, tmp_path / "dump", passes)
    convert_dump(tmp_path / "dump", mini, tmp_path / "trace.safetensors")
    got = cases(mini, tmp_path / "trace.safetensors", tmp_path)
    assert got == cases(mini, whole(mini, tmp_path, 0, length), tmp_path)
    assert got[0]["visible"] == length // 4
    assert not got[0]["vacuous"]


def test_two_requests_of_one_batch(mini, tmp_path):
    """Ragged prefill of both, then decode in turn; each converted request runs like the text alone."""
    passes = [[(0, 0, 290), (1000, 0, 310)], [(290, 290, 1), (1310, 310, 1)], [(1311, 311, 1), (291, 291, 1)]]
    dump(mini, tmp_path / "dump", passes)
    for request, (first, last) in enumerate(((0, 292), (1000, 1312))):
        convert_dump(tmp_path / "dump", mini, tmp_path / "trace.safetensors", request)
        got = cases(mini, tmp_path / "trace.safetensors", tmp_path)
        assert got == cases(mini, whole(mini, tmp_path, first, last), tmp_path)


def test_two_requests_of_one_file(mini, tmp_path):
    source = Trace.load(mini / "trace.safetensors", layer=4)
    rows = torch.cat((torch.arange(292), torch.arange(1000, 1312)))
    both = tmp_path / "both.safetensors"
    shared = {"requests": torch.tensor([0, 292, 604])}
    save_traces(both, [Trace({name: source[name][rows] for name in ("x", "qr")}, layer=4, shared=shared)])
    for request, (first, last) in enumerate(((0, 292), (1000, 1312))):
        got = cases(mini, both, tmp_path, "--request", request)
        assert got[0]["attention_mass_lost"] is None
        notes = json.loads((tmp_path / "out.json").read_text())["notes"]
        assert [note for note in notes if note.startswith("lost attention mass: absent")]
        assert got == cases(mini, whole(mini, tmp_path, first, last), tmp_path)
    with pytest.raises(InputError, match="choose one with --request 0 to 1"):
        cases(mini, both, tmp_path)
    with pytest.raises(InputError, match="--request chooses one of a trace's requests"):
        app(["run", "--checkpoint", str(mini), "--length", "300", "--request", "1"], standalone_mode=False)
