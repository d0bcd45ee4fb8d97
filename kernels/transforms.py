"""Device functions shared by the key and the query path: RoPE, Walsh-Hadamard, FP4 step and the three
quantisers.

A tile is fp32 [ROWS, 128]. Every operation keeps the order of the published code, with separate products and
sums (launch with enable_fp_fusion=False), so that a plain torch composition reproduces the bits up to
reductions.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

from .rounding import (
    amax_of,
    at_least,
    ceil_power_of_two,
    e2m1_to_fp32,
    fp32_bits,
    fp32_of_bits,
    fp32_to_e2m1,
    fp32_to_e4m3,
    ue8m0_to_fp32,
)

_FP4_STEP_FLOOR = tl.constexpr(6.0 * 2.0**-126)
_HADAMARD_NORM = tl.constexpr(128**-0.5)
_ONE_SIXTH = tl.constexpr(1 / 6)


@triton.jit
def rotate_last_64(x, cos_ptr, sin_ptr, table_row, row_mask, ROWS: tl.constexpr):
    """RoPE of the last 64 of 128 dims, interleaved pairs (2i, 2i+1): (a, b) -> (a cos - b sin, a sin + b
    cos).

    cos_ptr, sin_ptr: fp32 tables of 32 columns; table_row int32 [ROWS] names each row's line.
    """
    a, b = tl.split(tl.reshape(x, (ROWS, 64, 2)))
    pair = tl.arange(0, 64)[None, :]
    turns = pair >= 32
    offsets = table_row.to(tl.int64)[:, None] * 32 + tl.where(turns, pair - 32, 0)
    wanted = row_mask[:, None] & turns
    cos = tl.load(cos_ptr + offsets, mask=wanted, other=1.0)
    sin = tl.load(sin_ptr + offsets, mask=wanted, other=0.0)
    turned_a = tl.where(turns, a * cos - b * sin, a)
    turned_b = tl.where(turns, a * sin + b * cos, b)
    return tl.reshape(tl.join(turned_a, turned_b), (ROWS, 128))


@triton.jit
def hadamard_128(x, ROWS: tl.constexpr):
    """Walsh-Hadamard transform of 128 dims in natural (Sylvester) order, times 128^-0.5.

    Each step takes the lowest bit of the dim as the butterfly and puts it back as the highest, so seven equal
    steps do the strides 1, 2, 4 .. 64 in that order and end in natural order.
    """
    for _ in tl.static_range(7):
        a, b = tl.split(tl.reshape(x, (ROWS, 64, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, 128))
    return x * _HADAMARD_NORM


@triton.jit
def e2m1_scale_bytes(blocks, amax_floor):
    """ue8m0 bytes int32 [ROWS, 4] of blocks fp32 [ROWS, 4, 32]: 2^ceil(log2(max(amax, floor) * (1/6)))."""
    return ceil_power_of_two(at_least(amax_of(blocks, 2), amax_floor) * _ONE_SIXTH)


@triton.jit
def fp4_fake_quantise(x, ROWS: tl.constexpr):
    """The reference's FP4 step: e2m1 per 32 dims, ties to even, floor 6*2^-126, decoded again. Exact in
    bf16.
    """
    blocks = tl.reshape(x, (ROWS, 4, 32))
    scale = ue8m0_to_fp32(e2m1_scale_bytes(blocks, _FP4_STEP_FLOOR))[:, :, None]
    return tl.reshape(e2m1_to_fp32(fp32_to_e2m1(tl.div_rn(blocks, scale), False)) * scale, (ROWS, 128))


@triton.jit
def quantise_e2m1(x, amax_floor, TIES_DOWN: tl.constexpr, ROWS: tl.constexpr):
    """-> packed codes uint8 [ROWS, 64] (low nibble = even dim), scale bytes uint8 [ROWS, 4]."""
    blocks = tl.reshape(x, (ROWS, 4, 32))
    byte = e2m1_scale_bytes(blocks, amax_floor)
    scale = ue8m0_to_fp32(byte)[:, :, None]
    codes = fp32_to_e2m1(tl.div_rn(blocks, scale), TIES_DOWN)
    codes = tl.where(byte[:, :, None] == 255, 0, codes)
    low, high = tl.split(tl.reshape(codes, (ROWS, 64, 2)))
    return (low | (high << 4)).to(tl.uint8), byte.to(tl.uint8)


@triton.jit
def quantise_e4m3(x, amax_floor, POWER_OF_TWO: tl.constexpr):
    """-> codes uint8 [ROWS, 128], scale fp32 [ROWS]: amax / 448, or that rounded up to a power of two.

    A code is RNE(x * (1 / scale)), division and product each rounded, as SGLang's store does; with a power of
    two that is the quotient itself. A scale of 0 (zero row, floor 0) gives zero codes.
    """
    amax = at_least(amax_of(x, 1), amax_floor)
    scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    if POWER_OF_TWO:
        scale = ue8m0_to_fp32(ceil_power_of_two(scale))
    finite = fp32_bits(amax) < 0x7F80_0000
    scale = tl.where(finite, scale, fp32_of_bits(tl.full(amax.shape, 0x7FC0_0000, tl.int32)))
    divisor = tl.where(scale == 0.0, 1.0, scale)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    return fp32_to_e4m3(x * inverse[:, None]).to(tl.uint8), scale
