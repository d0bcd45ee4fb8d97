"""The stack on a GPU: the same function as on the CPU up to summation order, and its memory at V4-Flash shapes."""

import json

import pytest
import torch

from diffcheck.checkpoint.model import open_model
from diffcheck.fixture_model import write_model
from diffcheck.refimpl.model import EXACT, REFERENCE, LayerWeights, logits, run_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("numerics", "tolerance"), [(EXACT, 1e-4), (REFERENCE, 0.03)])
def test_like_the_cpu(mini, numerics, tolerance):
    """Streams after every layer; in the reference a rounding that flips moves what is built on it by a step."""
    model = open_model(mini)
    tokens = torch.tensor(json.loads((mini / "tokens.json").read_text()))[:600]
    queries = torch.tensor([300, 450, 599])
    runs = [
        run_model(model.config, model.load, tokens, device=device, numerics=numerics, mass_queries=queries)
        for device in ("cuda", "cpu")
    ]
    for ours, theirs in zip(*runs, strict=True):
        assert ours.streams.is_cuda
        distance = (ours.streams.cpu().float() - theirs.streams.float()).norm() / theirs.streams.float().norm()
        print(f"{numerics.name}, layer {ours.layer}: {float(distance):.1e}")
        assert distance < tolerance
        # where roundings differ a selected entry may change, and its weight with it
        if numerics is EXACT and theirs.record.mass is not None:
            assert (ours.record.mass - theirs.record.mass).abs().max() < 0.05
    top = LayerWeights(model.load_head(), model.config, "top").to("cuda")
    assert logits(model.config, top, ours.streams[-2:], numerics).shape == (2, 512)


def test_memory_of_flash_layers(tmp_path):
    """Two window layers, one with an indexer, one of ratio 128, at 22,597 tokens: below 24 GB."""
    model = open_model(write_model(tmp_path / "flash", like="v4-flash", layers=4))
    tokens = torch.randint(model.config.vocab_size, (22_597,), generator=torch.Generator().manual_seed(0))
    torch.cuda.reset_peak_memory_stats()
    for result in run_model(model.config, model.load, tokens, device="cuda", mass_queries=torch.tensor([22_596])):
        peak = torch.cuda.max_memory_allocated()
        print(f"layer {result.layer}: peak {peak / 1e9:.2f} GB")
        assert peak < 24e9
        assert result.streams.isfinite().all()
