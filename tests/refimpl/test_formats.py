"""The two block formats of the reference, against ml_dtypes and an independent numpy implementation.

| what | tolerance |
|--|--|
| decoding of every e2m1, e8m0 and e4m3 code | equal bits |
| rounding of 10^6 awkward values to e4m3 and e2m1, midpoints included | equal bits (the sign of zero too) |
| power-of-two scales | equal, over all 2^23 mantissas |
| block quantisation of awkward rows | equal bits; NaN where a block holds NaN or inf |
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from diffcheck.refimpl import formats

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def same(got, want):
    """Equal fp32 bits, any NaN standing for any other."""
    got, want = got.numpy(), want.astype(np.float32)
    return np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(
        np.where(np.isnan(got), 0, got).view(np.int32), np.where(np.isnan(want), 0, want).view(np.int32)
    )


@pytest.fixture(scope="module")
def awkward(support):
    return support.awkward_floats(1_000_000)


def midpoints(codes):
    """All values of a format, the midpoints between neighbours, and the fp32 values just beside these."""
    values = np.unique(codes.astype(np.float32))
    values = values[np.isfinite(values)]
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    below, above = np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))
    return np.concatenate((values, middle, below, above))


def test_every_e2m1_code():
    codes = np.arange(16, dtype=np.uint8)
    assert same(formats.decode_e2m1(torch.from_numpy(codes)), codes.view(E2M1))


def test_every_e8m0_code():
    codes = np.arange(256, dtype=np.uint8)
    assert same(formats.decode_e8m0(torch.from_numpy(codes)), codes.view(ml_dtypes.float8_e8m0fnu))


def test_every_e4m3_code_is_a_fixed_point():
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(E4M3).astype(np.float32)
    assert same(torch.from_numpy(codes).view(torch.float8_e4m3fn).float(), values)
    assert same(formats.round_to_e4m3(torch.from_numpy(values)), values)


@pytest.mark.parametrize(
    ("rounding", "dtype", "largest"),
    [(formats.round_to_e4m3, E4M3, 448.0), (formats.round_to_e2m1, E2M1, 6.0)],
    ids=["e4m3", "e2m1"],
)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
def test_rounding_of_awkward_values(awkward, rounding, dtype, largest, narrow):
    codes = np.arange(2 ** (8 if dtype is E4M3 else 4), dtype=np.uint8).view(dtype)
    values = np.concatenate((np.clip(awkward, -largest, largest), midpoints(codes)))
    if narrow:
        with np.errstate(invalid="ignore"):
            values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    nan = np.isnan(values)
    got = rounding(torch.from_numpy(values))
    assert got.isnan().equal(torch.from_numpy(nan))
    assert same(got[torch.from_numpy(~nan)], values[~nan].astype(dtype))


def test_e2m1_midpoints_by_hand():
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert formats.round_to_e2m1(middle).tolist() == want
    assert formats.round_to_e2m1(-middle).tolist() == [-v for v in want]


def test_bf16_rounding_of_torch_is_nearest_even(awkward):
    """Every stage relies on it."""
    got = torch.from_numpy(awkward).bfloat16().float()
    with np.errstate(invalid="ignore"):
        assert same(got, awkward.astype(ml_dtypes.bfloat16))


def all_mantissas(exponent):
    return ((np.arange(1 << 23, dtype=np.int32)) | ((exponent + 127) << 23)).view(np.float32)


def power_of_two_above(values):
    """2^ceil(log2(v)) by frexp."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


@pytest.mark.parametrize("exponent", [-126, 0])
def test_ceil_power_of_two_over_all_mantissas(exponent):
    values = all_mantissas(exponent)
    assert same(formats.ceil_power_of_two(torch.from_numpy(values)), power_of_two_above(values))


def test_ceil_power_of_two_has_no_result_for_nan_and_inf():
    assert formats.ceil_power_of_two(torch.tensor([torch.nan, torch.inf])).isnan().all()


def test_dividing_by_six_or_multiplying_by_a_sixth_gives_the_same_scales():
    """The two published spellings; over all mantissas the exponents agree, for e2m1 and e4m3."""
    for largest in (6.0, 448.0):
        amax = torch.from_numpy(all_mantissas(0))
        inverse = torch.tensor(1 / largest, dtype=torch.float32)
        divided = formats.ceil_power_of_two(amax / largest)
        assert torch.equal(divided, formats.ceil_power_of_two(amax * inverse))


def rows_of_every_kind(support, width, count=400):
    """bf16 rows: awkward, gaussian of all sizes, zero, below the amax floors, one outlier, exact powers."""
    rng = np.random.default_rng(7)
    gaussian = rng.standard_normal((count, width)) * np.exp2(rng.uniform(-130, 100, (count, 1)))
    small = rng.standard_normal((20, width)) * 1e-5
    denormal = rng.standard_normal((20, width)) * 1e-39
    outlier = rng.standard_normal((20, width))
    outlier[:, 3] *= 1e4
    powers = np.exp2(rng.integers(-8, 9, (40, width)))
    times_six = powers * np.where(rng.random((40, width)) < 0.2, 6.0, 0.1)
    rows = np.concatenate((gaussian, small, denormal, outlier, powers, times_six, np.zeros((2, width))))
    return torch.from_numpy(rows.astype(np.float32)).bfloat16()


def test_fp4_step_against_the_oracle(support, oracle):
    rows = rows_of_every_kind(support, 128)
    want = oracle.fp4_step(rows.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    got = formats.fp4_step(rows)
    assert same(got, want)
    assert torch.equal(got.bfloat16().float(), got), "e2m1 x 2^n is exact in bf16"


def test_e4m3_fake_quantisation_against_the_oracle(support, oracle):
    rows = rows_of_every_kind(support, 256)
    got = formats.e4m3_fake_quantise(rows)
    for row, result in zip(rows.float().numpy(), got, strict=True):
        codes, scales = oracle.quantise_row_e4m3(row)
        assert same(result, codes * scales)
    assert torch.equal(got.bfloat16().float(), got), "e4m3 x 2^n is exact in bf16"


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("step", "block"), [(formats.fp4_step, 32), (formats.e4m3_fake_quantise, 128)], ids=["e2m1", "e4m3"]
)
def test_a_poisoned_block_is_nan_and_no_other(step, block, poison):
    x = torch.randn(3, 4 * block, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean = step(x)
    x[1, 2 * block + 5] = poison
    got = step(x)
    assert got[1, 2 * block : 3 * block].isnan().all()
    got[1, 2 * block : 3 * block] = clean[1, 2 * block : 3 * block]
    assert torch.equal(got, clean)


def test_fp4_step_is_idempotent_and_scales_with_powers_of_two():
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    once = formats.fp4_step(x)
    assert torch.equal(formats.fp4_step(once), once)
    assert torch.equal(formats.fp4_step(x * 2.0**7), once * 2.0**7)
    assert torch.equal(formats.fp4_step(-x), -once)
