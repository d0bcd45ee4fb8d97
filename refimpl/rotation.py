"""The two rotations of index queries and keys: RoPE with YaRN, then Walsh-Hadamard.

RoPE turns the *last* R dims as interleaved pairs (2i, 2i+1) by the angle position * inv_freq[i]. In layers with a
compress ratio theta is compress_rope_theta with YaRN and no mscale. The Hadamard rotation spreads outlier channels
before quantisation; being orthogonal it leaves exact dot products unchanged as long as both sides are rotated.

Letters: R RoPE dims, D head dim. All tables are made on the CPU, so that a GPU run uses the same bits. Products are
separate fp32 operations (never a fused multiply-add), so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import Yarn


def inverse_frequencies(theta: float, dims: int, yarn: Yarn | None) -> Tensor:
    """fp32 [dims/2] angular frequencies, radians per token.

    f_i = 1 / theta^(2i/dims), exponent, power and division each in fp32. With YaRN (Peng et al. 2023, eq. 17-23):
    d(r) = dims * ln(L / (2 pi r)) / (2 ln theta) is the dim whose wave turns r times in the original length L;
    the ramp from d(beta_fast) to d(beta_slow) fades from f_i to f_i / factor.
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    frequencies = 1.0 / (theta**exponents)
    if yarn is None:
        return frequencies

    def dim_of(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high: float = min(math.ceil(dim_of(yarn.beta_slow)), dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def rope_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each fp32 [n, R/2] on the CPU, for integer token positions [n]."""
    angles = torch.outer(positions.cpu().float(), inv_freq)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last R dims of x [n, ..., D] by the angles of its first axis; fp32 out (fp64 stays), not rounded.

    Interleaved pairs: (a, b) = (x[2i], x[2i+1]) -> (a cos - b sin, a sin + b cos).
    """
    rope_dims = 2 * cos.shape[-1]
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.to(x.device).view(shape), sin.to(x.device).view(shape)
    head, tail = (x if x.dtype == torch.float64 else x.float()).split((x.shape[-1] - rope_dims, rope_dims), dim=-1)
    a, b = tail.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((head, turned), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim D (a power of two), Sylvester order, times D^-0.5; fp32 out.

    The butterflies run in fp32 whatever the input dtype; fp64 input stays fp64.
    """
    dim = x.shape[-1]
    out: Tensor = x if x.dtype == torch.float64 else x.float()
    width = 1
    while width < dim:
        a, b = out.unflatten(-1, (-1, 2, width)).unbind(-2)
        out = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        width *= 2
    return out * float(dim**-0.5)
