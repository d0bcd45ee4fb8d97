"""The plain Triton logits kernels: every format, every number of heads, every architecture, and interpreted.

The dot runs over keys x dims times dims x heads, so the keys are the tall side and are loaded once for all rows that
share them (speculative rows of one request, or a tile of prefill rows). The paged kernel reads the pages in place
through the block table: gathering keys first would write them again for every query.

Keys at or beyond every row's length are not read, those beyond one row's length do not reach its result. What a dot is
made of, `score_tile` says.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import ENTRIES_PER_PAGE, PageFormat
from .quantise_query import QuantisedQuery
from .score_tile import load_keys, score_tile
from .tuning import plain

KEYS_PER_TILE = 64
PREFILL_ROWS = 4
"""Rows of one ragged program, which share its key tile."""

_PAGE = tl.constexpr(ENTRIES_PER_PAGE)
_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def paged_logits_kernel(
    q_ptr,
    q_scales_ptr,
    gate_ptr,
    page_values_ptr,
    page_scales_ptr,
    block_table_ptr,
    lengths_ptr,
    out_ptr,
    pages,
    page_values_stride,
    page_scales_stride,
    scales_start,
    table_stride,
    out_stride,
    max_length,
    FMT: tl.constexpr,
    Q_FMT: tl.constexpr,
    NEXT_N: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """One program scores one page of one request for its NEXT_N rows."""
    table_column = tl.program_id(0)
    request = tl.program_id(1)
    row_in_page = tl.arange(0, _PAGE)
    entry = table_column * _PAGE + row_in_page
    first_row = request.to(tl.int64) * NEXT_N

    longest = tl.load(lengths_ptr + first_row)
    for j in tl.static_range(1, NEXT_N):
        longest = tl.maximum(longest, tl.load(lengths_ptr + first_row + j))
    visible = entry < longest
    # beyond the longest row, the block table may hold anything
    used = table_column * _PAGE < longest
    page = tl.load(block_table_ptr + request.to(tl.int64) * table_stride + table_column, mask=used, other=0).to(
        tl.int64
    )
    known = (page >= 0) & (page < pages)
    readable = visible & known
    page = tl.where(known, page, 0)

    VALUES: tl.constexpr = 64 if FMT == "e2m1" else 128
    SCALES: tl.constexpr = 4 if FMT == "e2m1" else 1
    offsets = page * page_values_stride + row_in_page * VALUES
    scale_offsets = page * page_scales_stride + scales_start + row_in_page * SCALES
    first, second, scale = load_keys(page_values_ptr, offsets, page_scales_ptr, scale_offsets, readable, FMT)
    for j in range(NEXT_N):
        row = first_row + j
        length = tl.load(lengths_ptr + row)
        score = tl.full((_PAGE,), _MINUS_INF, tl.float32)
        if table_column * _PAGE < length:
            score = score_tile(first, second, scale, q_ptr, q_scales_ptr, gate_ptr, row, FMT, Q_FMT, HEADS, HEAD_TILE)
            score = tl.where(known, score, float("nan"))
            score = tl.where(entry < length, score, _MINUS_INF)
        tl.store(out_ptr + row * out_stride + entry, score, mask=entry < max_length)


@triton.jit
def ragged_logits_kernel(
    q_ptr,
    q_scales_ptr,
    gate_ptr,
    keys_ptr,
    key_scales_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    rows,
    keys,
    out_stride,
    FMT: tl.constexpr,
    Q_FMT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program scores KEYS keys for ROWS rows, skipping rows that see none of them."""
    first_key = tl.program_id(0) * KEYS
    key = first_key + tl.arange(0, KEYS)
    VALUES: tl.constexpr = 64 if FMT == "e2m1" else 128
    SCALES: tl.constexpr = 4 if FMT == "e2m1" else 1
    key64 = key.to(tl.int64)
    first, second, scale = load_keys(keys_ptr, key64 * VALUES, key_scales_ptr, key64 * SCALES, key < keys, FMT)
    for j in range(ROWS):
        row = tl.program_id(1).to(tl.int64) * ROWS + j
        if row < rows:
            start = tl.load(start_ptr + row)
            end = tl.load(end_ptr + row)
            score = tl.full((KEYS,), _MINUS_INF, tl.float32)
            if (start < first_key + KEYS) & (end > first_key):
                score = score_tile(
                    first, second, scale, q_ptr, q_scales_ptr, gate_ptr, row, FMT, Q_FMT, HEADS, HEAD_TILE
                )
                score = tl.where((key >= start) & (key < end), score, _MINUS_INF)
            tl.store(out_ptr + row * out_stride + key, score, mask=key < keys)


def paged(
    query: QuantisedQuery,
    form: PageFormat,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    out: Tensor,
    next_n: int,
) -> None:
    """Write `paged_logits` into `out`, fp32 [R, max_length]; arguments as it has checked them."""
    requests, max_length = block_table.shape[0], out.shape[1]
    value_view = pages.view(torch.int16) if form.name == "bf16" else pages
    scale_view = pages.view(torch.float32) if form.name == "e4m3" else pages
    heads = query.codes.shape[1]
    paged_logits_kernel[(triton.cdiv(max_length, ENTRIES_PER_PAGE), requests)](
        *query_arguments(query), value_view, scale_view, block_table, lengths, out, pages.shape[0],
        value_view.stride(0), scale_view.stride(0), form.scales_offset // scale_view.element_size(),
        block_table.stride(0), out.stride(0), max_length, FMT=form.name, Q_FMT=query.fmt, NEXT_N=next_n, HEADS=heads,
        HEAD_TILE=head_tile(heads, form.name), num_warps=plain(pages.device).warps[form.name],
    )  # fmt: skip


def ragged(
    query: QuantisedQuery, form: PageFormat, keys: Tensor, key_scales: Tensor | None, start: Tensor, end: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Write `ragged_logits` into `out`, fp32 [M, N]; arguments as it has checked them."""
    rows, heads = query.codes.shape[:2]
    count = keys.shape[0]
    key_view = keys.view(torch.int16 if form.name == "bf16" else torch.uint8)
    ragged_logits_kernel[(triton.cdiv(count, KEYS_PER_TILE), triton.cdiv(rows, PREFILL_ROWS))](
        *query_arguments(query), key_view, key_view if key_scales is None else key_scales, start, end, out, rows, count,
        out.stride(0), FMT=form.name, Q_FMT=query.fmt, HEADS=heads, HEAD_TILE=head_tile(heads, form.name),
        ROWS=PREFILL_ROWS, KEYS=KEYS_PER_TILE, num_warps=plain(keys.device).warps[form.name],
    )  # fmt: skip


def query_arguments(query: QuantisedQuery) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as integers, scales (or a stand-in that is not read) and gate."""
    codes = query.codes.view(torch.int16 if query.fmt == "bf16" else torch.uint8)
    scales = query.scales if query.scales is not None and query.fmt == "e2m1" else codes
    return codes, scales, query.gate


def head_tile(heads: int, fmt: str) -> int:
    """Heads of one dot: the largest power of two that divides them, at most 64."""
    return min(heads & -heads, 32 if fmt == "e2m1" else 64)
