"""select_sm90: prefill selection of e4m3 keys on Hopper in one launch, scores and lists side by side.

A program takes ROWS query rows at a time and walks over all keys that they see, one product of one accumulator a tile
of 64 keys. After every SEGMENT keys it reads the segment's scores back from a buffer of its own (which stays in the L2
cache) and appends what can still win to each row's list: `topk`'s algorithm, all rows in step. Several programs on a
multiprocessor share the tensor cores: while one reduces, merges or waits, others multiply. So scores exist for
programs x ROWS x SEGMENT pairs at a time, and no program waits for another.

Rows are dealt out longest first, back and forth, so that programs end up with like amounts of work.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .hopper import KEYS, byte_of_place, cta_barrier, score_of
from .hopper_prefill import descriptors, operand_of, product
from .order import LOWEST, NAN
from .tuning import SM90, multiprocessors, programs

TILE = 512
"""Scores of a row that are looked at together."""
LONGEST_LIST = 2048
"""Most keys of a list: k and a tile have to fit."""

_LOWEST = gl.constexpr(LOWEST.value)
_NAN = gl.constexpr(NAN.value)
_MINUS_INF = gl.constexpr(-0x7F80_0001)
_MANY = gl.constexpr(1 << 20)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _order(bits):
    """`order.order_keys` of the bits of scores."""
    key = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = gl.where((bits & 0x7FFFFFFF) == 0, 0, key)
    return gl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, key)


@gluon.jit
def _score(key):
    """The number with such a key."""
    bits = gl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return gl.where(key <= _NAN, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _row_offset(count, width):
    """width * (first row of this program + 0, 1 ..), [ROWS, 1]; computed where it stands.

    The compiler would compute it, and whatever follows from it, before the loops, and keep all of that in registers
    that the products need.
    """
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1)
    row = gl.program_id(0) * count.shape[0] + gl.arange(0, count.shape[0], layout=count.type.layout)
    return (row * width + zero * 16)[:, None]


@gluon.jit
def _once_more(held_ptr, list_ptr, count, LIST: gl.constexpr):
    """The rows' lists, for long ones computed anew: a thread would spill its addresses from one access to the next."""
    if LIST > 1024:
        held_ptr = list_ptr + _row_offset(count, 2 * LIST)
    return held_ptr


@gluon.jit
def _shrink(list_ptr, count, limit, k, LIST: gl.constexpr, layout: gl.constexpr):
    """Shrink every list of more than k scores, none below its row's limit, to its k best, in order; returns all counts
    and limits. list_ptr: the lists of all programs as words, a score and its column in turn.
    """
    cta_barrier()  # other threads stored the lists
    held_ptr = list_ptr + _row_offset(count, 2 * LIST)
    place = gl.arange(0, LIST, layout=gl.SliceLayout(0, layout))[None, :]
    there = (place < count[:, None]) & (count > k)[:, None]
    held = gl.where(there, _order(gl.load(held_ptr + 2 * place, mask=there, other=0)), _LOWEST)
    high = gl.max(held, axis=1)
    low = gl.min(gl.where(there, held, 0x7FFFFFFF), axis=1)
    # k keys or more are >= low and fewer than k are > high; in the end low is the k-th key or parts k from the others
    for _ in range(8):
        if gl.max((low < high).to(gl.int32), axis=0) > 0:
            for _ in range(4 + (k >> 30)):  # four, but not known when compiled: unrolled, this would spill
                middle = (low | high) - ((low ^ high) >> 1)  # mean rounded up, without overflow
                number = gl.sum((held >= middle[:, None]).to(gl.int32), axis=1)
                high = gl.where(number > k, high, gl.where(number == k, middle, middle - 1))
                low = gl.where(number >= k, middle, low)
    above = (held > low[:, None]).to(gl.int32)
    wanted = k - gl.sum(above, axis=1)  # of the keys equal to low
    sums = gl.associative_scan(above + ((held == low[:, None]).to(gl.int32) << 16), 1, _add)
    rank = sums >> 16  # from 1, among equals
    kept = there & ((held > low[:, None]) | ((held == low[:, None]) & (rank <= wanted[:, None])))
    target = 2 * ((sums & 0xFFFF) + gl.minimum(rank, wanted[:, None]) - 1)
    cta_barrier()  # every thread has read
    held_ptr = _once_more(held_ptr, list_ptr, count, LIST)
    gl.store(held_ptr + target, _score(held).to(gl.int32, bitcast=True), mask=kept)
    held_ptr = _once_more(held_ptr, list_ptr, count, LIST)
    column = gl.load(held_ptr + 2 * place + 1, mask=there, other=0)
    held_ptr = _once_more(held_ptr, list_ptr, count, LIST)
    cta_barrier()
    gl.store(held_ptr + target + 1, column, mask=kept)
    # a limit below -inf, as NaN, is no number to compare with: the row stays open
    return gl.where(count > k, k, count), gl.where((count > k) & (low >= _MINUS_INF), low, limit)


