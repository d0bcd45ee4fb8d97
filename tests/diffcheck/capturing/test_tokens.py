"""Texts and token ids: what is accepted, and one clear line for what is not."""

import json
import shutil

import pytest

from diffcheck.capturing import load_text_inputs, tokens
from diffcheck.capturing.tokens import Tokeniser, read_text, read_tokens
from diffcheck.errors import EnvironmentMissing, InputError


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[1, 2.5]", "[true]", '["a"]', "[1,", "7", "[" * 5000], ids=lambda c: c[:8] or "empty"
)
def test_bad_token_files(tmp_path, content):
    path = tmp_path / "ids.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"ids\.json: .*expected a"):
        read_tokens(path)


def test_absent_files(tmp_path):
    for read in (read_tokens, read_text):
        with pytest.raises(InputError, match="no such file, expected a"):
            read(tmp_path / "none")


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"\xff\xfe\x00", "not readable as UTF-8")])
def test_bad_texts(tmp_path, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_text(tmp_path / "text")


@pytest.mark.parametrize(("ids", "message"), [([1, 2, 3, 600], "token 3 has id 600"), ([1, 2], "makes 2 tokens")])
def test_ids_the_checkpoint_cannot_have(mini, tmp_path, ids, message):
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    with pytest.raises(InputError, match=message):
        load_text_inputs(mini, text=None, tokens=tmp_path / "ids.json", layers=None)


def test_one_source_is_needed(mini, tmp_path):
    for text, ids in ((None, None), (tmp_path / "a", tmp_path / "b")):
        with pytest.raises(InputError, match="expected one of --text FILE and --tokens"):
            load_text_inputs(mini, text=text, tokens=ids, layers=None)


def test_without_the_package(mini, monkeypatch):
    monkeypatch.setattr(tokens, "present", lambda _: False)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'diffcheck\[text\]'"):
        Tokeniser(mini)


def test_without_the_tokeniser_file(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        Tokeniser(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not readable as a tokeniser"):
        Tokeniser(tmp_path)


def test_text_goes_through_the_checkpoints_tokeniser(mini, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    copy = shutil.copytree(mini, tmp_path / "copy")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "needle": 2, "is": 3, "[BOS]": 4}, unk_token="[UNK]")
    tokeniser = tokenizers.Tokenizer(words)
    tokeniser.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokeniser.post_processor = tokenizers.processors.TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 4)])
    tokeniser.save(str(copy / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the needle is the haystack")
    asked = load_text_inputs(copy, text=tmp_path / "text.txt", tokens=None, layers=None)
    assert asked.tokens == (4, 1, 2, 3, 1, 0)
    assert asked.source == "forward pass of the reference, 6 tokens of text.txt"
    assert Tokeniser(copy).encode_plain("the needle") == [1, 2]
