"""Scores as integer keys in the order of selection."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

LOWEST = tl.constexpr(-0x8000_0000)
"""Key of what does not exist: below the key of every score."""

NAN = tl.constexpr(-0x7FFF_FFFF)
"""Key of NaN: below that of -inf."""


@triton.jit
def order_keys(x):
    """fp32 -> int32 in the same order; -0.0 equals 0.0, NaN lies below -inf."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x == x, key, NAN)


@triton.jit
def key_score(key):
    """A number with such a key (LOWEST gives NaN)."""
    bits = tl.where(key < 0, key ^ 0x7FFF_FFFF, key)
    return tl.where(key <= NAN, 0x7FC0_0000, bits).to(tl.float32, bitcast=True)
