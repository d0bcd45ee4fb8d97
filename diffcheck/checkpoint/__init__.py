"""Checkpoint reading: one indexer layer out of any released, converted or re-saved DeepSeek V4 directory."""

from .inspect import Inspection, inspect_checkpoint, render
from .layer import Checkpoint, implausible_scale, load_layer, resolve_directory

__all__ = [
    "Checkpoint",
    "Inspection",
    "implausible_scale",
    "inspect_checkpoint",
    "load_layer",
    "render",
    "resolve_directory",
]
