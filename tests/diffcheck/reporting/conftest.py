"""What the tests of reports share: the documents of real runs."""

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


@pytest.fixture(scope="session")
def synthetic(helper):
    """The module synthetic.py: documents as large as they get."""
    return helper("diffcheck/reporting/synthetic")


@pytest.fixture(scope="session")
def html_tables(helper):
    """The module html_tables.py: a strict reader of the page."""
    return helper("diffcheck/reporting/html_tables")
