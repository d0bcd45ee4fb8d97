"""paged_logits and ragged_logits: the indexer's scores of quantised queries against quantised keys.

    score[row, e] = (sum over heads of gate[row, h] * relu(q[row, h] . k[e])) * key_scale[e]

fp32 throughout after the products, -inf where a row may not look. Three kinds of kernel stand behind one function:

==================  ==========================================  ====================================================
module              problems                                    accumulation of e4m3 products
==================  ==========================================  ====================================================
`plain_logits`      all, on all architectures, interpreted      fp32
`prefill`           ragged e4m3, exact=False                    as the fp8 instruction leaves it
`hopper_prefill`    ragged e4m3 on sm_90                        fp32, or as the instruction leaves it (exact=False)
`hopper_decode`     paged, every format, on sm_90               fp32, or as the instruction leaves it (exact=False)
==================  ==========================================  ====================================================

The last three write whole tiles and pages; `fill` then puts -inf outside each row's range.

Letters: R rows, B requests, H heads, P pages, N keys, M prefill rows.
"""

import torch
from torch import Tensor

from . import plain_logits
from .checks import check_devices, check_tensor
from .fill import fill_outside
from .layout import ENTRIES_PER_PAGE, HEAD_DIM, PageFormat, check_pages, dequantise, page_format, read_entries
from .prefill import prefill_logits, rows_of
from .quantise_query import QuantisedQuery
from .tuning import on_hopper

QUERY_FORMATS_OF = {"e4m3": ("e4m3",), "bf16": ("e4m3", "bf16"), "e2m1": ("e2m1",)}
"""Which query formats can be scored against keys of a format: the pairs that deployments use."""


def paged_logits(
    query: QuantisedQuery,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    fmt: str,
    max_length: int,
    next_n: int = 1,
    exact: bool = True,
    fill: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Decode scores, fp32 [B * next_n, max_length]; columns at or beyond a row's length are -inf.

    query: QuantisedQuery of R = B * next_n rows, row b * next_n + j belongs to request b. pages: uint8 [P,
    page_bytes] of format `fmt`. block_table: int32 [B, W], W * 64 >= max_length; entry e of request b is row
    e % 64 of page block_table[b, e // 64]. lengths: int32 [R], entries visible to each row.

    A page id outside the pool gives NaN for its visible columns and is never followed; ids of pages beyond
    every row's length are not looked at. exact=False lets fp8 products be added up by the instruction's narrow
    accumulator where a kernel has that (DeepGEMM's accuracy). fill=False leaves columns at or beyond a row's length
    undefined, for a caller whose top-k takes the lengths. out: fp32 [R, max_length] to write to, rows may be strided.

    Formula: DeepSeek-V3.2-Exp and V4 inference code; DeepGEMM `fp8_paged_mqa_logits`. Raises ValueError for other
    shapes, dtypes, heads that are no multiple of 16, or a query format that no deployment uses with these pages.
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
        out=out,
    )
    result = _output(out, rows, max_length, pages)
    if not rows or not max_length:
        return result
    if on_hopper(pages):
        from . import hopper_decode

        if hopper_decode.runs(heads, next_n, requests, pages, form):
            scales = query.scales if query.scales is not None and query.fmt == "e2m1" else query.codes
            hopper_decode.decode_sm90(
                query.codes, scales, query.gate, query.fmt, pages, form, block_table, lengths, result, next_n, exact
            )
            if fill:
                fill_outside(result, None, lengths)
            return result
    plain_logits.paged(query, form, pages, block_table, lengths, result, next_n)
    return result


def ragged_logits(
    query: QuantisedQuery,
    keys: Tensor,
    key_scales: Tensor | None,
    start: Tensor,
    end: Tensor,
    *,
    fmt: str,
    exact: bool = True,
    fill: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Prefill scores, fp32 [M, N]; columns outside [start, end) of a row are -inf.

    query: QuantisedQuery of M rows. keys: codes [N, 128] float8_e4m3fn (or uint8) or bfloat16, or packed
    uint8 [N, 64]; key_scales: fp32 [N], None or uint8 [N, 4], as `read_entries` returns them. start, end:
    int32 [M]; keys of several requests lie one after the other and each row names its own range. exact, fill and out
    as in `paged_logits`.

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
        out=out,
    )
    result = _output(out, rows, count, keys)
    if not rows or not count:
        return result
    if form.name == "e4m3" and key_scales is not None:
        if on_hopper(keys) and aligned(query.codes, keys):
            from . import hopper_prefill

            if hopper_prefill.rows_of(heads, exact):
                hopper_prefill.prefill_sm90(query.codes, query.gate, keys, key_scales, start, end, result, exact)
                if fill:
                    fill_outside(result, start, end)
                return result
        if not exact and rows_of(heads):
            prefill_logits(query.codes, query.gate, keys, key_scales, start, end, result)
            if fill:
                fill_outside(result, start, end)
            return result
    plain_logits.ragged(query, form, keys, key_scales, start, end, result)
    return result


def aligned(*tensors: Tensor) -> bool:
    """Whether the copy engine can address them."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _output(out: Tensor | None, rows: int, columns: int, like: Tensor) -> Tensor:
    """`out` checked, or a new fp32 [rows, columns]."""
    if out is None:
        return torch.empty(rows, columns, dtype=torch.float32, device=like.device)
    if out.dtype != torch.float32 or list(out.shape) != [rows, columns] or (columns > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}, expected torch.float32 "
            f"{[rows, columns]} with contiguous rows"
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
