"""Short hashes that say whether something is still the same; no protection against anybody."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def digest(data: str | bytes) -> str:
    """16 hex digits for some bytes."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def tensor_digest(*tensors: Tensor | None) -> str:
    """16 hex digits for the bits, dtypes and shapes of tensors on any device; None stands for an absent one."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr(None if tensor is None else (str(tensor.dtype), list(tensor.shape))).encode())
        if tensor is not None:
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
