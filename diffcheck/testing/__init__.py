"""For tests of other people's kernels: assertions that explain a failure, made-up layers, hypothesis strategies.

    from diffcheck.testing import assert_selection, assert_stage_close, strategies

The pytest plugin (`diffcheck.pytest_plugin`) gives such tests a layer of a real checkpoint; docs/pytest.md has a whole
test. `strategies` needs hypothesis, the rest torch only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .layers import Layer, made_up_config, made_up_inputs, made_up_weights
from .selection import assert_selection
from .stages import assert_stage_close

if TYPE_CHECKING:
    from . import strategies

__all__ = [
    "Layer",
    "assert_selection",
    "assert_stage_close",
    "made_up_config",
    "made_up_inputs",
    "made_up_weights",
    "strategies",
]


def __getattr__(name: str) -> Any:
    if name != "strategies":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.strategies")
