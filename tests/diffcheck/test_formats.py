"""Formats in general: element grids, scale rules, ties, storage, against ml_dtypes and frexp arithmetic.

| what | tolerance |
|--|--|
| grids of all elements over 10^6 awkward values, all codes and midpoints | equal bits |
| scales of all rules against an fp64 frexp implementation | equal |
| whole blocks against a loop, every combination of options | equal bits |
| what each format loses on Gaussian rows | the measured value within 10 % |
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from diffcheck.formats import (
    BF16,
    E2M1_REFERENCE,
    ELEMENTS,
    FP16,
    Format,
    block_scales,
    fake_quantise,
    floor_power_of_two,
    quantise,
    round_to_grid,
)
from diffcheck.refimpl.formats import e4m3_fake_quantise, fp4_step

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
INTEGERS = {"int8": 127.0, "int4": 7.0}
E4M3_P = Format(element="e4m3", block=128, scale="ue8m0")
E4M3_FP32 = Format(element="e4m3", block=128, scale="fp32")


def grid(name):
    """All finite values of an element, fp64, ascending."""
    if name in INTEGERS:
        return np.arange(-INTEGERS[name], INTEGERS[name] + 1)
    codes = np.arange(2 ** ELEMENTS[name].bits, dtype=np.uint8).view(DTYPES[name]).astype(np.float64)
    return np.unique(codes[np.isfinite(codes)])


def same(got, want):
    """Equal fp32 bits, any NaN standing for any other."""
    want = torch.from_numpy(np.ascontiguousarray(want, dtype=np.float32))
    nan = want.isnan()
    if not torch.equal(got.isnan(), nan):
        return False
    return torch.equal(got.masked_fill(nan, 0).view(torch.int32), want.masked_fill(nan, 0).view(torch.int32))


@pytest.mark.parametrize("name", ELEMENTS)
def test_constants_follow_from_the_format(name):
    values = grid(name)
    element = ELEMENTS[name]
    assert element.maximum == values.max() == -values.min()
    assert 2**element.bits >= len(values)
    if element.mantissa is not None:
        assert values[values > 0].min() == 2.0 ** (element.min_exponent - element.mantissa)


@pytest.fixture(scope="module")
def awkward(support):
    return support.awkward_floats(1_000_000, seed=3)


def near_midpoints(name):
    values = grid(name).astype(np.float32)
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    return np.concatenate((values, middle, *beside))


@pytest.mark.parametrize("name", ELEMENTS)
def test_ties_even(awkward, name):
    element = ELEMENTS[name]
    x = np.concatenate((np.clip(awkward, -element.maximum, element.maximum), near_midpoints(name)))
    with np.errstate(invalid="ignore"):
        want = np.rint(x) if name in INTEGERS else x.astype(DTYPES[name]).astype(np.float32)
    want = np.where(np.isnan(x), np.nan, want)
    assert same(round_to_grid(torch.from_numpy(x), element, "even"), want)


@pytest.mark.parametrize("name", ELEMENTS)
def test_ties_down_differ_at_midpoints_only(awkward, name):
    element, values = ELEMENTS[name], grid(name)
    x = np.concatenate((np.clip(awkward[::4], -element.maximum, element.maximum), near_midpoints(name)))
    x = x[np.isfinite(x)]
    magnitude = np.abs(x).astype(np.float64)
    positive = values[values >= 0]
    above = np.searchsorted(positive, magnitude)  # first grid value >= magnitude
    high, low = positive[above], positive[np.maximum(above - 1, 0)]
    want = np.where(magnitude - low <= high - magnitude, low, high)  # the midpoint goes toward zero
    want = np.copysign(np.where(high == magnitude, high, want), x)
    got = round_to_grid(torch.from_numpy(x), element, "down")
    assert same(got, want)
    even = round_to_grid(torch.from_numpy(x), element, "even")
    moved = (got != even).numpy()
    middle = (magnitude - low == high - magnitude) & (high != magnitude)
    assert (moved <= middle).all()
    assert moved.any()


def test_e2m1_ties_by_hand():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even, down = (round_to_grid(x, ELEMENTS["e2m1"], ties).tolist() for ties in ("even", "down"))
    assert even == [0, 1, 1, 2, 2, 4, 4]
    assert down == [0, 0.5, 1, 1.5, 2, 3, 4]


def exact_scale(amax, fmt):
    """A block's scale in fp64 by frexp, from fp32 amax."""
    if not np.isfinite(amax):
        return np.nan
    largest = ELEMENTS[fmt.element].maximum
    amax = np.maximum(np.float32(amax), np.float32(fmt.amax_floor))
    raw = np.float32(amax) / np.float32(largest)
    if fmt.scale == "fp32":
        return float(raw)
    if fmt.rule == "floor":
        _, exponent = np.frexp(np.maximum(np.float64(amax), 2.0**-149))
        _, top = np.frexp(np.float64(largest))
        return float(np.ldexp(1.0, max(int(exponent - top), -126)))
    mantissa, exponent = np.frexp(np.maximum(np.float64(raw), 2.0**-126))  # = m * 2^e, 0.5 <= m < 1
    up = mantissa > 0.5 if fmt.rule == "ceil" else mantissa >= 2**-0.5
    return float(np.ldexp(1.0, max(int(exponent) - 1 + int(up), -126)))


