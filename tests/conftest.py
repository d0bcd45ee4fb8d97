"""What all tests share: one torch thread a worker (the workers already use the cores), and helper modules."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # triton reads this when a kernel is decorated, so it must be set before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"
# no deadline: how long an example takes depends on what else the machine does; fixed examples where a change is judged
hypothesis.settings.register_profile("diffcheck", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("diffcheck")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
# a shell that starts the tests in the background has them and their children ignore interrupts, which some tests send
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests of shapes that only a GPU can do say what they miss."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _load(name):
    """A helper module beside the tests, which importlib mode cannot import by name."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helper():
    """Loads a helper module by its path below tests/, without the ending."""
    return _load


@pytest.fixture(scope="session")
def support():
    """The module tests/support.py: small random layers and bitwise comparison."""
    return _load("support")


@pytest.fixture(scope="session")
def score_cases():
    """The module tests/diffcheck/score_cases.py: small scores and selections, drawn from a seed."""
    return _load("diffcheck/score_cases")


@pytest.fixture(scope="session")
def oracle():
    """The module tests/oracles/numpy_indexer.py: the whole indexer once more, in slow numpy."""
    return _load("oracles/numpy_indexer")


@pytest.fixture(scope="session")
def numpy_layer():
    """The module tests/oracles/numpy_layer.py: a layer of the whole stack once more, in slow numpy."""
    return _load("oracles/numpy_layer")


@pytest.fixture(scope="session")
def mini(tmp_path_factory) -> Path:
    """The trained miniature with its trace, but that it selects 64 entries.

    Trained to select 16, it has hardly a tail of the selection, which tests of overlaps, ties and single swaps need.
    """
    trained = Path(__file__).parent.parent / "fixtures" / "mini-v4"
    directory = tmp_path_factory.mktemp("checkpoint") / trained.name
    directory.mkdir()
    for path in trained.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((trained / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"index_topk": 64}))
    return directory


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command line in this process; returns (exit code, stdout, stderr)."""
    from diffcheck.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["diffcheck", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return call
