"""Small floats: every code, every midpoint, every special value, against ml_dtypes and torch."""

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from diffcheck.kernels import rounding

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def _to_e2m1(x_ptr, i, n, WHICH: tl.constexpr):
    x = tl.load(x_ptr + i % n, mask=i < n + 7, other=0)
    return rounding.round_to_e2m1(x * rounding.E2M1_UNIT, rounding.E2M1_UNIT, WHICH == "to_e2m1_down")


@triton.jit
def apply_kernel(x_ptr, out_ptr, n, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    if WHICH == "to_e4m3":
        y = rounding.e4m3_word(x, x, x, x) & 0xFF
    elif WHICH == "from_e4m3":
        y = rounding.e4m3_to_fp32(x)
    elif WHICH == "to_e2m1_even" or WHICH == "to_e2m1_down":
        y = rounding.e2m1_word(
            _to_e2m1(x_ptr, i, n, WHICH),
            _to_e2m1(x_ptr, i + 1, n, WHICH),
            _to_e2m1(x_ptr, i + 2, n, WHICH),
            _to_e2m1(x_ptr, i + 3, n, WHICH),
            _to_e2m1(x_ptr, i + 4, n, WHICH),
            _to_e2m1(x_ptr, i + 5, n, WHICH),
            _to_e2m1(x_ptr, i + 6, n, WHICH),
            _to_e2m1(x_ptr, i + 7, n, WHICH),
        )
    elif WHICH == "from_e2m1":
        y = rounding.e2m1_to_fp32(x)
    elif WHICH == "to_ue8m0":
        y = rounding.ceil_power_of_two(x)
    elif WHICH == "from_ue8m0":
        y = rounding.ue8m0_to_fp32(x)
    elif WHICH == "round_bf16":
        y = rounding.round_to_bf16(x)
    elif WHICH == "to_bf16":
        y = rounding.bf16_word(x, x * -1.0)
    elif WHICH == "from_bf16":
        y = rounding.bf16_code_to_fp32(x)
    else:
        y = rounding.exponential(x)
    tl.store(out_ptr + i, y, mask=i < n)


@pytest.fixture
def apply(device):
    def run(which, x):
        x = torch.from_numpy(np.ascontiguousarray(x)).to(device)
        to_float = which.startswith(("from", "round", "exp"))
        out = torch.empty(len(x), dtype=torch.float32 if to_float else torch.int32, device=device)
        block = 4096
        apply_kernel[(triton.cdiv(len(x), block),)](x, out, len(x), WHICH=which, BLOCK=block, enable_fp_fusion=False)
        out = out.cpu().numpy()
        if which.startswith("to_e2m1"):  # a word of eight numbers that follow each other, from each number on
            code = out & 15
            for place in range(8):
                np.testing.assert_array_equal((out >> 4 * place) & 15, np.roll(code, -place))
            return code
        return out

    return run


def bits_of(x):
    return np.asarray(x, np.float32).view(np.uint32)


def fp32(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def awkward(values):
    """fp32 values around a grid: points, midpoints, one ulp to both sides of each; random; special."""
    grid = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float32))
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * [1.01, 1.1, 2, 1e6]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-20, 12, 20000)).astype(np.float32)
    anything = fp32(rng.integers(0, 2**31, 20000, dtype=np.uint32))
    special = np.array([0, np.inf, np.nan, 1e-45, 1e-40, 3.4e38, 2**-126], np.float32)
    all_of = np.concatenate([points, spread, anything, special])
    return np.concatenate([all_of, -all_of])


def test_e4m3_codes_decode_exactly(apply):
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = apply("from_e4m3", codes)
    np.testing.assert_array_equal(got, want)
    assert list(np.flatnonzero(np.isnan(got))) == [0x7F, 0xFF]
    assert np.signbit(got[0x80])


