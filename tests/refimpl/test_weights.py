"""Stored weights and what they are worth.

| what | tolerance |
|--|--|
| dequantised fp8, fp4 and plain weights against the loops of the oracle | equal |
| errors | name the tensor and what was expected |
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from diffcheck.refimpl import IndexerWeights, InputError, dequantise_weight


@pytest.mark.parametrize("shape", [(256, 256), (200, 128), (130, 300), (1, 1)])
def test_fp8_blocks_may_be_partial(support, oracle, shape):
    rng = torch.Generator().manual_seed(shape[0])
    codes = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # no NaN
    scale = torch.randint(1, 255, (-(-shape[0] // 128), -(-shape[1] // 128)), generator=rng, dtype=torch.uint8)
    scale = scale.clamp(100, 150)
    got = dequantise_weight(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), (128, 128))
    want = oracle.dequantise(codes.numpy().view(ml_dtypes.float8_e4m3fn), scale.numpy())
    assert got.dtype == torch.float32
    assert np.array_equal(got.double().numpy(), want)
    as_floats = torch.from_numpy(np.exp2(scale.numpy().astype(np.float32) - 127))
    assert torch.equal(dequantise_weight(codes.view(torch.float8_e4m3fn), as_floats, (128, 128)), got)


def test_other_block_sizes():
    weight = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    got = dequantise_weight(weight, scale, (2, 4))
    assert got[:, 0].tolist() == [1, 1, 4, 4, 16]
    assert got[0].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_fp4_low_nibble_is_the_even_index(oracle):
    rng = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (6, 64), generator=rng, dtype=torch.int8)
    scale = torch.randint(120, 135, (6, 4), generator=rng, dtype=torch.uint8)
    got = dequantise_weight(packed, scale.view(torch.float8_e8m0fnu), (128, 128))
    assert np.array_equal(got.double().numpy(), oracle.dequantise(packed.numpy(), scale.numpy()))
    byte = torch.full((1, 16), 0x52, dtype=torch.int8)  # low nibble 2 is 1.0, high nibble 5 is 3.0
    by_hand = dequantise_weight(byte, torch.tensor([[0.5]]), (128, 128))
    assert by_hand[0, :4].tolist() == [0.5, 1.5, 0.5, 1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_are_only_widened(dtype):
    weight = torch.randn(4, 4).to(dtype)
    assert torch.equal(dequantise_weight(weight, None, (128, 128)), weight.float())


def test_quantised_means_fp8_or_fp4(support):
    cfg = support.config()
    flags = {stored: support.weights(cfg, stored=stored).quantised for stored in support.STORED}
    assert flags == {"fp8": True, "fp4": True, "bf16": False, "fp32": False}


@pytest.mark.parametrize("stored", ["fp8", "fp4", "bf16", "fp32"])
def test_good_weights_pass_and_every_wrong_shape_is_named(support, stored):
    cfg = support.config()
    good = support.weights(cfg, stored=stored)
    good.check(cfg)
    for field in dataclasses.fields(IndexerWeights):
        tensor = getattr(good, field.name)
        if tensor is None:
            continue
        cut = dataclasses.replace(good, **{field.name: tensor[:-1]})
        with pytest.raises(InputError, match=rf"here: {field.name} has shape .*, expected"):
            cut.check(cfg, where="here")
        integers = dataclasses.replace(good, **{field.name: torch.zeros(tensor.shape, dtype=torch.int64)})
        with pytest.raises(InputError, match=rf"{field.name}"):
            integers.check(cfg)


def test_a_missing_scale_is_named(support):
    cfg = support.config()
    for stored in ("fp8", "fp4"):
        bare = dataclasses.replace(support.weights(cfg, stored=stored), wq_b_scale=None)
        with pytest.raises(InputError, match="wq_b_scale is absent"):
            bare.check(cfg)


def test_a_quantised_product_needs_whole_activation_blocks(support):
    cfg = support.config(q_lora_rank=160)
    support.weights(cfg, stored="bf16").check(cfg)
    for stored in ("fp8", "fp4"):
        with pytest.raises(InputError, match="q_lora_rank is 160, expected a multiple of 128"):
            support.weights(cfg, stored=stored).check(cfg)
