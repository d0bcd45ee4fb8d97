"""Answers through the whole model: the hook, what is counted, and what a checkpoint must have."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffcheck.checkpoint.model import open_model
from diffcheck.cli import app
from diffcheck.errors import InputError
from diffcheck.fixture import write_checkpoint
from diffcheck.presets import build
from diffcheck.refimpl import run_indexer
from diffcheck.refimpl.model import LayerWeights, logits, run_model
from diffcheck.sweeping.answers import answer_text, right_answers

TOKENS = 520


@pytest.fixture(scope="module")
def tokens(mini, tmp_path_factory):
    """The beginning of the miniature's text."""
    path = tmp_path_factory.mktemp("answers") / "tokens.json"
    path.write_text(json.dumps(json.loads((mini / "tokens.json").read_text())[:TOKENS]))
    return path


@pytest.fixture(scope="module")
def given(mini, tokens):
    return answer_text(mini, text=None, tokens=tokens)


@pytest.fixture(scope="module")
def had(given):
    """What the reference answers."""
    return right_answers(given, None, "cpu")


def test_a_selection_in_place_of_the_references(mini, tokens):
    """The reference's own, put in from outside, changes no bit; another one does, and sees each layer's inputs."""
    model, ids = open_model(mini), torch.tensor(json.loads(tokens.read_text()))
    config, seen = model.config.indexer, []

    def same(layer, weights, x, qr):
        seen.append(layer)
        return run_indexer(config, weights, x, qr)["topk"]

    def nothing(layer, weights, x, qr):
        return torch.full((len(x), config.index_topk), -1)

    def last(**options):
        *_, result = run_model(model.config, model.load, ids, **options)
        return result.streams

    want = last()
    assert torch.equal(last(select=same), want)
    assert seen == [2, 4]
    assert not torch.equal(last(select=nothing), want)


def test_answers_are_the_texts_own_next_tokens(mini, given, had):
    model = given.model
    assert given.positions.tolist() == list(range(4 * 65 - 1, TOKENS - 1))  # what sees more than 64 entries
    *_, result = run_model(model.config, model.load, given.tokens)
    top = LayerWeights(model.load_head(), model.config, "top")
    best = logits(model.config, top, result.streams).argmax(-1)
    want = [bool(best[p] == given.tokens[p + 1]) for p in given.positions.tolist()]
    assert had.tolist() == want
    assert 3 < sum(want) < len(want)


def test_a_lossless_recipe_keeps_all_and_a_broken_one_does_not(given, had):
    config = given.model.config.indexer
    kept = right_answers(given, build("qat+e4m3/128/ue8m0", config), "cpu")
    assert torch.equal(kept, had)
    broken = right_answers(given, build("k=nohad+bf16", config).replace(k=1), "cpu")
    assert not torch.equal(broken, had)


def test_the_command(mini, tokens, tmp_path):
    (tmp_path / "space.toml").write_text('also = ["qat+e4m3/128/ue8m0", "k=nohad+int4", "bf16", "nohad+int4"]')
    arguments = [
        "sweep", "--checkpoint", str(mini), "--tokens", str(tokens), "--objective", "answers", "--rows", "32",
        "--halvings", "1", "--space", str(tmp_path / "space.toml"), "--device", "cpu", "--run-dir",
        str(tmp_path / "run"), "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "against answers kept" in result.output
    found = json.loads((tmp_path / "out.json").read_text())
    recipes = {r["name"]: r for r in found["recipes"]}
    lossless = recipes["qat+e4m3/128/ue8m0"]
    assert lossless["answers_kept"] == lossless["answers_count"] > 3
    assert found["fronts"]["answers"]
    # what was dropped on few rows was not run through the model
    assert any(r["answers_count"] == 0 for r in found["recipes"])
    again = CliRunner().invoke(app, [*arguments, "--resume"])
    assert again.exit_code == 0, again.output
    second = json.loads((tmp_path / "out.json").read_text())
    assert second["cases"]["measured"] == 0
    assert {r["name"]: r["answers_kept"] for r in second["recipes"]} == {
        r["name"]: r["answers_kept"] for r in found["recipes"]
    }
    assert np.allclose([r["recall"] for r in second["recipes"]], [r["recall"] for r in found["recipes"]], atol=0)


def test_what_must_be_there(mini, tokens, tmp_path):
    command = ["sweep", "--checkpoint", str(mini), "--objective", "answers"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InputError)
    assert "expected --text FILE or --tokens FILE.json" in str(result.exception)
    write_checkpoint(tmp_path / "indexers", like="mini")
    with pytest.raises(InputError, match=r"no embed.weight or no layer 0"):
        answer_text(tmp_path / "indexers", text=None, tokens=tokens)
    short = tmp_path / "short.json"
    short.write_text(json.dumps(json.loads(tokens.read_text())[:200]))
    with pytest.raises(InputError, match="200 tokens, expected more than 260"):
        answer_text(mini, text=None, tokens=short)
    both = CliRunner().invoke(app, [*command, "--tokens", str(tokens), "--texts", "2"])
    assert "exclude --trace, --length and --texts" in str(both.exception)
