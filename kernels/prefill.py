"""prefill_logits: e4m3 queries against e4m3 keys, a block of query rows held while the keys stream past.

A prefill chunk reads every key once per block of rows, so the rows are what must stay. One program keeps R rows x H
heads = 256 columns of queries as one operand of its dots and walks over TILES tiles of 64 keys; each tile is one
[64, 128] x [128, 256] product, relu, gates, and a sum over the heads of each row by reshaping [keys, R * H] to
[keys, R, H]. Tiles that no row of the block sees are skipped, the others are written whole: the caller fills in -inf.

The products are left in the tensor core's narrow accumulator, so the error is that of DeepGEMM's kernel (calc_diff
9e-9 on an H200). This is the kernel of the architectures without one of their own, and what the interpreter runs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import INTERPRETED, e4m3_to_fp32
from .tuning import plain

COLUMNS = 256
"""Rows x heads of one program."""
KEYS = 64


@triton.jit
def prefill_logits_kernel(
    q_ptr,
    gate_ptr,
    keys_ptr,
    key_scales_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    rows,
    keys,
    out_stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program scores TILES * KEYS keys for ROWS rows; the last rows, which see most, come first."""
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    real = row < rows
    start = tl.load(start_ptr + row, mask=real, other=2147483647)
    end = tl.load(end_ptr + row, mask=real, other=0)
    begin = tl.program_id(0) * (TILES * KEYS)
    low = tl.maximum(tl.min(start, axis=0) // KEYS * KEYS, begin)
    high = tl.minimum(tl.max(end, axis=0), tl.minimum(begin + TILES * KEYS, keys))

    column = tl.arange(0, ROWS * HEADS)
    held = first_row + column // HEADS < rows
    place = first_row.to(tl.int64) * HEADS + column
    code = tl.load(q_ptr + place[None, :] * 128 + tl.arange(0, 128)[:, None], mask=held[None, :], other=0)
    gate = tl.load(gate_ptr + place, mask=held, other=0.0)[None, :]
    queries = e4m3_to_fp32(code) if INTERPRETED else code.to(tl.float8e4nv, bitcast=True)
    out_row = row.to(tl.int64)[None, :] * out_stride
    tile = tl.arange(0, KEYS)
    for at in range(low, high, KEYS):
        key = at + tile
        inside = key < keys
        offsets = key.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
        key_code = tl.load(keys_ptr + offsets, mask=inside[:, None], other=0)
        scale = tl.load(key_scales_ptr + key, mask=inside, other=1.0)
        if INTERPRETED:
            dots = tl.dot(e4m3_to_fp32(key_code), queries, input_precision="ieee")
        else:
            dots = tl.dot(key_code.to(tl.float8e4nv, bitcast=True), queries)
        terms = tl.where(dots <= 0.0, 0.0, dots) * gate
        score = tl.sum(tl.reshape(terms, (KEYS, ROWS, HEADS)), axis=2) * scale[:, None]
        tl.store(out_ptr + out_row + key[:, None], score, mask=real[None, :] & inside[:, None])


def rows_of(heads: int) -> int:
    """Query rows of one program; 0 where the heads do not divide its columns."""
    return COLUMNS // heads if heads <= COLUMNS and COLUMNS % heads == 0 and heads & (heads - 1) == 0 else 0


def prefill_logits(
    codes: Tensor, gate: Tensor, keys: Tensor, key_scales: Tensor, start: Tensor, end: Tensor, out: Tensor
) -> None:
    """Write scores into `out`, fp32 [M, N]: whole tiles, garbage outside [start, end) of a row.

    codes: e4m3 [M, H, 128] with H a power of two up to 256; gate fp32 [M, H]; keys e4m3 [N, 128] and key_scales fp32
    [N]; start, end int32 [M], as `ragged_logits` has checked them.
    """
    rows, heads = codes.shape[:2]
    count, block = keys.shape[0], rows_of(heads)
    assert block, "the caller checks the number of heads"
    choice = plain(keys.device)
    grid = (triton.cdiv(count, choice.prefill_tiles * KEYS), triton.cdiv(rows, block))
    prefill_logits_kernel[grid](
        codes.view(torch.uint8), gate, keys.view(torch.uint8), key_scales, start, end, out, rows, count, out.stride(0),
        HEADS=heads, ROWS=block, KEYS=KEYS, TILES=choice.prefill_tiles, num_warps=choice.prefill_warps,
        num_stages=choice.prefill_stages,
    )  # fmt: skip