def test_e4m3_codes_round_trip(apply):
    codes = np.arange(256, dtype=np.uint8)
    back = apply("to_e4m3", codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert list(back) == [c if c & 0x7F != 0x7F else 0x7F for c in range(256)]


def test_e4m3_rounds_to_nearest_even_and_saturates(apply):
    x = awkward(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want[np.isnan(x)] = 0x7F
    np.testing.assert_array_equal(apply("to_e4m3", x), want)


def test_e2m1_codes_round_trip(apply):
    codes = np.arange(16, dtype=np.uint8)
    values = apply("from_e2m1", codes)
    assert list(values[:8]) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(bits_of(values[8:]), bits_of(-values[:8]))
    for ties in ("even", "down"):
        np.testing.assert_array_equal(apply(f"to_e2m1_{ties}", values), codes)


def test_e2m1_rounds_ties_to_even(apply):
    x = awkward(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    x = x[np.abs(x) < 7]  # no block scale lets more through
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(apply("to_e2m1_even", x), want.view(np.uint8) & 15)


def test_e2m1_midpoints_by_hand(apply):
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert list(values[apply("to_e2m1_even", midpoints)]) == [0, 1, 1, 2, 2, 4, 4]
    assert list(values[apply("to_e2m1_down", midpoints)]) == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert list(values[apply("to_e2m1_down", -midpoints) & 7]) == [0, 0.5, 1, 1.5, 2, 3, 4]


def test_e2m1_ties_down_differs_from_even_at_midpoints_only(apply):
    x = awkward(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    x = x[np.abs(x) < 7]
    even, down = apply("to_e2m1_even", x), apply("to_e2m1_down", x)
    assert set(np.abs(x[even != down])) == {0.75, 1.75, 3.5}


def test_ue8m0_is_the_exact_ceiling_of_log2(apply):
    rng = np.random.default_rng(1)
    x = fp32(rng.integers(0x0080_0000, 0x7E80_0000, 20000, dtype=np.uint32))
    powers = np.exp2(np.arange(-126, 127)).astype(np.float32)
    x = np.concatenate([x, powers, np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers[1:], np.float32(0))])
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    want = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    np.testing.assert_array_equal(apply("to_ue8m0", x), want)


def test_ue8m0_of_nothing_and_of_poison(apply):
    x = np.array([0, 1e-45, np.inf, np.nan, -np.nan], np.float32)
    assert list(apply("to_ue8m0", x)) == [1, 1, 255, 255, 255]


def test_ue8m0_bytes_decode_exactly(apply):
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(apply("from_ue8m0", codes), want)


@pytest.mark.parametrize("largest", [448, 6])
def test_reciprocal_and_division_give_the_same_power_of_two(largest):
    """Published kernels differ in this detail; it never reaches the scale (all mantissas tried)."""
    amax = fp32(np.arange(0x3F80_0000, 0x4000_0000, dtype=np.uint32))
    quotients = amax / np.float32(largest), amax * np.float32(1 / largest)
    first, second = ((bits_of(q) >> 23) + ((bits_of(q) & 0x7F_FFFF) != 0) for q in quotients)
    np.testing.assert_array_equal(first, second)


def test_bf16_rounding_is_torchs(apply):
    rng = np.random.default_rng(2)
    x = fp32(rng.integers(0, 2**32, 50000, dtype=np.uint32))
    halves = fp32((rng.integers(0, 2**16, 5000, dtype=np.uint32) << 16) | 0x8000)
    x = np.concatenate([x, halves, np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4028e38, 1e-45], np.float32)])
    want = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(apply("round_bf16", x), want.float().numpy())
    words, numbers = apply("to_bf16", x).view(np.int16).reshape(-1, 2), ~np.isnan(x)
    both = torch.stack((want, -want), 1).view(torch.int16).numpy()
    np.testing.assert_array_equal(words[numbers], both[numbers])
    assert (np.abs(words[~numbers].view(ml_dtypes.bfloat16)) != 0).all()
    all_codes = np.arange(-(2**15), 2**15).astype(np.int16)
    want = torch.from_numpy(all_codes).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(apply("from_bf16", all_codes), want)


def test_exponential_is_within_an_ulp(apply):
    x = -np.concatenate([np.linspace(0, 87, 100001), np.exp2(np.linspace(-30, 6, 20001))]).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    error = np.abs(apply("exponential", x) - want) / np.spacing(want.astype(np.float32))
    print(f"exponential: worst {error.max():.3f} ulp")
    assert error.max() < 1.0
    edges = apply("exponential", np.array([0, -0.0, -np.inf, -1000, np.nan], np.float32))
    np.testing.assert_array_equal(edges, np.array([1, 1, 0, 0, np.nan], np.float32))
