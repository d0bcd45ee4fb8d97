"""diffcheck: runs DeepSeek's reference sparse-attention indexer beside a deployment's numbers."""

from .version import __version__

__all__ = ["__version__"]