def two_level_scales(amax, fmt):
    """Scales fp32 of one vector's blocks as NVFP4 has them: e4m3 by ml_dtypes, under one fp32 scale of the vector."""
    largest = ELEMENTS[fmt.element].maximum
    vector = np.maximum(amax.max(), np.float32(fmt.amax_floor)) / np.float32(448 * largest)
    with np.errstate(invalid="ignore"):
        raw = amax / np.float32(largest) / (vector if vector else np.float32(1))
    return np.clip(raw, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * vector


def block_maxima(rng, count):
    sizes = np.exp2(rng.uniform(-140, 126, count)) * rng.uniform(1, 2, count)
    special = [0.0, 1e-4, 6 * 2.0**-126, 448.0, 6.0, 3.0, 1e-12, 2.0**-149, 3.4e38, 57344.0, 127.0]
    near = [np.nextafter(np.float32(v), np.float32(end)) for v in special for end in (0, 1e30)]
    return np.concatenate((sizes, special, near, [np.inf, np.nan])).astype(np.float32)


@pytest.mark.parametrize("floor", [0.0, 1e-4, 1e-12, 6 * 2.0**-126])
@pytest.mark.parametrize("element", ELEMENTS)
def test_scales_of_every_rule(element, floor):
    amax = block_maxima(np.random.default_rng(1), 1500)
    for scale, rule in [
        ("fp32", "ceil"),
        *(("ue8m0", r) for r in ("ceil", "floor", "nearest")),
    ]:
        fmt = Format(element=element, block=32, scale=scale, rule=rule, amax_floor=floor)
        want = np.array([exact_scale(a, fmt) for a in amax])
        assert same(block_scales(torch.from_numpy(amax), fmt), want), f"{fmt}"


def test_nearest_is_in_the_exponent():
    """sqrt(2) is equally far from both powers in log2; of all mantissas one fp32 value may be taken up."""
    raw = (np.arange(1 << 23, dtype=np.int32) | (127 << 23)).view(np.float32)
    fmt = Format(element="e2m1", block=32, scale="ue8m0", rule="nearest", amax_floor=0.0)
    got = block_scales(torch.from_numpy(raw * np.float32(6)), fmt).numpy()
    back = (raw * np.float32(6)) / np.float32(6)
    want = np.where(back >= np.sqrt(2.0), 2.0, 1.0)
    assert (got != want).sum() <= 1


def test_floor_power_of_two():
    x = torch.tensor([1.0, 1.5, 2.0, 0.75, 2.0**-126, 3.4e38])
    assert floor_power_of_two(x).tolist() == [1, 1, 2, 0.5, 2.0**-126, 2.0**127]
    assert floor_power_of_two(torch.tensor([torch.nan, torch.inf])).isnan().all()


def loop(row, fmt):
    """fake_quantise of one fp32 row, block by block, in numpy."""
    element, values = ELEMENTS[fmt.element], grid(fmt.element)
    out = []
    blocks = row.reshape(-1, fmt.block)
    two_level = two_level_scales(np.abs(blocks).max(axis=1), fmt) if fmt.scale == "e4m3" else None
    for number, block in enumerate(blocks):
        scale = np.float32(exact_scale(np.abs(block).max(), fmt)) if two_level is None else two_level[number]
        with np.errstate(all="ignore"):
            divisor = np.float32(1) if scale == 0 else scale
            ratio = block * (np.float32(1) / divisor) if fmt.reciprocal else block / divisor
        ratio = np.clip(ratio, -element.maximum, element.maximum).astype(np.float32)
        if fmt.ties == "even":
            code = np.rint(ratio) if element.mantissa is None else ratio.astype(DTYPES[fmt.element])
            code = code.astype(np.float32)
        else:
            distance = np.abs(np.abs(ratio).astype(np.float64)[:, None] - values[values >= 0])
            code = np.copysign(values[values >= 0][distance.argmin(axis=1)], ratio).astype(np.float32)
        out.append(code * scale)
    return np.concatenate(out)


def rows():
    rng = np.random.default_rng(5)
    gaussian = rng.standard_normal((12, 128)) * np.exp2(rng.integers(-40, 40, (12, 1)))
    special = np.zeros((4, 128))
    special[1, 40] = 1e-5
    special[2] = 1e-39 * rng.standard_normal(128)
    special[3] = 3e38 * rng.uniform(-1, 1, 128)
    return np.concatenate((gaussian, special)).astype(np.float32)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ties", ["even", "down"])
def test_whole_blocks_against_a_loop(element, ties):
    data = rows()
    scales = [("fp32", "ceil"), ("e4m3", "ceil"), ("ue8m0", "ceil"), ("ue8m0", "floor"), ("ue8m0", "nearest")]
    for (scale, rule), block, reciprocal in itertools.product(scales, (32, 128), (False, True)):
        fmt = Format(
            element=element,
            block=block,
            scale=scale,
            rule=rule,
            ties=ties,
            reciprocal=reciprocal,
            amax_floor=1e-4,
        )
        got = fake_quantise(torch.from_numpy(data), fmt)
        for row, result in zip(data, got, strict=True):
            assert same(result, loop(row, fmt)), f"{fmt}"


@pytest.mark.parametrize("size", [2.0**-60, 1e-3, 1.0, 2.0**60])
def test_two_level_scales_follow_the_size_of_a_vector(size):
    """A single e4m3 scale would overflow or vanish; the error of two levels is the same at every size."""
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)) * size
    fmt = Format(element="e2m1", block=16, scale="e4m3", amax_floor=0.0)
    error = float((fake_quantise(x, fmt) - x).double().norm() / x.double().norm())
    assert 0.09 < error < 0.10
    scale = quantise(x, fmt)[1]
    top = scale.amax(-1) * 6 / x.abs().amax(-1)  # the block with the largest magnitude has 448, exactly
    assert torch.allclose(top, torch.ones_like(top), rtol=1e-6)
    assert len((scale / scale.amax(-1, keepdim=True) * 448).unique()) < 200  # e4m3 has 126 positive values


