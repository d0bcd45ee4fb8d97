"""Matrix products whose bits do not depend on how many rows are computed together.

A plain fp32 product of one row takes another path through the library than the same row among a hundred, and nearly
every element moves by an ulp. Prefill, chunks and decode must agree bit for bit, so every product runs on row tiles
of one fixed size, the last one padded with zeros.

TF32 must be off on CUDA (`exact_matmul`). Dequantised e4m3/e2m1 operands with power-of-two scales are exact in fp32,
so one fp32 product equals the published block-by-block form up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .formats import e4m3_fake_quantise

ROW_TILE = 128
"""Rows of every product on the input side (q, gate, kv); any fixed number would do."""


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Run fp32 products in fp32: TF32 off inside, the caller's setting restored after."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def row_tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] @ weight[out, in]^T -> [n, out] in weight's dtype (fp32 or fp64), on tiles of ROW_TILE rows."""
    rows = x.shape[0]
    out = torch.empty(rows, weight.shape[0], dtype=weight.dtype, device=x.device)
    for first in range(0, rows, ROW_TILE):
        tile = x[first : first + ROW_TILE].to(weight.dtype)
        if tile.shape[0] < ROW_TILE:
            tile = torch.nn.functional.pad(tile, (0, 0, 0, ROW_TILE - tile.shape[0]))
        out[first : first + ROW_TILE] = (tile @ weight.T)[: rows - first]
    return out


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The published fp8 product: activation e4m3 per 128 inputs, fp32 accumulation, bf16 out.

    x [n, in] bf16; weight fp32 [out, in], already dequantised. in must be a multiple of 128.
    """
    return row_tiled_product(e4m3_fake_quantise(x), weight).bfloat16()
