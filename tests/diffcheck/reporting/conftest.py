"""What the tests of reports share: the documents of real runs."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from diffcheck.cli import main


@pytest.fixture(scope="session")
def run_file(mini, tmp_path_factory):
    """The JSON file of a run on the miniature: two layers, four recipes, one what-if theta, a failed gate."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    recipe = Path(__file__).parents[3] / "fixtures" / "recipes" / "hadamard-on-queries-only.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv",
            ["diffcheck", "run", "--checkpoint", str(mini), "--precision", "reference,fp8,fp4", "--theta",
             "checkpoint,10000", "--queries", "64", "--recipe", str(recipe), "--backend", "emulated",
             "--gate", "jaccard_tied>=0.9", "--gate", "jaccard_kernel>=0.999", "--json", str(path)],
        )  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == 1
    return path


@pytest.fixture(scope="session")
def run_document(run_file):
    """What `run_file` holds; not to be changed."""
    return json.loads(run_file.read_text())


def _load(name):
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def synthetic():
    """The module synthetic.py: documents as large as they get."""
    return _load("synthetic")


@pytest.fixture(scope="session")
def html_tables():
    """The module html_tables.py: a strict reader of the page."""
    return _load("html_tables")
