"""Small floats as Triton device functions, each rounding spelled out.

Nothing is left to a cast: a compiler may pick an instruction with another tie rule, and Triton's interpreter
rounds e4m3 wrongly in about 2 % of values. Where the GPU has an instruction with exactly the rule below, the
compiled kernels name it (PTX `cvt.rn.satfinite.e4m3x2.f32`, `cvt.rn.bf16x2.f32`, `rcp.rn.f32`); the
interpreter does the same on the bits of the fp32, and a test on the GPU compares the two for every fp32. So a
test can compare every code, and interpreted and compiled conversions agree.

Rounding to the nearest code:

=========  ==============================  ================================================================
format     values                          rule
=========  ==============================  ================================================================
e4m3       4 exponent bits, bias 7, +-448  ties to even; beyond 448 (and inf) saturates; NaN -> 0x7F
e2m1       0 .5 1 1.5 2 3 4 6, +-          ties to even or toward zero ("down"); 6 up to 7 units
ue8m0      2^(byte-127)                    next power of two at or above; 255 = NaN
bf16       8 exponent bits                 ties to even; inf stays inf, NaN stays NaN
=========  ==============================  ================================================================

The sign of a zero is kept (-0.1 becomes e2m1 code 8, which is -0). e2m1 has no NaN: what poisons a block is
its ue8m0 scale. So a quantiser here gives a block that holds a NaN *or an inf* a NaN scale: e4m3 rows then
hold 0x7F under a NaN fp32 scale, e2m1 blocks code 0 under byte 255. Some production kernels store a finite
constant instead, and the fault never shows.

amax is a maximum that keeps NaN, unlike the usual one on a GPU: exact and independent of order. The scale made
from it leaves no e2m1 quotient near 7 units.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels of this process run in Triton's interpreter."""

E2M1_UNIT = tl.constexpr(2.0**-6)
"""What `e2m1_word` takes for 1."""

