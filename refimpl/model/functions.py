"""Activations made of exp, so that an element's bits do not depend on its place in the tensor.

torch's own sigmoid, silu and softplus take another path at the end of a CPU tensor than in its middle, and a text's
rows would then change by an ulp with its length.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), fp32."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), fp32."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), fp32, without overflow."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))
