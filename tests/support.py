"""Small random layers and bitwise comparison, for tests of all packages.

Not importable by name (pytest runs in importlib mode): the `support` fixture hands this module out.
"""

import numpy as np
import torch
from torch import Tensor

from diffcheck.refimpl import STAGES, Trace
from diffcheck.testing.layers import PUBLISHED_YARN, STORED
from diffcheck.testing.layers import made_up_config as config
from diffcheck.testing.layers import made_up_inputs as inputs
from diffcheck.testing.layers import made_up_weights as weights

__all__ = ["PUBLISHED_YARN", "STORED", "config", "inputs", "weights"]


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
