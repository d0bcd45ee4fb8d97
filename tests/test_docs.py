"""What README and docs say is what the code does."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from diffcheck.gates import NUMERIC_FIELDS
from diffcheck.presets import CHANGES, DESCRIPTIONS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
REPORT = (ROOT / "docs" / "report.md").read_text()


def test_ci_runs_the_readme_test_command():
    """.ci/run greps for the line; it must be there once, make its own environment and run pytest."""
    (line,) = [line for line in README.splitlines() if "pip install -c constraints.txt -e '.[test]'" in line]
    assert line.startswith("python3 -m venv .venv && ")
    assert line.endswith("&& .venv/bin/pytest")
    assert "pip install -c constraints.txt -e '.[test]'" in (ROOT / ".ci" / "run").read_text()


def test_python_example_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue().count("tensor(") == 2


@pytest.mark.parametrize("field", NUMERIC_FIELDS)
def test_report_defines_every_numeric_field(field):
    names = re.findall(r"`([a-z_0-9*]+)`", REPORT)
    patterns = [re.compile(name.replace("*", ".*")) for name in names]
    assert any(pattern.fullmatch(field) for pattern in patterns)


def test_readme_recipe_is_the_shipped_one():
    (toml,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    shipped = (ROOT / "fixtures" / "recipes" / "hadamard-on-queries-only.toml").read_text()
    for line in ('name = "q-only-hadamard"', 'base = "reference"', "k_hadamard = false"):
        assert line in toml
        assert line in shipped


def test_every_preset_is_described():
    assert set(DESCRIPTIONS) == set(CHANGES)
