"""Commands and files printed in README and docs/text.md about real hidden states run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from diffcheck.cli import app
from diffcheck.needle import read_test

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "text.md").read_text()
README = (ROOT / "README.md").read_text()


def commands():
    blocks = re.findall(r"```bash\n(.*?)```", TEXT + README.split("## Real hidden states")[1], flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return sorted({line for line in lines if line.startswith("diffcheck ") and "fixtures/mini-v4" in line})


def test_there_are_some():
    assert len(commands()) == 4


@pytest.mark.parametrize("line", [c for c in commands() if "--trace" not in c])
def test_command_runs(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    app(words, standalone_mode=False)
    assert capsys.readouterr().out
    if words[0] == "capture":  # what it wrote is the next line's input
        (follow,) = [c for c in commands() if "--trace trace.safetensors" in c]
        app(shlex.split(follow)[1:], standalone_mode=False)
        assert "attention mass" in capsys.readouterr().out


def test_needle_file(tmp_path):
    (toml,) = re.findall(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL)
    (tmp_path / "test.toml").write_text(toml)
    (tmp_path / "book.txt").write_text("It was a dark night. " * 99)
    made = read_test(tmp_path / "test.toml", lambda text: list(text.encode()))
    assert made.lengths == (2000, 10000)
    assert bytes(made.needles[0].question).decode() == " What is the code of the vault?"
