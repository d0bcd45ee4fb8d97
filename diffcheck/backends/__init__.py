"""What executes a recipe: the emulation in plain torch, or chains of kernels. See `base` for the contracts."""

from .base import STEPS, Backend, Kernels, KeyCache
from .chain import Chain
from .emulated import EmulatedBackend, EmulatedKernels
from .registry import all_backends, find_backend
from .triton import TritonKernels

__all__ = [
    "STEPS",
    "Backend",
    "Chain",
    "EmulatedBackend",
    "EmulatedKernels",
    "Kernels",
    "KeyCache",
    "TritonKernels",
    "all_backends",
    "find_backend",
]
