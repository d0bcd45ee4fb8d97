"""diffcheck: runs DeepSeek's reference sparse-attention indexer beside a deployment's numbers.

from diffcheck import Recipe, evaluate, load_layer
from diffcheck.refimpl import run_indexer

Names are imported when they are first used: pytest imports this package at its start wherever it is installed (see
`pytest_plugin`), and torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .capturing.hooks import capture
    from .checkpoint.layer import load_layer
    from .formats import Format
    from .pipeline import Pipeline, evaluate
    from .recipe import Recipe

__all__ = ["Format", "Pipeline", "Recipe", "__version__", "capture", "evaluate", "load_layer"]

_PLACES = {
    "Format": "formats", "Pipeline": "pipeline", "Recipe": "recipe", "capture": "capturing.hooks",
    "evaluate": "pipeline", "load_layer": "checkpoint.layer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
