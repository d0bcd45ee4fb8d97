"""docs/choosing.md: its commands run, and what it shows is what they print."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffcheck.cli import app
from diffcheck.errors import InputError
from diffcheck.fixture import GEOMETRIES
from diffcheck.grammar import parse_precision
from diffcheck.presets import build
from diffcheck.refimpl.config import V4_FLASH

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "choosing.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", DOCS, flags=re.DOTALL) for line in block.strip().splitlines()
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the repository's fixtures and the files that the page shows."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (space,) = re.findall(r"```toml\n(.*?)```", DOCS, flags=re.DOTALL)
    (tmp_path / "space.toml").write_text(space)
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "config.json").write_text(json.dumps(GEOMETRIES["v4-flash"].config_json()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line):
    program, *arguments = shlex.split(line)
    assert program == "diffcheck"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output or result.exception
    return result.stdout


def shown(command):
    """What the page shows after a command."""
    (text,) = re.findall(rf"```text\n\$ {re.escape(command)}\n(.*?)```", DOCS, flags=re.DOTALL)
    return text


def test_there_are_commands():
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(place, line):
    run(line)


def test_memory_prints_what_is_shown(place):
    command = "diffcheck memory --checkpoint flash"
    assert [line.rstrip() for line in run(command).splitlines()] == shown(command).splitlines()


def test_sweep_prints_what_is_shown(place):
    """But for the time it takes, and last digits that another CPU may round otherwise."""
    command = "diffcheck sweep --checkpoint fixtures/mini-v4"
    got, want = run(command), shown(command)
    for line in want.splitlines():
        name = line.split("  ")[0]
        assert name in got, name
    assert want.count("\n") == got.count("\n")


def test_the_error_is_the_one_shown(place):
    (text,) = re.findall(r"diffcheck: (unknown precision .*)", DOCS)
    with pytest.raises(InputError) as error:
        build("e4m3/128/ue8m1", V4_FLASH)
    assert str(error.value) == text


def test_every_spelling_in_the_table_is_one():
    rows = re.findall(r"^\| (`.*?) \| ", DOCS, flags=re.MULTILINE)
    spellings = [spelled for row in rows for spelled in re.findall(r"`(.*?)`", row)]
    assert len(spellings) > 12
    for spelled in spellings:
        assert parse_precision(spelled, dim=128).apply(build("reference", V4_FLASH)).name == spelled
