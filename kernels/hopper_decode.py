"""decode_sm90: queries of a decode step against cache pages on Hopper, read in place by the copy engine.

The pages that the requests use are counted out in order, request after request, and every program takes an equal
share (so does DeepGEMM's schedule, made by a kernel of its own). A program holds one request's queries in shared
memory, keeps SLOTS pages in flight, and scores a page at a time; several programs on a multiprocessor hide each
other's waiting.

===========  =========================================  ==============================
format       how a page meets the tensor core           products
===========  =========================================  ==============================
e4m3         straight from shared memory                fp8, narrow accumulator
e4m3 exact   widened to fp16 in registers               fp16, fp32 accumulator
bf16         straight from shared memory                bf16, fp32 accumulator
e2m1         turned to e4m3 in registers                fp8, narrow accumulator
e2m1 exact   turned to integers in registers            8-bit integers, exact
===========  =========================================  ==============================

Pages of e2m1 keys with blocks of very different scales (see `hopper_e2m1`) are scored once more, block by block.

Whole pages are written, also where a row does not see all of one; the caller fills in -inf. A page id outside the pool
is fetched as zeros and scored NaN.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper import (
    byte_of_place,
    cta_barrier,
    score_of,
    widen_e4m3,
    word_layout,
)
from .hopper_e2m1 import (
    below_largest,
    block_layout,
    far_layout,
    gates,
    is_far,
    largest_byte,
    row_layout,
    score_far,
    score_near,
    unpack,
)
from .hopper_e2m1 import word_layout as e2m1_layout
from .layout import PageFormat
from .tuning import SM90, programs

_E2M1_VIEW = (torch.int32, 68, 16, gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
PAGE_VIEWS = {
    "e4m3": (torch.float8_e4m3fn, 66, 128, gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)),
    "e4m3 exact": (torch.int32, 66, 32, gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)),
    "bf16": (torch.bfloat16, 64, 128, gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)),
    "e2m1": _E2M1_VIEW,
    "e2m1 exact": _E2M1_VIEW,
}
"""How the pool is seen as a matrix whose rows are entries: dtype, rows of a page (its scales are the rows beyond 64),
columns, and the shared layout of a page's values."""


SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
"""Shared layout of a page's scales, [1, 64] words."""
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""The same of [64]."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _fetch(k_desc, s_desc, k_smem, s_smem, bar, page, pages, FMT: gl.constexpr):
    """Bring a page into a slot; its barrier is complete when values and scales are there."""
    page = gl.where(page.to(gl.uint32) < pages, page, pages)
    ROWS: gl.constexpr = 66 if FMT == "e4m3" else (64 if FMT == "bf16" else 68)
    BYTES: gl.constexpr = 8192 if FMT == "e4m3" else (16384 if FMT == "bf16" else 4096)
    mbarrier.expect(bar, BYTES if FMT == "bf16" else BYTES + 256)
    tma.async_copy_global_to_shared(k_desc, [page * ROWS, 0], bar, k_smem)
    if FMT != "bf16":
        LINES: gl.constexpr = BYTES // 256 + 1
        tma.async_copy_global_to_shared(s_desc, [page * LINES + (LINES - 1), 0], bar, s_smem)


@gluon.jit
def _store(out_ptr, out_stride, first, max_length, score):
    """Write scores [64, rows] of entries first, first + 1 .. to the rows at out_ptr."""
    row = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout)).to(gl.int64)
    entry = first + gl.arange(0, 64, layout=gl.SliceLayout(1, score.type.layout))
    gl.store(out_ptr + row[None, :] * out_stride + entry[:, None], score, mask=(entry < max_length)[:, None])


@gluon.jit
def _queries(q_ptr, row, N: gl.constexpr, FMT: gl.constexpr, Q_FMT: gl.constexpr, EXACT: gl.constexpr):
    """[N, 128] of queries (row: the first, int64) in the type and the order of dims of the key operand."""
    VECTOR: gl.constexpr = 8 if Q_FMT == "bf16" else 16
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [VECTOR // 4, 128 // VECTOR], [4, 1], [1, 0])
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    column = (row + gl.arange(0, N, layout=gl.SliceLayout(1, layout)))[:, None]
    if EXACT and FMT == "e4m3":
        operand = gl.load(q_ptr + column * 128 + byte_of_place(place)[None, :]).to(gl.float16)
    elif FMT == "bf16" and Q_FMT == "e4m3":
        operand = gl.load(q_ptr + column * 128 + place[None, :]).to(gl.float32).to(gl.bfloat16)
    else:
        operand = gl.load(q_ptr + column * 128 + place[None, :])
    return operand


@gluon.jit
def _e2m1_queries(q_ptr, q_scales_ptr, row, first: gl.constexpr, N: gl.constexpr):
    """Words [64, 16] and scales [64] of heads first, first + 1 ..; zeros beyond N."""
    layout: gl.constexpr = e2m1_layout()
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :]
    place = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    words = gl.load(q_ptr + (row + place)[:, None] * 16 + word, mask=(place < N)[:, None], other=0)
    place = first + gl.arange(0, 64, layout=row_layout())
    return words, gl.load(q_scales_ptr + row + place, mask=place < N, other=0)