def test_codes_times_scale_is_the_value_and_codes_are_on_the_grid():
    data = torch.from_numpy(rows())
    for element in ELEMENTS:
        fmt = Format(element=element, block=32, scale="ue8m0")
        codes, scale = quantise(data, fmt)
        assert scale.shape == (16, 4)
        assert set(codes.abs().unique().double().tolist()) <= set(grid(element).tolist())
        assert torch.equal(codes * scale.repeat_interleave(32, dim=-1), fake_quantise(data, fmt))


def test_a_zero_block_stays_zero_under_every_rule():
    zero = torch.zeros(2, 128)
    for element, scale, floor in itertools.product(ELEMENTS, ("fp32", "ue8m0", "e4m3"), (0.0, 1e-4)):
        fmt = Format(element=element, block=64, scale=scale, amax_floor=floor)
        assert torch.equal(fake_quantise(zero, fmt), zero), f"{fmt}"


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_block_is_nan_and_no_other(poison):
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    x[1, 70] = poison
    options = itertools.product(ELEMENTS, ("fp32", "ue8m0", "e4m3"), ("ceil", "floor", "nearest"))
    for (element, scale, rule), ties in itertools.product(options, ("even", "down")):
        got = fake_quantise(x, Format(element=element, block=32, scale=scale, rule=rule, ties=ties))
        assert got[1, 64:96].isnan().all()
        got[1, 64:96] = 0
        assert got.isfinite().all()


def test_the_amax_floor_swallows_small_blocks():
    x = torch.full((1, 128), 1e-10)
    assert not fake_quantise(x, Format(element="e4m3", amax_floor=1e-4)).any()
    assert torch.allclose(fake_quantise(x, Format(element="e4m3", amax_floor=0.0)), x)


def test_the_general_formats_contain_the_references_two(awkward):
    data = torch.from_numpy(awkward[: 4000 * 128]).view(-1, 128).bfloat16()
    equal = {
        "e2m1": (fake_quantise(data, E2M1_REFERENCE), fp4_step(data)),
        "e4m3": (fake_quantise(data, E4M3_P), e4m3_fake_quantise(data)),
    }
    for name, (general, reference) in equal.items():
        assert same(general, reference.numpy()), name


def test_reciprocal_moves_a_few_codes_of_an_fp32_scale_and_none_of_a_power_of_two():
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    for scale, most in (("fp32", 0.01), ("ue8m0", 0.0)):
        one, other = (quantise(x, Format(element="e4m3", scale=scale, reciprocal=flag))[0] for flag in (False, True))
        share = float((one != other).float().mean())
        assert share <= most
        assert (share > 0) == (most > 0)


