"""Conversions against the same rule spelled out another way: every fp32 on a GPU, a coarse sweep interpreted.

Compiled kernels use one instruction where the interpreter uses integer arithmetic: on a GPU these tests show that the
two are one rule.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from diffcheck.kernels import rounding, transforms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ON_GPU = torch.cuda.is_available()
BLOCK = 4096
PATTERNS = 2**32 if ON_GPU else 2**18
CHUNK = min(PATTERNS, 2**28)


@triton.jit
def spelled_bf16(x):
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x1_0000


@triton.jit
def spelled_e2m1(x, TIES_DOWN: tl.constexpr):
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a > 1.25).to(tl.int32) + (a > 2.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    if TIES_DOWN:
        code += (a > 0.75).to(tl.int32) + (a > 1.75).to(tl.int32) + (a > 3.5).to(tl.int32)
    else:
        code += (a >= 0.75).to(tl.int32) + (a >= 1.75).to(tl.int32) + (a >= 3.5).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def hashed(i):
    """A permutation of int32 that scatters consecutive numbers."""
    i = i * 0x2C1B3C6D
    i = i ^ ((i >> 15) & 0x1FFFF)
    i = i * 0x297A2D39
    return i ^ ((i >> 14) & 0x3FFFF)


@triton.jit
def differences_kernel(out_ptr, first, stride, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a block of fp32 bit patterns two forms of one rule map to different bits."""
    number = first.to(tl.int64) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = (number * stride).to(tl.int32)
    x = bits.to(tl.float32, bitcast=True)
    if WHICH == "e4m3":
        differs = rounding.e4m3_word(x, -x, x * 0.5, x * 8.0) != (
            rounding.fp32_to_e4m3(x)
            | (rounding.fp32_to_e4m3(-x) << 8)
            | (rounding.fp32_to_e4m3(x * 0.5) << 16)
            | (rounding.fp32_to_e4m3(x * 8.0) << 24)
        )
    elif WHICH == "bf16":
        rounded = rounding.round_to_bf16(x)
        same = (x == x) & (rounded.to(tl.int32, bitcast=True) == spelled_bf16(x))
        differs = (same == 0) & ((x == x) | (rounded == rounded))
    elif WHICH == "bf16_word":
        want = ((spelled_bf16(x) >> 16) & 0xFFFF) | spelled_bf16(x * 3.0)
        differs = (x == x) & (rounding.bf16_word(x, x * 3.0) != want)
    elif WHICH == "e2m1_even" or WHICH == "e2m1_down":
        DOWN: tl.constexpr = WHICH == "e2m1_down"
        x = tl.where(tl.abs(x) < 3.5, x, 1.0)  # the word also takes 2x
        code, twice = spelled_e2m1(x, DOWN), spelled_e2m1(x * 2.0, DOWN)
        y = rounding.round_to_e2m1(x * rounding.E2M1_UNIT, rounding.E2M1_UNIT, DOWN)
        z = rounding.round_to_e2m1(x * 2.0, 1.0, DOWN) * rounding.E2M1_UNIT
        got = rounding.e2m1_word(y, z, y, y, z, y, z, z)
        want = code | (twice << 4) | (code << 8) | (code << 12) | (twice << 16) | (code << 20)
        differs = got != (want | (twice << 24) | (twice << 28))
    elif WHICH == "reciprocal":
        got = rounding.reciprocal(x)
        want = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
        differs = (got.to(tl.int32, bitcast=True) != want.to(tl.int32, bitcast=True)) & (x == x)
    elif WHICH == "quotient":
        scattered = hashed(bits)
        # mantissas of both from the hash, the exponent of x from the number: 2^-100 .. 1 over 1 .. 8
        other = hashed(scattered ^ 0x5BD1E995)
        exponent = 27 + ((scattered >> 23) & 0xFF) % 100
        x = ((exponent << 23) | (scattered & 0x7F_FFFF)).to(tl.float32, bitcast=True)
        divisor = ((127 + ((other >> 23) & 0xFF) % 3 << 23) | (other & 0x7F_FFFF)).to(tl.float32, bitcast=True)
        got = rounding.quotient(x, divisor, rounding.reciprocal(divisor))
        differs = got != tl.div_rn(x, divisor)
    else:
        tl.static_assert(False)
    tl.store(out_ptr + tl.program_id(0), tl.sum(differs.to(tl.int32), axis=0))


@pytest.mark.parametrize("which", ["e4m3", "bf16", "bf16_word", "e2m1_even", "e2m1_down", "reciprocal", "quotient"])
def test_every_fp32_is_converted_by_the_spelled_out_rule(which, device):
    counts = torch.empty(CHUNK // BLOCK, dtype=torch.int32, device=device)
    stride = 2**32 // PATTERNS + (0 if ON_GPU else 1)  # odd when coarse: low mantissa bits vary too
    found = 0
    for first in range(0, PATTERNS, CHUNK):
        counts.fill_(-1)
        differences_kernel[(CHUNK // BLOCK,)](
            counts, first - 2**31, stride, WHICH=which, BLOCK=BLOCK, enable_fp_fusion=False
        )
        assert (counts >= 0).all()
        found += int(counts.sum())
    print(f"{which}: {found} of {PATTERNS} differ")
    assert found == 0


@triton.jit
def hadamard_kernel(x_ptr, out_ptr, ROWS: tl.constexpr):
    offsets = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = transforms.hadamard_128(tl.trans(tl.load(x_ptr + offsets)))
    tl.store(out_ptr + offsets, tl.trans(x))


@pytest.mark.parametrize("rows", [1, 32])
def test_hadamard_has_the_bits_of_butterflies_in_order(rows, device):
    x = torch.randn(64, 128) * torch.logspace(-3, 3, 128)
    want = x.clone()
    for stride in (1, 2, 4, 8, 16, 32, 64):
        a, b = want.view(64, -1, 2, stride).unbind(2)
        want = torch.stack((a + b, a - b), 2).view(64, 128)
    want *= torch.tensor(128**-0.5)
    x, out = x.to(device), torch.full_like(x, math.nan, device=device)
    hadamard_kernel[(64 // rows,)](x, out, ROWS=rows, num_warps=1, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), want)


@triton.jit
def amax_kernel(x_ptr, out_ptr):
    offsets = tl.arange(0, 32)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out_ptr + tl.arange(0, 32), rounding.amax_of(tl.trans(tl.load(x_ptr + offsets)), 0))


def test_amax_is_the_largest_magnitude_or_nan(device):
    x = torch.randn(32, 128)
    x[3, 5] = torch.nan
    x[4, 127] = -torch.inf
    x[5] = 0
    x[6, 0], x[6, 1] = torch.inf, -torch.nan
    out = torch.empty(32, device=device)
    amax_kernel[(1,)](x.to(device), out, num_warps=1)
    torch.testing.assert_close(out.cpu(), x.abs().amax(1), rtol=0, atol=0, equal_nan=True)
