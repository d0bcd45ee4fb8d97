"""Device functions shared by the key and the query path: RoPE, Walsh-Hadamard, FP4 step and the three
quantisers.

A tile is fp32 [128, ROWS], one line per dim: with a column to each thread of a warp all of this happens in
registers. Every operation keeps the order of the published code, with separate products and sums (launch with
enable_fp_fusion=False), so that a plain torch composition reproduces the bits up to reductions. Codes come as
int32 words of neighbouring dims, the lowest dim in the lowest bits, which is their order in memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

from .rounding import (
    E2M1_UNIT,
    amax_of,
    at_least,
    bf16_word,
    ceil_power_of_two,
    e2m1_word,
    e4m3_word,
    fp32_bits,
    larger_magnitude,
    reciprocal,
    round_to_e2m1,
    ue8m0_to_fp32,
)

_FP4_STEP_FLOOR = tl.constexpr(6.0 * 2.0**-126)
HADAMARD_NORM = tl.constexpr(128**-0.5)
ONE_SIXTH = tl.constexpr(1 / 6)


@triton.jit
def even_odd(x):
    """Lines 0, 2, 4 .. and lines 1, 3, 5 .. of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))


@triton.jit
def interleave(even, odd):
    """The tile whose lines are `even_odd`'s again."""
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (2 * even.shape[0], even.shape[1]))


@triton.jit
def stack(first, second):
    """The tile of first's lines, then second's."""
    return tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), (2 * first.shape[0], first.shape[1]))


@triton.jit
def rotate_pairs(a, b, cos, sin):
    """RoPE of pairs: (a cos - b sin, a sin + b cos)."""
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def _two_strides(x):
    """Butterflies over the lowest two bits of the dim, which become the highest two."""
    x = tl.permute(tl.reshape(x, (32, 2, 2, x.shape[1])), (1, 0, 3, 2))
    a, b = tl.split(x)
    sum_0, sum_1 = tl.split(tl.permute(a + b, (1, 2, 0)))
    difference_0, difference_1 = tl.split(tl.permute(a - b, (1, 2, 0)))
    low = stack(sum_0 + sum_1, difference_0 + difference_1)
    return stack(low, stack(sum_0 - sum_1, difference_0 - difference_1))


@triton.jit
def hadamard_128(x):
    """Walsh-Hadamard transform of 128 dims in natural (Sylvester) order, times 128^-0.5.

    Each step takes the lowest bits of the dim as butterflies and puts them back as the highest, so that the
    steps do the strides 1, 2, 4 .. 64 in that order and end in natural order. Two strides a step: where a warp
    has only one column, four values of it lie in each thread.
    """
    x = _two_strides(_two_strides(_two_strides(x)))
    a, b = even_odd(x)
    return stack(a + b, a - b) * HADAMARD_NORM


@triton.jit
def e2m1_scale_bytes(x, amax_floor):
    """ue8m0 bytes int32 [4, ROWS] of the blocks of 32 dims: 2^ceil(log2(max(amax, floor) * (1/6)))."""
    amax = amax_of(tl.reshape(x, (4, 32, x.shape[1])), 1)
    return ceil_power_of_two(at_least(amax, amax_floor) * ONE_SIXTH)


@triton.jit
def by_block(x, block):
    """x * block, one factor [4, ROWS] per 32 dims."""
    product = tl.reshape(x, (4, 32, x.shape[1])) * block[:, None, :]
    return tl.reshape(product, (128, x.shape[1]))


@triton.jit
def inverse_power_of_two(byte):
    """1 / 2^(byte-127), exact, for bytes 1..254; NaN for 255. Its product is the quotient."""
    return ue8m0_to_fp32(tl.where(byte == 255, 255, 254 - byte))


@triton.jit
def fp4_fake_quantise(x):
    """The reference's FP4 step: e2m1 per 32 dims, ties to even, floor 6*2^-126, decoded again. Exact in
    bf16.
    """
    byte = e2m1_scale_bytes(x, _FP4_STEP_FLOOR)
    return by_block(round_to_e2m1(by_block(x, inverse_power_of_two(byte)), 1.0, False), ue8m0_to_fp32(byte))


@triton.jit
def quantise_e2m1(x, amax_floor, TIES_DOWN: tl.constexpr):
    """-> codes int32 [16, ROWS], eight dims a word, and the four scale bytes of a row as int32 [ROWS]."""
    byte = e2m1_scale_bytes(x, amax_floor)
    x = round_to_e2m1(by_block(x, inverse_power_of_two(byte) * E2M1_UNIT), E2M1_UNIT, TIES_DOWN)
    even, odd = even_odd(x)
    x0, x2 = even_odd(even)
    x1, x3 = even_odd(odd)
    x0, x4 = even_odd(x0)
    x1, x5 = even_odd(x1)
    x2, x6 = even_odd(x2)
    x3, x7 = even_odd(x3)
    words = tl.reshape(e2m1_word(x0, x1, x2, x3, x4, x5, x6, x7), (4, 4, x.shape[1]))
    words = tl.reshape(tl.where(byte[:, None, :] == 255, 0, words), (16, x.shape[1]))
    shifts = tl.arange(0, 4)[:, None] * 8
    return words, tl.sum(byte << shifts, axis=0)


@triton.jit
def e4m3_scale(amax, amax_floor, POWER_OF_TWO: tl.constexpr):
    """-> scale fp32: amax / 448, or that rounded up to a power of two; and 1 / scale, or 1 for a scale of 0."""
    amax = at_least(amax, amax_floor)
    scale = tl.div_rn(amax, 448.0)
    if POWER_OF_TWO:
        scale = ue8m0_to_fp32(ceil_power_of_two(scale))
    scale = tl.where(fp32_bits(amax) < 0x7F80_0000, scale, float("nan"))
    return scale, reciprocal(tl.where(scale == 0.0, 1.0, scale))


@triton.jit
def quantise_e4m3(x, amax_floor, POWER_OF_TWO: tl.constexpr):
    """-> codes int32 [32, ROWS], four dims a word, and the scale fp32 [ROWS].

    A code is RNE(x * (1 / scale)), division and product each rounded, as SGLang's store does; with a power of
    two that is the quotient itself. A scale of 0 (zero row, floor 0) gives zero codes.
    """
    even, odd = even_odd(x)
    x0, x2 = even_odd(even)
    x1, x3 = even_odd(odd)
    largest = larger_magnitude(larger_magnitude(x0, x1), larger_magnitude(x2, x3))
    scale, inverse = e4m3_scale(amax_of(largest, 0), amax_floor, POWER_OF_TWO)
    inverse = inverse[None, :]
    return e4m3_word(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse), scale


@triton.jit
def bf16_words(x):
    """-> the nearest bf16 of each dim, int32 [64, ROWS], two dims a word."""
    even, odd = even_odd(x)
    return bf16_word(even, odd)
