"""What executes a recipe: the emulation in plain torch, or fused kernels.

A backend says whether it can run here, which recipes it can run, and which stages it produces. What it cannot run it
refuses with a reason; it never approximates.
"""

from .base import Backend
from .emulated import EmulatedBackend
from .triton import TritonBackend

BACKENDS: dict[str, Backend] = {"emulated": EmulatedBackend(), "triton": TritonBackend()}
"""All backends by name."""

__all__ = ["BACKENDS", "Backend", "EmulatedBackend", "TritonBackend"]
