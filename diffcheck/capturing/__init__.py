"""Where hidden states come from when they are not made up: a forward pass, a server's dump, a model in this process."""

from .forward import Captured, LayerTime, capture_forward
from .text import TextInputs, capture_trace, load_text_inputs

__all__ = ["Captured", "LayerTime", "TextInputs", "capture_forward", "capture_trace", "load_text_inputs"]
