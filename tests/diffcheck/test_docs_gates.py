"""docs/gates.md: its commands run as they stand there, its file is one, its messages are what is said."""

import json
import re
import shlex
from pathlib import Path

import pytest

from diffcheck.gates import RECOMMENDED_GATES
from diffcheck.regression import DEFAULT_TOLERANCE

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "gates.md").read_text()
COMMANDS = [
    shlex.split(line)[1:] for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL) for line in block.splitlines()
]
TEXTS = re.findall(r"```text\n(.*?)```", DOC, re.DOTALL)
(FILE,) = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    (directory / "fixtures").symlink_to(ROOT / "fixtures")
    return directory


def shape(text):
    """Lines without their numbers and spaces: the last digits are another machine's."""
    return [" ".join(re.sub(r"[-+]?[0-9]+[0-9.]*(e-[0-9]+)?", "#", line).split()) for line in text.splitlines()]


@pytest.mark.parametrize("page", ["gates.md", "calibration.md"])
def test_both_pages_name_the_recommended_gates(page):
    text = (ROOT / "docs" / page).read_text()
    assert [gate for gate in RECOMMENDED_GATES if f"`{gate}`" not in text] == []


def test_every_command_runs(cli, place, monkeypatch):
    """In the order of the page; the file is there when its command is run."""
    monkeypatch.chdir(place)
    printed = {}
    for command in COMMANDS:
        if "--config" in command:
            Path("diffcheck.toml").write_text(FILE)
        status, out, err = cli(*command)
        assert status == 0, (command, out, err)
        printed[" ".join(command)] = out
        Path("diffcheck.toml").unlink(missing_ok=True)
    (explained,) = [out for command, out in printed.items() if "--explain-gates" in command]
    assert TEXTS[1].rstrip("…\n") in explained
    assert len(json.loads(Path("report.json").read_text())["cases"]) == 8
    assert [command[0] for command in COMMANDS].count("compare") == 1


def test_the_failed_gate_and_the_regression_read_as_shown(cli, place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    mini = "fixtures/mini-v4"
    _, out, _ = cli(
        "run", "--checkpoint", mini, "--theta", "checkpoint", "--gate", "jaccard_tied>=0.95", "--json", "b.json"
    )
    assert set(shape(TEXTS[0])) <= set(shape(out))
    Path("fp8.toml").write_text('name = "fp8"\nbase = "fp8"\n[replace]\nk_theta = 10000\n')
    what = [
        "--precision",
        "fp4",
        "--recipe",
        "fp8.toml",
        "--layers",
        "4",
        "--theta",
        "checkpoint",
        "--baseline",
        "b.json",
    ]
    status, out, _ = cli("run", "--checkpoint", mini, *what)
    assert status == 1
    assert set(shape(TEXTS[2])) <= set(shape(out))


def test_default_tolerances_are_those_named():
    named = re.findall(r"`(\w+)=([0-9.]+)`", DOC.split("Tolerances are")[1].split("unless")[0])
    assert {field: float(value) for field, value in named} == DEFAULT_TOLERANCE
