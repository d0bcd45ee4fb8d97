"""Small floats as Triton device functions, each rounding written out on the bits of an fp32.

Nothing is left to a cast: a compiler may pick an instruction with another tie rule, and Triton's interpreter
rounds e4m3 wrongly in about 2 % of values. So a test can compare every code, and interpreted and compiled
runs agree.

Rounding to the nearest code:

=========  ==============================  ================================================================
format     values                          rule
=========  ==============================  ================================================================
e4m3       4 exponent bits, bias 7, +-448  ties to even; beyond 448 (and inf) saturates; NaN -> 0x7F
e2m1       0 .5 1 1.5 2 3 4 6, +-          ties to even or toward zero ("down"); beyond 6 saturates
ue8m0      2^(byte-127)                    next power of two at or above; 255 = NaN
bf16       8 exponent bits                 ties to even; inf stays inf, NaN stays NaN
=========  ==============================  ================================================================

The sign of a zero is kept (-0.1 becomes e2m1 code 8, which is -0). e2m1 has no NaN: what poisons a block is
its ue8m0 scale. So a quantiser here gives a block that holds a NaN *or an inf* a NaN scale: e4m3 rows then
hold 0x7F under a NaN fp32 scale, e2m1 blocks code 0 under byte 255. Some production kernels store a finite
constant instead, and the fault never shows.

amax comes from the integer maximum of the magnitudes' bits: exact, independent of order, and a NaN's bits are
above every number's, while a floating-point maximum on a GPU drops NaN.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels of this process run in Triton's interpreter."""

_ABS = tl.constexpr(0x7FFF_FFFF)
_INF_BITS = tl.constexpr(0x7F80_0000)
_NAN_BITS = tl.constexpr(0x7FC0_0000)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)


@triton.jit
def fp32_bits(x):
    """The int32 bit pattern of an fp32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def fp32_of_bits(bits):
    """The fp32 of an int32 bit pattern."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_e4m3(x):
    """fp32 -> e4m3 code as int32 0..255: RNE, saturating at 448, NaN -> 0x7F."""
    bits = fp32_bits(x)
    magnitude = bits & _ABS
    is_nan = magnitude > _INF_BITS
    magnitude = tl.minimum(magnitude, 0x43E0_0000)  # 448.0; bit order is value order for magnitudes
    # normal codes: keep 3 of 23 mantissa bits, then move the exponent's bias from 127 to 7
    normal = ((magnitude + 0x7_FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # subnormal codes count steps of 2^-9, one ulp of fp32 numbers near 2^14: the addition rounds (RNE)
    counted = fp32_bits(fp32_of_bits(magnitude) + 16384.0) - 0x4680_0000
    code = tl.where(magnitude < 0x3C80_0000, counted, normal)  # 2^-6, the smallest normal
    return tl.where(is_nan, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def e4m3_to_fp32(code):
    """e4m3 code (any integer type, 0..255) -> fp32, exact; 0x7F and 0xFF are NaN."""
    code = code.to(tl.int32)
    exponent = (code >> 3) & 15
    mantissa = code & 7
    normal = fp32_of_bits(((exponent + 120) << 23) | (mantissa << 20))
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)  # 2^-9
    bits = tl.where((code & 0x7F) == 0x7F, _NAN_BITS, fp32_bits(value))
    return fp32_of_bits(bits | ((code & 0x80) << 24))


@triton.jit
def fp32_to_e2m1(x, TIES_DOWN: tl.constexpr):
    """fp32 -> e2m1 code as int32 0..15: nearest, ties to even or toward zero, saturating at 6. NaN -> 0 or
    8.
    """
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a > 1.25).to(tl.int32) + (a > 2.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    if TIES_DOWN:
        code += (a > 0.75).to(tl.int32) + (a > 1.75).to(tl.int32) + (a > 3.5).to(tl.int32)
    else:  # the code above these midpoints is even
        code += (a >= 0.75).to(tl.int32) + (a >= 1.75).to(tl.int32) + (a >= 3.5).to(tl.int32)
    return code | ((fp32_bits(x) >> 28) & 8)


@triton.jit
def e2m1_to_fp32(code):
    """e2m1 code (any integer type, 0..15) -> fp32, exact."""
    code = code.to(tl.int32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent == 0, mantissa * 0x3F00_0000, normal)  # 0 or 0.5
    return fp32_of_bits(bits | ((code & 8) << 28))


@triton.jit
def ceil_power_of_two(x):
    """ue8m0 byte (int32) of the least power of two >= x, for fp32 x >= 0; NaN and inf give 255.

    The exponent, plus one if any mantissa bit is set. Never below byte 1 (2^-126): smaller scales would be
    subnormal.
    """
    bits = fp32_bits(x) & _ABS
    byte = (bits >> 23) + ((bits & 0x7F_FFFF) != 0).to(tl.int32)
    return tl.where(bits >= _INF_BITS, 255, tl.maximum(byte, 1))


@triton.jit
def ue8m0_to_fp32(byte):
    """ue8m0 byte (any integer type) -> fp32 2^(byte-127), exact; 255 is NaN, 0 the subnormal 2^-127."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x40_0000, byte << 23)
    return fp32_of_bits(tl.where(byte == 255, _NAN_BITS, bits))


@triton.jit
def round_to_bf16(x):
    """fp32 -> the nearest bf16 (RNE), still as fp32."""
    bits = fp32_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x1_0000
    return fp32_of_bits(tl.where((bits & _ABS) > _INF_BITS, bits | 0x40_0000, rounded))


@triton.jit
def fp32_to_bf16_code(x):
    """fp32 -> the bits of the nearest bf16 (RNE) as int16."""
    return (fp32_bits(round_to_bf16(x)) >> 16).to(tl.int16)


@triton.jit
def bf16_code_to_fp32(code):
    """bf16 bits (int16) -> fp32, exact."""
    return fp32_of_bits(code.to(tl.int32) << 16)


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """Largest magnitude along an axis, fp32; NaN if there is one."""
    return fp32_of_bits(tl.max(fp32_bits(x) & _ABS, axis=axis))


@triton.jit
def at_least(x, floor):
    """max(x, floor), keeping NaN."""
    return tl.where(x < floor, floor, x)


@triton.jit
def exponential(x):
    """exp(x) in fp32 for x <= 0, within 1 ulp; below -87 it is 0 (the results would be subnormal).

    Written out because Triton's exp compiles to the approximate ex2, whose error reaches the next bf16
    rounding often enough to count. x = n ln2 + r, |r| <= ln2/2, Taylor series of degree 7 in r (remainder
    below 2^-27).
    """
    n = tl.floor(x * _LOG2E + 0.5)
    n = tl.where(n >= -127.0, n, 0.0)  # also for NaN, which r keeps
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = r * 0.0001984126984126984 + 0.001388888888888889
    p = p * r + 0.008333333333333333
    p = p * r + 0.041666666666666664
    p = p * r + 0.16666666666666666
    p = p * r + 0.5
    p = p * r * r + r + 1.0
    return tl.where(x < -87.0, 0.0, p * fp32_of_bits((n.to(tl.int32) + 127) << 23))