_ABS = tl.constexpr(0x7FFF_FFFF)
_INF_BITS = tl.constexpr(0x7F80_0000)
_NAN_BITS = tl.constexpr(0x7FC0_0000)
_SIGN = tl.constexpr(-0x8000_0000)
_JUST_BELOW_1 = tl.constexpr(1 - 2.0**-24)
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
def e4m3_word(x0, x1, x2, x3):
    """Four fp32 -> their e4m3 codes in one int32, x0 lowest; the rule of `fp32_to_e4m3`."""
    if INTERPRETED:
        low = fp32_to_e4m3(x0) | (fp32_to_e4m3(x1) << 8)
        return low | (fp32_to_e4m3(x2) << 16) | (fp32_to_e4m3(x3) << 24)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [x0, x1, x2, x3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def round_to_e2m1(x, UNIT: tl.constexpr, TIES_DOWN: tl.constexpr):
    """fp32 below 7 units -> the nearest of 0 .5 1 1.5 2 3 4 6 times UNIT (a power of two), still as fp32. NaN
    stays NaN.

    One sum rounds, ties to even: 2^22 times the power of two at or below x has an ulp of the step there,
    half of that power. For ties toward zero the sum takes x * (1 - 2^-24), unrounded: below a midpoint for
    that midpoint, and above it for every larger number.
    """
    binade = tl.maximum(fp32_of_bits(fp32_bits(x) & _INF_BITS), UNIT)
    coarse = binade * 4194304.0
    if not TIES_DOWN:
        rounded = tl.abs(x) + coarse
    elif INTERPRETED:  # has no fma of one rounding
        rounded = (tl.abs(x).to(tl.float64) * _JUST_BELOW_1 + coarse).to(tl.float32)
    else:
        rounded = tl.fma(tl.abs(x), _JUST_BELOW_1, coarse)
    return fp32_of_bits(fp32_bits(rounded - coarse) | (fp32_bits(x) & _SIGN))


@triton.jit
def e2m1_word(x0, x1, x2, x3, x4, x5, x6, x7):
    """Eight fp32 rounded by `round_to_e2m1` with E2M1_UNIT -> their e2m1 codes in one int32, x0 lowest.

    The unit is the smallest normal of e4m3, so that the e4m3 code of such a value is its e2m1 code with two more
    zeros and the sign three places higher.
    """
    even, odd = e4m3_word(x0, x2, x4, x6), e4m3_word(x1, x3, x5, x7)
    low = ((even >> 2) & 0x07070707) | ((even >> 4) & 0x08080808)
    return low | ((odd << 2) & 0x70707070) | (odd & -0x7F7F7F80)


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
    if INTERPRETED:
        bits = fp32_bits(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x1_0000
        return fp32_of_bits(tl.where((bits & _ABS) > _INF_BITS, bits | 0x40_0000, rounded))
    # the pair (x, 0) as bf16: x lands in the high half
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def bf16_word(low, high):
    """Two fp32 -> their nearest bf16 (RNE) in one int32."""
    if INTERPRETED:
        return ((fp32_bits(round_to_bf16(low)) >> 16) & 0xFFFF) | fp32_bits(round_to_bf16(high))
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def bf16_word_to_fp32(word):
    """The two bf16 of an int32 -> (low, high) as fp32, exact."""
    return fp32_of_bits(word << 16), fp32_of_bits(word & -0x1_0000)


@triton.jit
def bf16_code_to_fp32(code):
    """bf16 bits (int16) -> fp32, exact."""
    return fp32_of_bits(code.to(tl.int32) << 16)


@triton.jit
def larger_magnitude(a, b):
    """max(|a|, |b|); NaN if one is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """Largest magnitude along an axis, fp32; NaN if there is one."""
    if INTERPRETED:  # where only the usual reductions are fast; a NaN's bits are above every number's
        return fp32_of_bits(tl.max(fp32_bits(x) & _ABS, axis=axis))
    return tl.reduce(tl.abs(x), axis, larger_magnitude)


@triton.jit
def at_least(x, floor):
    """max(x, floor), keeping NaN."""
    return tl.where(x < floor, floor, x)


@triton.jit
def exponential(x):
    """exp(x) in fp32 for x <= 0, within 1 ulp; 0 below -87.7 (the results would be subnormal).

    Written out because Triton's exp compiles to the approximate ex2, whose error reaches the next bf16
    rounding often enough to count. x = n ln2 + r, |r| <= ln2/2, and 1 + r + r^2 q(r) with the q of degree 4
    that is best for the relative error (2^-27.8, coefficients rounded to fp32). The sum with 1.5 * 2^23
    rounds x / ln2 to n, which its low bits then hold.
    """
    x = tl.maximum(x, -88.03, propagate_nan=tl.PropagateNan.ALL)  # n = -127, whose power below is 0
    counted = tl.fma(x, _LOG2E, 12582912.0)
    n = counted - 12582912.0
    r = tl.fma(n, -_LN2_LOW, tl.fma(n, -_LN2_HIGH, x))
    p = tl.fma(r, 0.0013814308913424611, 0.008368856273591518)
    p = tl.fma(p, r, 0.041668400168418884)
    p = tl.fma(p, r, 0.1666651964187622)
    p = tl.fma(p, r, 0.4999999403953552)
    p = tl.fma(p, r * r, r) + 1.0
    return p * fp32_of_bits((fp32_bits(counted) << 23) + 0x3F80_0000)


@triton.jit
def reciprocal(x):
    """1 / x rounded to nearest."""
    if INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quotient(x, divisor, inverse):
    """x / divisor rounded to nearest, given inverse = 1 / divisor rounded to nearest.

    For a divisor in 1..8 and x in 0..1: the estimate x * inverse is within an ulp, so its remainder is exact in
    one fma and one more fma rounds the true quotient. Below 2^-100 the last bit may differ.
    """
    if INTERPRETED:  # has no fma of one rounding
        return tl.div_rn(x, divisor)
    estimate = x * inverse
    return tl.fma(tl.fma(estimate, -divisor, x), inverse, estimate)
