"""The two block formats of the published code: e4m3 and e2m1, both with power-of-two scales.

Numerics everyone can quote, for a block with largest magnitude `amax`:

    e4m3 (128 values): s = 2^ceil(log2(max(amax, 1e-4) / 448)); code = RNE(clamp(x / s, -448, 448)); value = code * s
    e2m1 ( 32 values): s = 2^ceil(log2(max(amax, 6*2^-126) * (1/6))); code = RNE(clamp(x / s, -6, 6)); value = code * s

448 and 6 are the largest values of the formats. Because s is a power of two, x / s and code * s are exact, and the
dequantised value fits bf16. "RNE" rounds to nearest with ties to the even code; for e2m1's values
0 .5 1 1.5 2 3 4 6 that sends the midpoints .25 .75 1.25 1.75 2.5 3.5 5 to 0 1 1 2 2 4 4.

The reference applies e2m1 as a *fake* quantisation: index queries and keys go through it and stay bf16, because the
model was trained with that step. A NaN anywhere in a block makes the whole block NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_AMAX_FLOOR = 1e-4
E4M3_BLOCK = 128
E2M1_MAX = 6.0
E2M1_AMAX_FLOOR = 6.0 * 2.0**-126
E2M1_BLOCK = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of the e2m1 codes 0..7; bit 3 of a code is the sign."""


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of e2m1 codes (uint8, 0..15, one code an element)."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return table[codes.long()]


def decode_e8m0(codes: Tensor) -> Tensor:
    """fp32 scales 2^(b-127) of e8m0 bytes (uint8); byte 255 is NaN, byte 0 is the subnormal 2^-127."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits)
    return torch.where(codes == 255, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) for positive normal fp32 x, exact on the bits: the exponent, plus one if any mantissa bit is set.

    NaN and inf give NaN (a block that holds one has no scale); a result above the largest power of two is inf.
    """
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).to(torch.int32)
    return torch.where(x.isfinite(), (exponent << 23).view(torch.float32), torch.nan)


def round_to_e4m3(x: Tensor) -> Tensor:
    """fp32 x, |x| <= 448, rounded to the e4m3 grid (RNE), as fp32."""
    return x.to(torch.float8_e4m3fn).float()


def round_to_e2m1(x: Tensor) -> Tensor:
    """fp32 x, |x| <= 6, rounded to the e2m1 grid (ties to the even code), as fp32.

    Below 2 the grid step is 1/2, up to 4 it is 1, above it is 2; `torch.round` is half-to-even in units of the step,
    which is ties to the even code because every binade of e2m1 starts at an even code.
    """
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def _blocks(x: Tensor, block: int) -> Tensor:
    assert x.shape[-1] % block == 0, f"last dim {x.shape[-1]} is no multiple of the block {block}"
    blocks: Tensor = x.float().unflatten(-1, (-1, block))
    return blocks


def e4m3_scale(x: Tensor, block: int = E4M3_BLOCK) -> Tensor:
    """Power-of-two scale of each last-dim block of x (128 values by default), fp32 [..., blocks, 1]."""
    amax = _blocks(x, block).abs().amax(-1, keepdim=True)
    return ceil_power_of_two(amax.clamp_min(E4M3_AMAX_FLOOR) / E4M3_MAX)


def e4m3_fake_quantise(x: Tensor, block: int = E4M3_BLOCK) -> Tensor:
    """x quantised to e4m3 per `block` values of the last dim and widened again, fp32; exact in bf16."""
    scale = e4m3_scale(x, block)
    codes = round_to_e4m3((_blocks(x, block) / scale).clamp(-E4M3_MAX, E4M3_MAX))
    return (codes * scale).flatten(-2)


def fp4_step(x: Tensor) -> Tensor:
    """The reference's FP4 fake quantisation: e2m1 per 32 values of the last dim, fp32 out; exact in bf16."""
    blocks = _blocks(x, E2M1_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(E2M1_AMAX_FLOOR)
    sixth = torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=x.device)
    scale = ceil_power_of_two(amax * sixth)
    codes = round_to_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX))
    return (codes * scale).flatten(-2)