def test_fp4_values_survive_e4m3_with_a_power_of_two_scale_only():
    """None of 200,000 Gaussian rows changes; with amax/448 in fp32 as scale all do."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        keys = fp4_step(torch.randn(50_000, 128, generator=rng).bfloat16())
        assert torch.equal(fake_quantise(keys, E4M3_P), keys)
    keys = keys[:20_000]
    stored = fake_quantise(keys, E4M3_FP32)
    assert (stored != keys).any(dim=1).all()
    error = (stored / keys - 1).abs()[keys != 0]
    assert 0.020 < error.mean() < 0.024
    # the worst value is 3/4 of the largest: 336 of 448, half way between 320 and 352
    assert 0.0476 < error.max() < 0.0477


def test_fp4_blocks_too_far_apart_do_not_fit_e4m3():
    """The exception: scales of two 32-blocks of a row that differ by more than 2^14."""
    x = torch.ones(1, 128)
    x[:, :32] = 0.5  # a code that needs every bit of the small block
    for spread, fits in ((2.0**8, True), (2.0**20, False)):
        keys = fp4_step(torch.cat((x[:, :32], spread * x[:, 32:]), dim=1))
        assert torch.equal(fake_quantise(keys, E4M3_P), keys) is fits


@pytest.mark.parametrize(("fmt", "loss"), [(BF16, 0.0017), (E4M3_P, 0.026), (E2M1_REFERENCE, 0.115)], ids=str)
def test_relative_error_of_gaussian_keys(fmt, loss):
    x = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(0))
    error = float((fake_quantise(x, fmt) - x).norm() / x.norm())
    print(f"{fmt}: {error:.4f}")
    assert abs(error / loss - 1) < 0.1


def test_plain_formats_round_once(awkward):
    x = torch.from_numpy(awkward)
    with np.errstate(all="ignore"):
        assert same(fake_quantise(x, BF16), awkward.astype(ml_dtypes.bfloat16))
        assert same(fake_quantise(x, FP16), awkward.astype(np.float16))
    assert same(fake_quantise(x, Format(element="fp32")), awkward)


def test_bytes_per_entry():
    """Cache pages store a vector's one scale in four bytes, also a power of two, and several as bytes."""
    assert BF16.bytes_per_entry(128) == FP16.bytes_per_entry(128) == 256
    assert Format(element="fp32").bytes_per_entry(128) == 512
    assert Format(element="int4", block=32, scale="fp32").bytes_per_entry(128) == 64 + 16
    assert E4M3_P.bytes_per_entry(128) == E4M3_FP32.bytes_per_entry(128) == 132
    assert E2M1_REFERENCE.bytes_per_entry(128) == 68
    assert Format(element="e3m2", block=32, scale="ue8m0").bytes_per_entry(128) == 100
    assert Format(element="e2m1", block=16, scale="e4m3").bytes_per_entry(128) == 64 + 8 + 4
    assert Format(element="e4m3", block=32, scale="fp32").bytes_per_entry(128) == 144


def test_what_is_refused():
    for bad, message in (
        ({"element": "e4m4"}, "element is 'e4m4'"),
        ({"element": "e4m3", "scale": "bf16"}, "scale is 'bf16'"),
        ({"element": "e4m3", "rule": "up"}, "rule is 'up'"),
        ({"element": "e4m3", "ties": "odd"}, "ties is 'odd'"),
        ({"element": "e4m3", "block": 0}, "block 0"),
        ({"element": "e4m3", "amax_floor": -1.0}, r"amax_floor -1\.0"),
        ({"element": "e4m3", "amax_floor": float("nan")}, "amax_floor nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Format(**bad)
    with pytest.raises(ValueError, match="last dim 100 is not a multiple of the block 32"):
        fake_quantise(torch.zeros(1, 100), E2M1_REFERENCE)


def test_names():
    assert str(BF16) == "bf16"
    assert str(E2M1_REFERENCE).startswith("e2m1/32/ue8m0")
    described = Format(element="e4m3", scale="ue8m0", rule="floor", ties="down", reciprocal=True)
    assert str(described) == "e4m3/128/ue8m0:floor,ties=down,reciprocal"


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [Format(element="e4m3", block=128, scale="fp32", reciprocal=True), E2M1_REFERENCE])
def test_the_device_does_not_show(fmt):
    """bf16 numbers meet many midpoints, where an ulp of the scale decides the code."""
    x = torch.randn(4096, 128).bfloat16().float()
    for here, there in zip(quantise(x, fmt), quantise(x.cuda(), fmt), strict=True):
        assert torch.equal(here, there.cpu())
