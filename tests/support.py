"""Small random layers and bitwise comparison, for tests of all packages.

Not importable by name (pytest runs in importlib mode): the `support` fixture hands this module out.
"""

import numpy as np
import torch
from torch import Tensor

from diffcheck.refimpl import STAGES, IndexerConfig, IndexerWeights, Trace, Yarn

PUBLISHED_YARN = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
STORED = ("fp8", "fp4", "bf16", "fp32")
"""How wq_b can be stored."""


def config(**changes) -> IndexerConfig:
    """A tiny indexer with the published constants."""
    fields = {
        "hidden_size": 64,
        "q_lora_rank": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "rope_head_dim": 64,
        "index_topk": 4,
        "compress_ratios": (0, 4),
        "compress_rope_theta": 160000.0,
        "yarn": PUBLISHED_YARN,
        "rms_norm_eps": 1e-6,
    }
    return IndexerConfig(**(fields | changes))


def weights(cfg: IndexerConfig, seed: int = 0, stored: str = "fp8") -> IndexerWeights:
    """Random weights of one layer, about as large as a trained layer's, wq_b stored as asked."""
    rng = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=rng) * scale

    heads, dim, lora, hidden = cfg.index_n_heads, cfg.index_head_dim, cfg.q_lora_rank, cfg.hidden_size
    out = heads * dim
    scale: Tensor | None = None
    wq_b = gaussian(out, lora, scale=lora**-0.5)
    if stored == "fp8":
        rows, columns = cfg.weight_block
        shape = (-(-out // rows), -(-lora // columns))
        scale = torch.randint(115, 120, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        wq_b = gaussian(out, lora, scale=60.0).to(torch.float8_e4m3fn)
    elif stored == "fp4":
        scale = torch.randint(121, 126, (out, lora // 32), generator=rng, dtype=torch.uint8)
        scale = scale.view(torch.float8_e8m0fnu)
        wq_b = torch.randint(-128, 128, (out, lora // 2), generator=rng, dtype=torch.int8)
    elif stored == "bf16":
        wq_b = wq_b.bfloat16()
    plain = torch.float32 if stored == "fp32" else torch.bfloat16
    return IndexerWeights(
        wq_b=wq_b,
        wq_b_scale=scale,
        weights_proj=gaussian(heads, hidden, scale=hidden**-0.5).to(plain),
        wkv=gaussian(2 * dim, hidden, scale=hidden**-0.5).to(plain),
        wgate=gaussian(2 * dim, hidden, scale=2 * hidden**-0.5).to(plain),
        ape=gaussian(4, 2 * dim, scale=0.5),
        norm=(1 + gaussian(dim, scale=0.2)).to(plain),
    )


def inputs(cfg: IndexerConfig, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random (x, qr) in bf16, with channels of unequal size as real activations have."""
    rng = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(tokens, cfg.hidden_size, generator=rng)
    qr = torch.randn(tokens, cfg.q_lora_rank, generator=rng)
    x = x * torch.randn(cfg.hidden_size, generator=rng).exp()
    qr = qr * torch.randn(cfg.q_lora_rank, generator=rng).exp()
    return x.bfloat16(), qr.bfloat16()


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that -0 differs from 0 and NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))


def assert_same_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Equal dtype, shape and bytes; on failure say how many elements differ and by how much."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    if not torch.equal(bits(got), bits(want)):
        wrong = bits(got).view(*got.shape, -1).ne(bits(want).view(*want.shape, -1)).any(-1)
        worst = (got.double() - want.double()).abs().max()
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, by up to {worst}")


def assert_same_trace(got: Trace, want: Trace, stages: tuple[str, ...] = STAGES) -> None:
    """All stages and the state to go on from, bit for bit."""
    for name in (*stages, "queries"):
        assert_same_bits(got[name], want[name], name)
    assert got.state.position == want.state.position
    assert_same_bits(got.state.keys, want.state.keys, "state.keys")
    assert_same_bits(got.state.pool.kv, want.state.pool.kv, "state.pool.kv")
    assert_same_bits(got.state.pool.gate, want.state.pool.gate, "state.pool.gate")


def awkward_floats(count: int, seed: int = 0) -> np.ndarray:
    """fp32 values of every kind: any bit pattern, moderate ones, and the special ones."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 1 << 32, count // 2, dtype=np.uint64).astype(np.uint32).view(np.float32)
    rest = count - count // 2
    moderate = (rng.standard_normal(rest) * np.exp2(rng.uniform(-12, 12, rest))).astype(np.float32)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        2.0**-149,
        -(2.0**-149),
        2.0**-126,
        3.4028235e38,
        -3.4028235e38,
    ]
    return np.concatenate((patterns, moderate, np.array(special, dtype=np.float32)))
