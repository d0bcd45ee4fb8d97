"""Synthetic hidden states: reproducible, and unfriendly in the ways that real ones are."""

import pytest
import torch

from diffcheck.inputs import synthetic_hidden
from diffcheck.inputs.basis import model_basis, orthonormal_rows
from diffcheck.inputs.hidden import BLOCK, low_rank_query
from diffcheck.refimpl import V4_FLASH, InputError

OTHER_SUM_ORDER = 1e-3
"""Share of elements that another order of fp32 sums may move by one bf16 unit."""


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(scope="module")
def flash():
    return synthetic_hidden(V4_FLASH, length=2048, seed=1)


def test_shapes_and_dtypes(support):
    config = support.config(hidden_size=96, q_lora_rank=128)
    for length in (1, 4, BLOCK, BLOCK + 1):
        x, qr = synthetic_hidden(config, length=length, seed=0)
        assert (x.shape, qr.shape) == ((length, 96), (length, 128))
        assert x.dtype == qr.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.isfinite().all()
        assert qr.isfinite().all()
    with pytest.raises(InputError, match="length is 0, expected"):
        synthetic_hidden(config, length=0, seed=0)


def test_a_prefix_of_a_longer_text_is_the_shorter_text(support):
    config = support.config(hidden_size=1024, q_lora_rank=256)
    x, qr = synthetic_hidden(config, length=3 * BLOCK, seed=4)
    for length in (1, 100, BLOCK, BLOCK + 7, 2 * BLOCK + 1):
        shorter = synthetic_hidden(config, length=length, seed=4)
        assert same(shorter[0], x[:length])
        assert same(shorter[1], qr[:length])


def test_seed_and_threads(support):
    config = support.config(hidden_size=1024)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = synthetic_hidden(config, length=600, seed=4)
        torch.set_num_threads(2)
        two = synthetic_hidden(config, length=600, seed=4)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(one, two, strict=True):  # the order of sums may depend on the threads
        moved = a != b
        assert float(moved.float().mean()) < OTHER_SUM_ORDER
        torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-5)  # atol: sums that cancel
    other = synthetic_hidden(config, length=600, seed=5)[0]
    assert not same(one[0][:BLOCK], other[:BLOCK])
    assert not same(one[0][:88], one[0][BLOCK:])  # blocks differ


def test_mean_direction_and_outlier_channels(flash):
    x = flash[0].float()
    mean = x.mean(0)
    share = float(mean.square().sum() / x.square().sum(1).mean())
    channels = x.square().mean(0).sqrt()
    ratios = (channels / channels.median()).sort(descending=True).values
    kurtosis = float(x.pow(4).mean() / x.square().mean() ** 2)
    print(f"mean direction {share:.2f}, channels {ratios[:7].tolist()}, kurtosis {kurtosis:.0f} (Gaussian 3)")
    assert 0.4 < share < 0.85
    assert 3 <= int((ratios > 10).sum()) <= 8
    assert ratios[0] < 55
    assert kurtosis > 30
    basis = model_basis(V4_FLASH.hidden_size, V4_FLASH.q_lora_rank)
    assert set(channels.topk(5).indices.tolist()) == set(basis.outliers.tolist())
    white = torch.randn_like(x)
    assert white.mean(0).square().sum() / white.square().sum(1).mean() < 0.01


def test_spectrum_decays(flash):
    x = flash[0][:512].float()
    x -= x.mean(0)
    energy = torch.linalg.eigvalsh((x @ x.T).double()).flip(0)
    energy /= energy.sum()
    effective = float(1 / energy.square().sum())
    print(f"{effective:.0f} effective dimensions of 512, leading 16 hold {energy[:16].sum():.2f}")
    assert effective < 60  # white noise: about 450
    assert energy[:16].sum() > 0.4
    assert energy[0] > 2 * energy[4] > 4 * energy[31] > 8 * energy[100]


def test_neighbours_are_correlated(flash):
    x = flash[0].float()
    unit = torch.nn.functional.normalize(x - x.mean(0), dim=1)
    at = {lag: float((unit[:-lag] * unit[lag:]).sum(1).mean()) for lag in (1, 8, 64, 512)}
    print({lag: round(value, 3) for lag, value in at.items()})
    assert at[1] > 0.15
    assert at[1] >= at[8] > at[64] > at[512] - 0.02
    assert abs(at[512]) < 0.1


def test_rows_are_normalised(flash):
    x, qr = (t.float() for t in flash)
    basis = model_basis(V4_FLASH.hidden_size, V4_FLASH.q_lora_rank)
    for rows, weight in ((x, basis.norm_weight), (qr, basis.q_norm_weight)):
        rms = (rows / weight).square().mean(1).sqrt()
        torch.testing.assert_close(rms, torch.ones_like(rms), rtol=4e-3, atol=0)


def test_qr_is_a_function_of_x(flash):
    x, qr = flash
    basis = model_basis(V4_FLASH.hidden_size, V4_FLASH.q_lora_rank)
    assert same(low_rank_query(basis, x[:BLOCK]), qr[:BLOCK])
    dense = x[:64].double() @ basis.query_projection.T
    normalised = dense / dense.square().mean(1, keepdim=True).sqrt() * basis.q_norm_weight
    torch.testing.assert_close(normalised, qr[:64].double(), rtol=1e-2, atol=1e-2)
    q = qr.float()
    assert 0.2 < q.mean(0).square().sum() / q.square().sum(1).mean() < 0.85
    assert torch.linalg.matrix_rank(q[:128].double()) == 128  # not confined to the latent directions


def test_full_length_is_quick_and_small():
    import time

    began = time.perf_counter()
    x, _ = synthetic_hidden(V4_FLASH, length=8192, seed=0)
    seconds = time.perf_counter() - began
    print(f"8192 Flash tokens in {seconds:.2f} s")
    assert x.shape == (8192, 4096)
    assert seconds < 10  # 0.3 s alone on one core; the cores of a test machine are shared


def test_basis_of_tiny_geometries():
    for hidden, lora in ((1, 1), (2, 3), (3, 128), (33, 7)):
        basis = model_basis(hidden, lora)
        assert basis.query_projection.shape == (lora, hidden)
        assert all(getattr(basis, name).isfinite().all() for name in basis.__dataclass_fields__)
    rows = orthonormal_rows(torch.randn(5, 9))
    torch.testing.assert_close(rows @ rows.T, torch.eye(5), rtol=0, atol=1e-6)
