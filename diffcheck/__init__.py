"""diffcheck: runs DeepSeek's reference sparse-attention indexer beside a deployment's numbers.

from diffcheck import Recipe, evaluate, load_layer
from diffcheck.refimpl import run_indexer
"""

from .capturing.hooks import capture
from .checkpoint.layer import load_layer
from .formats import Format
from .pipeline import Pipeline, evaluate
from .recipe import Recipe
from .version import __version__

__all__ = ["Format", "Pipeline", "Recipe", "__version__", "capture", "evaluate", "load_layer"]
