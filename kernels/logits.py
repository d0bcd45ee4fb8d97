"""paged_logits and ragged_logits: the indexer's scores of quantised queries against quantised keys.

    score[row, e] = (sum over heads of gate[row, h] * relu(q[row, h] . k[e])) * key_scale[e]

fp32 throughout after the products, -inf where a row may not look. The dot runs over keys x dims times dims x
heads, so the keys are the tall side and are loaded once for all rows that share them (speculative rows of one
request, or a tile of prefill rows). `paged_logits` reads the pages in place through the block table:
gathering keys first would write them again for every query.

Keys at or beyond every row's length are not read, those beyond one row's length do not reach its result. What
a dot is made of, `score_tile` says.

Letters: R rows, B requests, H heads, P pages, N keys, M prefill rows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_devices, check_tensor
from .layout import ENTRIES_PER_PAGE, HEAD_DIM, PageFormat, check_pages, dequantise, page_format, read_entries
from .prefill import prefill_logits, rows_of
from .quantise_query import QuantisedQuery
from .score_tile import load_keys, score_tile

QUERY_FORMATS_OF = {"e4m3": ("e4m3",), "bf16": ("e4m3", "bf16"), "e2m1": ("e2m1",)}
"""Which query formats can be scored against keys of a format: the pairs that deployments use."""

KEYS_PER_TILE = 64
PREFILL_ROWS = 4
"""Rows of one ragged program, which share its key tile."""
WARPS = {"e4m3": 4, "bf16": 4, "e2m1": 8}
"""Warps of one program by key format; unpacking e2m1 in registers would spill with 4."""

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
        tl.store(out_ptr + row * max_length + entry, score, mask=entry < max_length)


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
            tl.store(out_ptr + row * keys + key, score, mask=key < keys)


def paged_logits(
    query: QuantisedQuery,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    fmt: str,
    max_length: int,
    next_n: int = 1,
) -> Tensor:
    """Decode scores, fp32 [B * next_n, max_length]; columns at or beyond a row's length are -inf.

    query: QuantisedQuery of R = B * next_n rows, row b * next_n + j belongs to request b. pages: uint8 [P,
    page_bytes] of format `fmt`. block_table: int32 [B, W], W * 64 >= max_length; entry e of request b is row
    e % 64 of page block_table[b, e // 64]. lengths: int32 [R], entries visible to each row.

    A page id outside the pool gives NaN for its visible columns and is never followed; ids of pages beyond
    every row's length are not looked at. Formula: DeepSeek-V3.2-Exp and V4 inference code; DeepGEMM
    `fp8_paged_mqa_logits`. Raises ValueError for other shapes, dtypes, heads that are no multiple of 16, or a
    query format that no deployment uses with these pages.
    """
    form = page_format(fmt)
    check_pages(pages, form)
    rows, heads = _check_query(query, form)
    if next_n < 1 or rows % next_n:
        raise ValueError(f"next_n is {next_n} for {rows} query rows, expected a divisor")
    requests = rows // next_n
    check_tensor("block_table", block_table, torch.int32, (requests, None))
    check_tensor("lengths", lengths, torch.int32, (rows,))
    if not 0 <= max_length <= block_table.shape[1] * ENTRIES_PER_PAGE:
        raise ValueError(
            f"max_length is {max_length}, expected 0..{block_table.shape[1] * ENTRIES_PER_PAGE} "
            f"(a block table of {block_table.shape[1]} pages)"
        )
    check_devices(
        codes=query.codes,
        scales=query.scales,
        gate=query.gate,
        pages=pages,
        block_table=block_table,
        lengths=lengths,
    )
    out = torch.empty(rows, max_length, dtype=torch.float32, device=pages.device)
    if not rows or not max_length:
        return out
    value_view = pages.view(torch.int16) if form.name == "bf16" else pages
    scale_view = pages.view(torch.float32) if form.name == "e4m3" else pages
    paged_logits_kernel[(triton.cdiv(max_length, ENTRIES_PER_PAGE), requests)](
        *_query_arguments(query),
        value_view,
        scale_view,
        block_table,
        lengths,
        out,
        pages.shape[0],
        value_view.stride(0),
        scale_view.stride(0),
        form.scales_offset // scale_view.element_size(),
        block_table.stride(0),
        max_length,
        FMT=form.name,
        Q_FMT=query.fmt,
        NEXT_N=next_n,
        HEADS=heads,
        HEAD_TILE=head_tile(heads, form.name),
        num_warps=WARPS[form.name],
    )
    return out


def ragged_logits(
    query: QuantisedQuery,
    keys: Tensor,
    key_scales: Tensor | None,
    start: Tensor,
    end: Tensor,
    *,
    fmt: str,
    exact: bool = True,
) -> Tensor:
    """Prefill scores, fp32 [M, N]; columns outside [start, end) of a row are -inf.

    query: QuantisedQuery of M rows. keys: codes [N, 128] float8_e4m3fn (or uint8) or bfloat16, or packed
    uint8 [N, 64]; key_scales: fp32 [N], None or uint8 [N, 4], as `read_entries` returns them. start, end:
    int32 [M]; keys of several requests lie one after the other and each row names its own range. exact=False: where
    `prefill` has a kernel (e4m3 on both sides, heads a power of two up to 256) it is taken, with DeepGEMM's accuracy.

    Formula: as `paged_logits`; DeepGEMM `fp8_mqa_logits`. Raises ValueError as `paged_logits` does.
    """
    form = page_format(fmt)
    rows, heads = _check_query(query, form)
    dtypes = (form.codes_dtype, torch.uint8) if form.name == "e4m3" else (form.codes_dtype,)
    check_tensor("keys", keys, dtypes, (None, form.codes_width))
    count = keys.shape[0]
    if form.name == "bf16":
        if key_scales is not None:
            raise ValueError("bf16 keys have no scales, expected key_scales=None")
    elif key_scales is None:
        raise ValueError(f"{form.name} keys come without scales, expected key_scales")
    elif form.name == "e4m3":
        check_tensor("key_scales", key_scales, torch.float32, (count,))
    else:
        check_tensor("key_scales", key_scales, torch.uint8, (count, 4))
    check_tensor("start", start, torch.int32, (rows,))
    check_tensor("end", end, torch.int32, (rows,))
    check_devices(
        codes=query.codes,
        scales=query.scales,
        gate=query.gate,
        keys=keys,
        key_scales=key_scales,
        start=start,
        end=end,
    )
    if not exact and form.name == "e4m3" and key_scales is not None and rows and count and rows_of(heads):
        return prefill_logits(query.codes, query.gate, keys, key_scales, start, end)
    out = torch.empty(rows, count, dtype=torch.float32, device=keys.device)
    if not rows or not count:
        return out
    key_view = keys.view(torch.int16 if form.name == "bf16" else torch.uint8)
    ragged_logits_kernel[(triton.cdiv(count, KEYS_PER_TILE), triton.cdiv(rows, PREFILL_ROWS))](
        *_query_arguments(query),
        key_view,
        key_view if key_scales is None else key_scales,
        start,
        end,
        out,
        rows,
        count,
        FMT=form.name,
        Q_FMT=query.fmt,
        HEADS=heads,
        HEAD_TILE=head_tile(heads, form.name),
        ROWS=PREFILL_ROWS,
        KEYS=KEYS_PER_TILE,
        num_warps=WARPS[form.name],
    )
    return out


def _check_query(query: QuantisedQuery, form: PageFormat) -> tuple[int, int]:
    if query.fmt not in QUERY_FORMATS_OF[form.name]:
        raise ValueError(
            f"query is {query.fmt} and keys are {form.name}, expected a query in "
            f"{' or '.join(QUERY_FORMATS_OF[form.name])} for these keys"
        )
    query_form = page_format(query.fmt)
    check_tensor("query codes", query.codes, query_form.codes_dtype, (None, None, query_form.codes_width))
    rows, heads = query.codes.shape[0], query.codes.shape[1]
    if heads % 16 or not heads:
        raise ValueError(f"query has {heads} heads, expected a multiple of 16")
    check_tensor("query gate", query.gate, torch.float32, (rows, heads))
    if query.fmt == "e2m1":
        if query.scales is None:
            raise ValueError("e2m1 query comes without scales, expected uint8 [rows, heads, 4]")
        check_tensor("query scales", query.scales, torch.uint8, (rows, heads, 4))
    return rows, heads


def _query_arguments(query: QuantisedQuery) -> tuple[Tensor, Tensor, Tensor]:
    codes = query.codes.view(torch.int16 if query.fmt == "bf16" else torch.uint8)
    scales = query.scales if query.scales is not None and query.fmt == "e2m1" else codes
    return codes, scales, query.gate


def head_tile(heads: int, fmt: str) -> int:
    """Heads of one dot: the largest power of two that divides them, at most 64."""
    return min(heads & -heads, 32 if fmt == "e2m1" else 64)


def paged_logits_naive(
    query: QuantisedQuery,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    fmt: str,
    max_length: int,
    next_n: int = 1,
) -> Tensor:
    """`paged_logits` in plain torch: gathers each row's keys, then fp32 products. Same arguments and
    result.
    """
    out = torch.full((lengths.shape[0], max_length), -torch.inf, device=pages.device)
    for row, visible in enumerate(lengths.clamp(max=max_length).tolist()):
        entry = torch.arange(visible, device=pages.device)
        page = block_table[row // next_n, entry // ENTRIES_PER_PAGE].long()
        codes, scales = read_entries(pages, fmt, page * ENTRIES_PER_PAGE + entry % ENTRIES_PER_PAGE)
        out[row, :visible] = _naive_scores(query, row, dequantise(codes, scales, fmt))
    return out


def ragged_logits_naive(
    query: QuantisedQuery, keys: Tensor, key_scales: Tensor | None, start: Tensor, end: Tensor, *, fmt: str
) -> Tensor:
    """`ragged_logits` in plain torch. Same arguments and result."""
    out = torch.full((start.shape[0], keys.shape[0]), -torch.inf, device=keys.device)
    k_ND = dequantise(keys, key_scales, fmt)
    for row, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        span = slice(max(first, 0), max(last, 0))
        out[row, span] = _naive_scores(query, row, k_ND[span])
    return out


def _naive_scores(query: QuantisedQuery, row: int, k_ND: Tensor) -> Tensor:
    scales = query.scales[row] if query.scales is not None and query.fmt == "e2m1" else None
    q_HD = dequantise(query.codes[row], scales, query.fmt)
    assert q_HD.shape[-1] == HEAD_DIM
    return ((q_HD @ k_ND.T).relu() * query.gate[row, :, None]).sum(0)
