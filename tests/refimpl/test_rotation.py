"""RoPE with YaRN and the Hadamard rotation, against scipy and complex arithmetic in fp64.

| what | tolerance |
|--|--|
| Hadamard of unit vectors and of small integers, against scipy | equal, up to the one fp32 factor D^-0.5 |
| Hadamard of random values, against scipy in fp64 | 1e-6 of the vector's norm |
| RoPE against complex fp64 on the same table | 2^-22 of the pair's magnitude |
| angular frequencies against fp64 | 4 fp32 steps |
"""

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch

from diffcheck.refimpl.rotation import apply_rope, hadamard, inverse_frequencies, rope_table


@pytest.mark.parametrize("dim", [32, 64, 128, 512])
def test_hadamard_is_scipys_matrix(dim):
    matrix = torch.from_numpy(scipy.linalg.hadamard(dim)).float() * torch.tensor(dim**-0.5)
    assert torch.equal(hadamard(torch.eye(dim)), matrix)
    assert torch.equal(hadamard(torch.eye(dim).bfloat16()), matrix)


def test_hadamard_of_integers_is_exact():
    """Sums of small integers have no rounding, so order and inner precision must show."""
    x = torch.randint(-200, 200, (50, 7, 128), generator=torch.Generator().manual_seed(0)).float()
    sums = x.double() @ torch.from_numpy(scipy.linalg.hadamard(128)).double()
    assert torch.equal(hadamard(x), sums.float() * 128**-0.5)
    assert torch.equal(hadamard(x.bfloat16()), sums.float() * 128**-0.5)


def test_hadamard_is_its_own_inverse_and_keeps_dot_products():
    rng = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 64, 128, generator=rng)
    want = a.double() @ torch.from_numpy(scipy.linalg.hadamard(128)).double() / math.sqrt(128)
    error = (hadamard(a) - want).norm(dim=-1) / a.norm(dim=-1)
    assert error.max() < 1e-6
    assert torch.allclose(hadamard(hadamard(a)), a, atol=2e-6)
    turned, plain = (hadamard(a) * hadamard(b)).sum(-1), (a * b).sum(-1)
    assert ((turned - plain).abs() / (a.norm(dim=-1) * b.norm(dim=-1))).max() < 1e-6


def test_hadamard_keeps_fp64():
    x = torch.randn(3, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    want = x @ torch.from_numpy(scipy.linalg.hadamard(128)).double() / math.sqrt(128)
    assert torch.allclose(hadamard(x), want, rtol=0, atol=1e-14)


def table64(theta, dims, yarn):
    """The published formulas in fp64."""
    i = np.arange(dims // 2)
    f = theta ** (-2.0 * i / dims)
    if yarn is None:
        return f

    def dim_of(turns):
        length = yarn.original_max_position_embeddings
        return dims * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dims - 1)
    ramp = np.clip((i - low) / (high - low or 0.001), 0, 1)
    return f / yarn.factor * ramp + f * (1 - ramp)


@pytest.mark.parametrize("theta", [10000.0, 40000.0, 160000.0])
@pytest.mark.parametrize("with_yarn", [False, True])
@pytest.mark.parametrize("dims", [32, 64])
def test_frequencies_against_fp64(support, theta, with_yarn, dims):
    yarn = support.PUBLISHED_YARN if with_yarn else None
    got = inverse_frequencies(theta, dims, yarn)
    assert got.dtype == torch.float32
    assert got.shape == (dims // 2,)
    relative = np.abs(got.double().numpy() / table64(theta, dims, yarn) - 1)
    assert relative.max() < 4 * 2.0**-23


def test_published_ramp(support):
    """theta 160000 over 65536 positions: untouched up to pair 15, sixteenfold slower from pair 25 on."""
    plain = inverse_frequencies(160000.0, 64, None)
    yarn = inverse_frequencies(160000.0, 64, support.PUBLISHED_YARN)
    assert torch.equal(yarn[:16], plain[:16])
    assert torch.equal(yarn[25:], plain[25:] / 16)
    between = yarn[16:25] / plain[16:25]
    assert (between.diff() < 0).all()
    assert 1 / 16 < between.min() < between.max() < 1
    # by hand: pair 20 is half way, 0.5 / 16 + 0.5
    assert abs(float(between[4]) - 0.53125) < 1e-6


def test_equal_ramp_ends_do_not_divide_by_zero(support):
    """Over six positions no pair turns even once: both ends are pair 0 and the ramp is a step."""
    short = dataclasses.replace(support.PUBLISHED_YARN, original_max_position_embeddings=6)
    got, plain = inverse_frequencies(160000.0, 64, short), inverse_frequencies(160000.0, 64, None)
    assert got[0] == plain[0]
    assert torch.equal(got[1:], plain[1:] / 16)


@pytest.mark.parametrize("shape", [(9, 128), (9, 4, 128)])
def test_rope_is_a_complex_product(shape):
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=rng).bfloat16()
    positions = torch.tensor([0, 1, 2, 3, 4, 100, 4095, 65536, 1048575])
    inv_freq = inverse_frequencies(160000.0, 64, None)
    got = apply_rope(x, *rope_table(positions, inv_freq))
    assert got.dtype == torch.float32
    assert torch.equal(got[..., :64], x[..., :64].float()), "the first dims are not rotated"
    # the angle itself is an fp32 product
    angles = (positions.float()[:, None] * inv_freq).double()
    turn = torch.polar(torch.ones_like(angles), angles)
    if len(shape) == 3:
        turn = turn.unsqueeze(1)
    pairs = torch.view_as_complex(x[..., 64:].double().unflatten(-1, (-1, 2)).contiguous())
    error = (torch.view_as_complex(got[..., 64:].double().unflatten(-1, (-1, 2)).contiguous()) - pairs * turn).abs()
    assert (error / pairs.abs()).max() < 2.0**-22
    assert torch.equal(got[0], x[0].float()), "position 0 turns nothing"


def test_dot_products_depend_on_distance_only():
    rng = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 1, 128, dtype=torch.float64, generator=rng)
    inv_freq = inverse_frequencies(160000.0, 64, None)

    def turned(x, position):
        return apply_rope(x, *rope_table(torch.tensor([position]), inv_freq))

    near = (turned(q, 40) * turned(k, 28)).sum()
    far = (turned(q, 1040) * turned(k, 1028)).sum()
    assert abs(near - far) < 1e-3
    assert abs(near - (turned(q, 40) * turned(k, 20)).sum()) > 1e-2


def test_rows_do_not_depend_on_their_neighbours(support):
    """Vector instructions handle the ends of arrays differently; the table's bits must not show it."""
    inv_freq = inverse_frequencies(160000.0, 64, support.PUBLISHED_YARN)
    positions = torch.arange(100_000, 100_061)
    whole = rope_table(positions, inv_freq)
    for i in range(0, 61, 7):
        for part, all_rows in zip(rope_table(positions[i : i + 1], inv_freq), whole, strict=True):
            support.assert_same_bits(part[0], all_rows[i], f"table row {i}")