@gluon.jit
def _merge(work_ptr, list_ptr, pairs_ptr, count, limit, start, end, segment, stop, k, SEGMENT: gl.constexpr,
           TILE: gl.constexpr, LIST: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Append a segment's scores that can still win to the lists; returns counts and limits.

    work_ptr, pairs_ptr: scores and lists (a list as pairs of words) of all programs. A later column loses against an
    equal score, so the limit has to be passed.
    """
    tile = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))[None, :]
    work_ptr += _row_offset(count, SEGMENT)
    pairs_ptr += _row_offset(count, LIST)
    latest = gl.max(start, axis=0)
    earliest = gl.min(end, axis=0)
    above = _score(limit)
    following = gl.load(work_ptr + tile)
    for at in range(0, stop - segment, TILE):
        first = segment + at
        x = following
        following = gl.load(work_ptr + gl.minimum(at + TILE, SEGMENT - TILE) + tile)
        wins = (x > above[:, None]) | (limit == _LOWEST)[:, None]
        if (first < latest) | (first + TILE > earliest):
            wins = wins & (first + tile >= start[:, None]) & (first + tile < end[:, None])
        fresh = gl.sum(wins.to(gl.int32), axis=1)
        most = gl.max(fresh + (count + fresh > LIST).to(gl.int32) * _MANY, axis=0)
        if most >= _MANY:
            count, limit = _shrink(list_ptr, count, limit, k, LIST, layout)
            above = _score(limit)
            wins = wins & ((x > above[:, None]) | (limit == _LOWEST)[:, None])
            fresh = gl.sum(wins.to(gl.int32), axis=1)
        if most > 0:
            place = count[:, None] + gl.associative_scan(wins.to(gl.int32), 1, _add) - 1
            column = (first + tile + gl.zeros_like(place)).to(gl.int64) << 32
            gl.store(pairs_ptr + place, column | (x.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF), mask=wins)
            count += fresh
    return count, limit


@gluon.jit(do_not_specialize=["blocks"])
def select_sm90_kernel(
    k_desc,
    q_desc,
    q_ptr,
    gate_ptr,
    key_scales_ptr,
    start_ptr,
    end_ptr,
    work_ptr,
    list_ptr,
    pairs_ptr,
    out_ptr,
    rows,
    keys,
    k,
    blocks,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    EXACT: gl.constexpr,
    SEGMENT: gl.constexpr,
    TILE: gl.constexpr,
    LIST: gl.constexpr,
):
    """One program selects for blocks of ROWS rows, one block after the other; SEGMENT is a multiple of TILE and of
    SLOTS tiles of keys."""
    N: gl.constexpr = ROWS * HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16 if EXACT else 32])
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)
    row_layout: gl.constexpr = gl.BlockedLayout([ROWS], [32], [4], [0])
    list_layout: gl.constexpr = gl.BlockedLayout([1, TILE * ROWS // 128], [1, 32], [ROWS, 4 // ROWS], [1, 0])
    list_row: gl.constexpr = gl.SliceLayout(1, list_layout)

    k_smem = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, KEYS, k_desc.block_shape[1]], k_desc.layout)
    if EXACT:
        q_smem = gl.allocate_shared_memory(gl.float16, [N, 128], gl.NVMMASharedLayout(128, 16))
    else:
        q_smem = gl.allocate_shared_memory(gl.float8e4nv, [N, 128], q_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    cta_barrier()
    queries = q_smem.permute([1, 0])

    r = gl.arange(0, ROWS, layout=list_row)
    scores_ptr = work_ptr + gl.program_id(0) * (ROWS * SEGMENT)
    slot = gl.arange(0, TILE, layout=gl.SliceLayout(0, list_layout))[None, :]

    phase = 0
    q_phase = 0
    for dealt in range(0, blocks, gl.num_programs(0)):
        back = dealt // gl.num_programs(0) % 2 == 1
        place = gl.num_programs(0) - 1 - gl.program_id(0) if back else gl.program_id(0)
        block = blocks - 1 - dealt - place
        if block >= 0:
            first_row = block * ROWS
            row = first_row + gl.arange(0, ROWS, layout=row_layout)
            lowest = gl.min(gl.load(start_ptr + row, mask=row < rows, other=2147483647), axis=0)
            highest = gl.max(gl.load(end_ptr + row, mask=row < rows, other=0), axis=0)
            low = gl.maximum(lowest, 0) // KEYS * KEYS
            high = gl.minimum(highest, keys)
            count = gl.zeros([ROWS], gl.int32, list_row)
            limit = gl.full([ROWS], _LOWEST, gl.int32, list_row)
            if low < high:
                for i in gl.static_range(SLOTS):
                    mbarrier.expect(ready.index(i), KEYS * 128)
                    tma.async_copy_global_to_shared(k_desc, [low + i * KEYS, 0], ready.index(i), k_smem.index(i))
                if EXACT:
                    q_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
                    column = gl.arange(0, N, layout=gl.SliceLayout(1, q_layout))
                    dim = byte_of_place(gl.arange(0, 128, layout=gl.SliceLayout(0, q_layout)))
                    held = (first_row + column // HEADS < rows)[:, None]
                    at_q = (first_row.to(gl.int64) * HEADS + column)[:, None] * 128 + dim[None, :]
                    q_smem.store(gl.load(q_ptr + at_q, mask=held, other=0.0).to(gl.float16))
                    fence_async_shared()
                    cta_barrier()
                else:
                    mbarrier.expect(ready.index(SLOTS), N * 128)
                    tma.async_copy_global_to_shared(q_desc, [first_row * HEADS, 0], ready.index(SLOTS), q_smem)
                    mbarrier.wait(ready.index(SLOTS), q_phase)
                    q_phase ^= 1
                for segment in range(low, high, SEGMENT):
                    stop = gl.minimum(segment + SEGMENT, high)
                    # loaded for every segment: while lists are merged, they need no registers
                    head = gl.arange(0, N, layout=column_layout)
                    at_gate = first_row.to(gl.int64) * HEADS + head
                    whose = first_row + head // HEADS
                    gate = gl.load(gate_ptr + at_gate, mask=whose < rows, other=0.0)[None, :]
                    entry = gl.arange(0, KEYS, layout=gl.SliceLayout(1, mma))
                    for first in range(segment, stop, SLOTS * KEYS):
                        for i in gl.static_range(SLOTS):
                            at = first + i * KEYS
                            mbarrier.wait(ready.index(i), phase)
                            acc = product(operand_of(k_smem.index(i), mma, EXACT), queries, N, mma)
                            scale = gl.load(key_scales_ptr + at + entry, mask=at + entry < keys, other=1.0)
                            done = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
                            cta_barrier()  # every warp has read the slot
                            mbarrier.expect(ready.index(i), KEYS * 128)
                            tma.async_copy_global_to_shared(
                                k_desc, [at + SLOTS * KEYS, 0], ready.index(i), k_smem.index(i)
                            )  # beyond the keys: zeros
                            score = score_of(done, gate, scale, ROWS, HEADS)
                            h = gl.arange(0, ROWS, layout=gl.SliceLayout(0, score.type.layout))
                            e = gl.arange(0, KEYS, layout=gl.SliceLayout(1, score.type.layout))
                            gl.store(scores_ptr + h[None, :] * SEGMENT + (at - segment + e)[:, None], score)
                        phase ^= 1
                    cta_barrier()  # the segment's scores are there
                    real = first_row + r < rows
                    start = gl.load(start_ptr + first_row + r, mask=real, other=0)
                    end = gl.minimum(gl.load(end_ptr + first_row + r, mask=real, other=0), keys)
                    count, limit = _merge(work_ptr, list_ptr, pairs_ptr, count, limit, start, end, segment, stop,
                                          k, SEGMENT, TILE, LIST, list_layout)  # fmt: skip
                    cta_barrier()  # and have been read
                for i in gl.static_range(SLOTS):
                    mbarrier.wait(ready.index(i), phase)
                phase ^= 1
            if gl.max(count, axis=0) > k:
                count, limit = _shrink(list_ptr, count, limit, k, LIST, list_layout)
            cta_barrier()  # other threads stored the lists
            real = first_row + r < rows
            to_row = out_ptr + (first_row + r).to(gl.int64)[:, None] * k
            winner_ptr = list_ptr + _row_offset(count, 2 * LIST) + 1
            for first in range(0, k, TILE):
                column = gl.load(winner_ptr + 2 * (first + slot), mask=first + slot < count[:, None], other=-1)
                gl.store(to_row + first + slot, column, mask=(first + slot < k) & real[:, None])
            cta_barrier()  # the lists may be used again
    for i in gl.static_range(SLOTS + 1):
        mbarrier.invalidate(ready.index(i))


def list_size(k: int) -> int:
    """Keys of a list: a power of two that holds k and a tile."""
    return 1 << (k + TILE - 1).bit_length()


def rows_of(heads: int) -> int:
    """Query rows of one program."""
    return SM90.select_columns // heads


def runs(rows: int, heads: int, k: int, device: torch.device) -> bool:
    """Whether this kernel takes such a problem: a list has room for a tile, and every multiprocessor has rows."""
    block = rows_of(heads)
    return block in (2, 4) and list_size(k) <= LONGEST_LIST and rows >= 2 * block * multiprocessors(device)


def select_sm90(
    codes: Tensor, gate: Tensor, keys: Tensor, key_scales: Tensor, start: Tensor, end: Tensor, k: int, out: Tensor,
    exact: bool,
) -> None:  # fmt: skip
    """Write the selection into `out`, int32 [M, k]; arguments as `select` has checked them, and `runs` holds."""
    rows, heads = codes.shape[:2]
    block, size, segment = rows_of(heads), list_size(k), SM90.select_segment
    blocks = triton.cdiv(rows, block)
    count = programs(keys.device, SM90.select_programs[exact], blocks)
    work = torch.empty(count * block, segment, dtype=torch.float32, device=keys.device)
    lists = torch.empty(count * block, size, 2, dtype=torch.int32, device=keys.device)
    k_desc, q_desc, flat = descriptors(codes, keys, block, exact)
    select_sm90_kernel[(count,)](
        k_desc, q_desc, flat, gate, key_scales, start, end, work, lists, lists.view(torch.int64), out, rows, len(keys),
        k, blocks, HEADS=heads, ROWS=block, SLOTS=2, EXACT=exact, SEGMENT=segment, TILE=TILE, LIST=size, num_warps=4,
        maxnreg=SM90.select_registers[exact],
    )  # fmt: skip
