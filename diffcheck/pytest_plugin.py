"""The pytest plugin: a layer of a checkpoint, and the reference's stages on it, as fixtures.

pytest imports this module at its start wherever diffcheck is installed, so it imports nothing heavy: torch and the
rest are loaded when a test asks for a fixture. It adds options and two fixtures, all named diffcheck, and changes
nothing else.

    pytest --diffcheck-checkpoint PATH [--diffcheck-layer N|all] …

Without a checkpoint (option, or `diffcheck_checkpoint` in the ini file) the tests that need one are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .refimpl import Trace
    from .testing import Layer

CHECKPOINT = "diffcheck_checkpoint"
FIXTURE = "diffcheck_layer"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; `--diffcheck-checkpoint` may be set in the ini file too."""
    group = parser.getgroup("diffcheck", "DeepSeek's sparse-attention indexer (diffcheck)")
    text = "Checkpoint directory that the diffcheck fixtures take a layer from."
    group.addoption("--diffcheck-checkpoint", metavar="PATH", help=text)
    parser.addini(CHECKPOINT, text)
    group.addoption(
        "--diffcheck-layer", action="append", metavar="N", help="Layer number or all; repeatable. Default: the first."
    )
    group.addoption("--diffcheck-trace", metavar="FILE", help="Trace with the layer's inputs, as for `diffcheck run`.")
    group.addoption("--diffcheck-length", type=int, metavar="TOKENS", help="Made-up inputs of so many tokens.")
    group.addoption("--diffcheck-queries", type=int, metavar="ROWS", default=64, help="Query rows; default 64.")
    group.addoption("--diffcheck-device", default="auto", metavar="DEVICE", help="auto, cpu or cuda.")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Names the checkpoint, where there is one."""
    checkpoint = _checkpoint(config)
    return None if checkpoint is None else f"diffcheck: checkpoint {checkpoint}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test is run once for each layer, where several are asked for."""
    asked = metafunc.config.getoption("diffcheck_layer")
    if FIXTURE not in metafunc.fixturenames or not asked:
        return
    if "all" in asked:
        checkpoint = _checkpoint(metafunc.config)
        if checkpoint is None:
            return
        from .checkpoint.layer import Checkpoint
        from .errors import InputError

        try:
            layers = list(Checkpoint(checkpoint).select())
        except InputError as error:
            raise pytest.UsageError(f"--diffcheck-checkpoint: {error}") from None
    else:
        if not all(number.isdecimal() for number in asked):
            raise pytest.UsageError(f"--diffcheck-layer: {' '.join(asked)}, expected numbers or all")
        layers = list(dict.fromkeys(int(number) for number in asked))
    metafunc.parametrize(FIXTURE, layers, indirect=True, ids=[f"layer{n}" for n in layers], scope="session")


@pytest.fixture(scope="session")
def diffcheck_layer(request: pytest.FixtureRequest) -> Layer:
    """A layer of the checkpoint with its inputs (`diffcheck.testing.Layer`); skips where there is no checkpoint."""
    config = request.config
    checkpoint = _checkpoint(config)
    if checkpoint is None:
        pytest.skip("needs --diffcheck-checkpoint PATH")
    from .errors import EnvironmentMissing, InputError
    from .testing import Layer

    try:
        return Layer.load(
            checkpoint,
            getattr(request, "param", None),
            trace=config.getoption("diffcheck_trace"),
            length=config.getoption("diffcheck_length"),
            queries=config.getoption("diffcheck_queries"),
            device=config.getoption("diffcheck_device"),
        )
    except (InputError, EnvironmentMissing) as error:
        pytest.fail(f"diffcheck: {error}", pytrace=False)


@pytest.fixture(scope="session")
def diffcheck_reference(diffcheck_layer: Layer) -> Trace:
    """Every stage of that layer as the published code computes it: `diffcheck_reference["scores"]`."""
    return diffcheck_layer.reference()


def _checkpoint(config: pytest.Config) -> str | None:
    """The option's path, or the ini file's, which is relative to that file."""
    found: str = config.getoption(CHECKPOINT) or config.getini(CHECKPOINT)
    if found and not config.getoption(CHECKPOINT) and config.inipath is not None:
        return str(config.inipath.parent / found)
    return found or None