@gluon.jit
def _store_e2m1(words, scale, q_smem, farthest, EXACT: gl.constexpr):
    """Put 64 heads into shared memory; returns `farthest` [64, 4] raised to their `below_largest`."""
    below = below_largest(scale, largest_byte(scale))
    q_smem.store(unpack(words, below, EXACT))
    return gl.maximum(farthest, below)


@gluon.jit
def _score_far_pages(farthest, words_ptr, ids, n, first, pages, q_ptr, q_scales_ptr, gate_ptr, row, q_smem, out_ptr,
                     out_stride, max_length, NEXT_N: gl.constexpr, HEADS: gl.constexpr,
                     EXACT: gl.constexpr):  # fmt: skip
    """If any block of a request's queries and n pages is far: score those pages again, or all if it is a query's."""
    PART: gl.constexpr = min(HEADS, 32)  # of a row's heads at a time: few registers
    PARTS: gl.constexpr = HEADS // PART
    N: gl.constexpr = NEXT_N * HEADS
    if is_far(farthest, EXACT):
        raw = q_smem._reinterpret(gl.int8, q_smem.shape, q_smem.layout)
        near = gl.zeros_like(farthest)
        q_farthest = near
        cta_barrier()  # the request's queries are done with
        for at in gl.static_range(0, N, 64):
            q, scale = _e2m1_queries(q_ptr, q_scales_ptr, row, at, N)
            q_farthest = gl.maximum(q_farthest, below_largest(scale, largest_byte(scale)))
            raw.slice(at, 64, 0).store(unpack(q, near, True))
        q_far = is_far(q_farthest, EXACT)
        fence_async_shared()
        cta_barrier()
        parts = raw._reinterpret(gl.int8, [raw.shape[0] // PART, PART, 128], raw.layout)
        for t in range(n):
            page = gl.load(ids + t).to(gl.int64)
            if (page >= 0) & (page < pages):
                scale = gl.load(words_ptr + page * 1088 + 1024 + gl.arange(0, 64, layout=row_layout()))
                if q_far | is_far(below_largest(scale, largest_byte(scale)), EXACT):
                    for j in range(NEXT_N):
                        score = gl.zeros([64], gl.float32, gl.SliceLayout(1, far_layout(PART)))
                        for part in range(j * PARTS, j * PARTS + PARTS):
                            score += score_far(words_ptr, page, q_scales_ptr, gate_ptr, row + part * PART,
                                               parts.index(part), PART)  # fmt: skip
                        _store(out_ptr + j * out_stride, out_stride, (first + t) * 64, max_length, score[:, None])


@gluon.jit
def _product(k_smem, s_smem, q_smem, N: gl.constexpr, FMT: gl.constexpr, EXACT: gl.constexpr, mma: gl.constexpr):
    """Products [64, N] of one page, in flight, and the factors of its keys' scores, fp32 [64]."""
    key_layout: gl.constexpr = gl.SliceLayout(1, mma)
    factor = gl.full([64], 1.0, gl.float32, key_layout)
    keys = k_smem
    if FMT != "bf16":
        factor = s_smem._reinterpret(gl.float32, [64], _PLAIN).load(key_layout)
    if EXACT and FMT == "e4m3":
        keys = widen_e4m3(k_smem.load(word_layout(32)), gl.DotOperandLayout(0, mma, 2))
    acc = gl.zeros([64, N], gl.float32, mma)
    acc = warpgroup_mma(keys, q_smem.permute([1, 0]), acc, use_acc=False, is_async=True)
    return acc, factor


@gluon.jit
def decode_sm90_kernel(
    k_desc,
    s_desc,
    words_ptr,
    q_ptr,
    q_scales_ptr,
    gate_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    requests,
    pages,
    table_stride,
    out_stride,
    max_length,
    FMT: gl.constexpr,
    Q_FMT: gl.constexpr,
    EXACT: gl.constexpr,
    NEXT_N: gl.constexpr,
    HEADS: gl.constexpr,
    SLOTS: gl.constexpr,
    SLOT_BITS: gl.constexpr,
    SUMS: gl.constexpr,
    REQUESTS: gl.constexpr,
):
    """One program scores an equal share of the pages in use, REQUESTS a power of two that holds `requests`."""
    N: gl.constexpr = NEXT_N * HEADS
    WIDE: gl.constexpr = FMT == "bf16" or (EXACT and FMT == "e4m3")
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16 if WIDE else 32])

    # few requests: every warp holds them all, so that sums over them need no shared memory
    SPREAD: gl.constexpr = 32 if REQUESTS <= 128 else 128
    b = gl.arange(0, REQUESTS, layout=gl.BlockedLayout([REQUESTS // SPREAD], [32], [4], [0]))
    longest = gl.zeros_like(b)
    for nth in gl.static_range(NEXT_N):
        longest = gl.maximum(longest, gl.load(lengths_ptr + b * NEXT_N + nth, mask=b < requests, other=0))
    used = (gl.minimum(longest, max_length) + 63) // 64
    upto = gl.associative_scan(used, 0, _add)
    total = gl.sum(used, axis=0)
    share = total // gl.num_programs(0)
    more = total - share * gl.num_programs(0)  # programs that take one page more
    unit = gl.program_id(0) * share + gl.minimum(gl.program_id(0), more)
    last = unit + share + (gl.program_id(0) < more).to(gl.int32)
    if unit < last:
        k_smem = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 64, k_desc.block_shape[1]], k_desc.layout)
        s_smem = k_smem
        if FMT != "bf16":
            s_smem = gl.allocate_shared_memory(s_desc.dtype, [SLOTS, 1, 64], s_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        wide: gl.constexpr = gl.bfloat16 if FMT == "bf16" else gl.float16
        Q_ROWS: gl.constexpr = 64 if FMT == "e2m1" and N < 64 else N
        if WIDE:
            q_smem = gl.allocate_shared_memory(wide, [Q_ROWS, 128], gl.NVMMASharedLayout(128, 16))
        else:
            byte: gl.constexpr = gl.int8 if EXACT else gl.float8e4nv
            q_smem = gl.allocate_shared_memory(byte, [Q_ROWS, 128], gl.NVMMASharedLayout(128, 8))
        fetched = 0
        while unit < last:
            before = upto - used
            this = (before <= unit) & (unit < upto)
            request = gl.sum(gl.where(this, b, 0), axis=0)
            first = unit - gl.sum(gl.where(this, before, 0), axis=0)
            n = gl.minimum(gl.sum(gl.where(this, upto, 0), axis=0), last) - unit
            ids = table_ptr + request.to(gl.int64) * table_stride + first
            row = request.to(gl.int64) * N
            out_rows = out_ptr + request.to(gl.int64) * NEXT_N * out_stride
            head = row + gl.arange(0, N, layout=gl.SliceLayout(0, mma))
            first_ids = ()  # before the queries, and all at once: pages are what takes longest
            for i in gl.static_range(SLOTS):
                first_ids += (gl.load(ids + i, mask=i < n, other=-1),)
            gate = gl.load(gate_ptr + head)
            if FMT == "e2m1":
                q, q_scale = _e2m1_queries(q_ptr, q_scales_ptr, row, 0, N)
                q_largest = largest_byte(gl.load(q_scales_ptr + head))
            else:
                q = _queries(q_ptr, row, N, FMT, Q_FMT, EXACT)
            for i in gl.static_range(SLOTS):
                if i < n:
                    slot = (fetched + i) & (SLOTS - 1)
                    _fetch(k_desc, s_desc, k_smem.index(slot), s_smem.index(slot), ready.index(slot), first_ids[i],
                           pages, FMT)  # fmt: skip
            following = gl.load(ids + SLOTS, mask=n > SLOTS, other=-1)
            cta_barrier()  # the last request's queries are done with
            if FMT == "e2m1":
                gate, lacks = gates(gate, q_largest, EXACT)
                farthest = gl.zeros([64, 4], gl.int32, gl.SliceLayout(2, block_layout()))
                farthest = _store_e2m1(q, q_scale, q_smem.slice(0, 64, 0), farthest, EXACT)
                if N > 64:
                    q, q_scale = _e2m1_queries(q_ptr, q_scales_ptr, row, 64, N)
                    farthest = _store_e2m1(q, q_scale, q_smem.slice(64, 64, 0), farthest, EXACT)
            else:
                q_smem.store(q)
                if SUMS:
                    gate = gate * 0.5
            gate = gate[None, :]
            fence_async_shared()
            cta_barrier()
            for t in range(n):
                slot = fetched & (SLOTS - 1)
                page = gl.load(ids + t)
                known = page.to(gl.uint32) < pages
                refill = following
                following = gl.load(ids + t + SLOTS + 1, mask=t + SLOTS + 1 < n, other=-1)
                values, scales = k_smem.index(slot), s_smem.index(slot)
                mbarrier.wait(ready.index(slot), (fetched >> SLOT_BITS) & 1)
                if FMT == "e2m1":
                    scale = scales._reinterpret(gl.int32, [64], _PLAIN).load(row_layout())
                    score, farthest = score_near(values, scale, q_smem, gate, gl.where(known, lacks, float("nan")),
                                                 farthest, NEXT_N, HEADS, EXACT, mma)  # fmt: skip
                else:
                    acc, factor = _product(values, scales, q_smem, N, FMT, EXACT, mma)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
                    score = score_of(acc, gate, gl.where(known, factor, float("nan")), NEXT_N, HEADS, SUMS)
                cta_barrier()  # every warp has read the slot
                if t + SLOTS < n:
                    _fetch(k_desc, s_desc, values, scales, ready.index(slot), refill, pages, FMT)
                _store(out_rows, out_stride, (first + t) * 64, max_length, score)
                fetched += 1
            if FMT == "e2m1":
                _score_far_pages(farthest, words_ptr, ids, n, first, pages, q_ptr, q_scales_ptr, gate_ptr, row, q_smem,
                                 out_rows, out_stride, max_length, NEXT_N, HEADS, EXACT)  # fmt: skip
            unit += n
        for i in gl.static_range(SLOTS):
            mbarrier.invalidate(ready.index(i))


def runs(heads: int, next_n: int, requests: int, pages: Tensor, form: PageFormat) -> bool:
    """Whether this kernel takes such a problem; the plain one takes what it does not."""
    columns = heads * next_n
    return (
        columns & (columns - 1) == 0
        and 16 <= columns <= SM90.decode_columns
        and 0 < requests <= SM90.decode_requests
        and pages.stride(0) == form.page_bytes
        and pages.data_ptr() % 128 == 0
    )


def decode_sm90(
    codes: Tensor, q_scales: Tensor, gate: Tensor, q_fmt: str, pages: Tensor, form: PageFormat, block_table: Tensor,
    lengths: Tensor, out: Tensor, next_n: int, exact: bool,
) -> None:  # fmt: skip
    """Write scores into `out`, fp32 [B * next_n, max_length]: whole pages, garbage at or beyond a row's length.

    Arguments as `paged_logits` has checked them, and `runs` holds. q_scales: uint8 [R, H, 4] of an e2m1 query, else
    anything on the device. exact is of no account to bf16 pages.
    """
    exact = exact and form.name != "bf16"
    name = f"{form.name} exact" if exact else form.name
    dtype, page_rows, width, layout = PAGE_VIEWS[name]
    shape = [pages.shape[0] * page_rows, width]
    k_desc = TensorDescriptor(pages.view(dtype), shape, [width, 1], [64, width], layout)
    words = pages.view(torch.float32 if form.name == "e4m3" else torch.int32)
    s_desc = TensorDescriptor(words, [words.numel() // 64, 64], [64, 1], [1, 64], SCALES_LAYOUT)
    requests, max_length, heads = block_table.shape[0], out.shape[1], codes.shape[1]
    most = requests * triton.cdiv(max_length, 64)
    if q_fmt == "e2m1":
        codes = (codes if codes.data_ptr() % 16 == 0 else codes.clone()).view(torch.int32)
        q_scales = (q_scales if q_scales.data_ptr() % 4 == 0 else q_scales.clone()).view(torch.int32)
    slots, wide = SM90.decode_slots[name], next_n * heads > 64
    decode_sm90_kernel[(programs(pages.device, SM90.decode_programs[name][wide], most),)](
        k_desc, s_desc, words, codes, q_scales, gate, block_table, lengths, out, requests, pages.shape[0],
        block_table.stride(0), out.stride(0), max_length, FMT=form.name, Q_FMT=q_fmt, EXACT=exact, NEXT_N=next_n,
        HEADS=heads, SLOTS=slots, SLOT_BITS=slots.bit_length() - 1, SUMS=SM90.decode_sums.get(name, False),
        REQUESTS=max(32, triton.next_power_of_2(requests)), num_warps=4,
        maxnreg=SM90.decode_registers[name][wide],
    )  # fmt: skip
