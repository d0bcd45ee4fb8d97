"""A case that needs more memory than there is must cost that case only, not the run."""

from __future__ import annotations

import gc

import torch

_PLAIN = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch's CPU allocator and CUDA's libraries say in a RuntimeError of no type of its own."""


def out_of_memory(error: BaseException) -> str | None:
    """The first line of what an allocator said, or None for an error of another kind."""
    plain = isinstance(error, RuntimeError) and any(words in str(error) for words in _PLAIN)
    if not plain and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    said = str(error).strip().split("\n")[0].rstrip(".")
    return f"out of memory ({said})" if said else "out of memory"


def release() -> None:
    """Give memory that nothing refers to any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
