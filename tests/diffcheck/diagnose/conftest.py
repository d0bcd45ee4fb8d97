"""The command, and the fault harnesses of fixtures/faults, which are scripts and not part of any package."""

import importlib.util
import sys
from pathlib import Path

import pytest

from diffcheck.cli import main

FAULTS = Path(__file__).parents[3] / "fixtures" / "faults"


def harness(name):
    """A module of fixtures/faults."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FAULTS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def pipeline_faults():
    return harness("pipeline_faults")


@pytest.fixture(scope="session")
def broken_kernel():
    return harness("broken_kernel")


@pytest.fixture(scope="session")
def page_writer():
    return harness("page_writer")


@pytest.fixture(scope="session")
def directories():
    return harness("directories")


@pytest.fixture(scope="session")
def geometries(pipeline_faults, tmp_path_factory):
    """Two layers of different geometry, about half as many entries again as are selected."""
    directory = tmp_path_factory.mktemp("geometries")
    return {"trained": pipeline_faults.trained(440, 1), "made-up": pipeline_faults.made_up(directory, 642, 1)}


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs `diffcheck diagnose`: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["diffcheck", "diagnose", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return call
