"""prefill_sm90: e4m3 queries against e4m3 keys on Hopper, a block of query rows held while the keys stream past.

One program of one warpgroup keeps ROWS x HEADS columns of queries in shared memory as two halves and walks over tiles
of 64 keys that the copy engine brings in, SLOTS tiles ahead. Each half tile is one product of its own accumulator, so
the tensor core works on one half while the other goes through relu, gates and the sum over heads. A second program on
the same multiprocessor fills what is left. All products are waited for before a loop iteration ends: the compiler
serialises accumulators that are in flight across a loop's back edge.

exact: keys and queries are widened to fp16 (which holds every e4m3 number) and added up in fp32 by the tensor core, at
half its rate. Else the fp8 product is taken as it comes, with the narrow accumulator that DeepGEMM accepts too.

Whole tiles are written, also where a row does not see all of a tile; the caller fills in -inf.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

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

from .hopper import KEYS, byte_of_place, cta_barrier, score_of, widen_e4m3, word_layout
from .tuning import SM90, multiprocessors

KEY_LAYOUTS = {
    False: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2),
    True: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2),
}
"""Shared layout of a tile of keys, by exact: fp8 for the tensor core, or words to widen."""
QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def _queries(q_desc, q_ptr, first_row, rows, ROWS: gl.constexpr, HEADS: gl.constexpr, EXACT: gl.constexpr):
    """The block's queries in shared memory, [ROWS * HEADS, 128]; rows beyond the last are zero."""
    COLUMNS: gl.constexpr = ROWS * HEADS
    if EXACT:
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
        dim = byte_of_place(gl.arange(0, 128, layout=gl.SliceLayout(0, layout)))
        held = (first_row + column // HEADS < rows)[:, None]
        place = (first_row.to(gl.int64) * HEADS + column)[:, None] * 128 + dim[None, :]
        smem = gl.allocate_shared_memory(gl.float16, [COLUMNS, 128], gl.NVMMASharedLayout(128, 16))
        smem.store(gl.load(q_ptr + place, mask=held, other=0.0).to(gl.float16))
        fence_async_shared()
        cta_barrier()
    else:
        smem = gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, 128], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        fence_async_shared()
        mbarrier.expect(ready, COLUMNS * 128)
        tma.async_copy_global_to_shared(q_desc, [first_row * HEADS, 0], ready, smem)
        mbarrier.wait(ready, 0)
        mbarrier.invalidate(ready)
    return smem


@gluon.jit
def product(keys, queries, N: gl.constexpr, mma: gl.constexpr):
    """An accumulator of its own, fp32 [64, N], in flight."""
    acc = gl.zeros([64, N], gl.float32, mma)
    return warpgroup_mma(keys, queries, acc, use_acc=False, is_async=True)


@gluon.jit
def operand_of(k_smem, mma: gl.constexpr, EXACT: gl.constexpr):
    """A tile of keys as the left operand of products: in shared memory as it is, or (EXACT) widened."""
    operand = k_smem
    if EXACT:
        operand = widen_e4m3(k_smem.load(word_layout(32)), gl.DotOperandLayout(0, mma, 2))
    return operand


@gluon.jit(do_not_specialize=["out_stride"])
def prefill_sm90_kernel(
    k_desc,
    q_desc,
    q_ptr,
    gate_ptr,
    key_scales_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    rows,
    keys,
    out_stride,
    chunks,
    tiles,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    EXACT: gl.constexpr,
):
    """One program scores `tiles` tiles of keys for ROWS rows. The last keys come first, and among those the last rows,
    which see most of them: so what comes last is short.
    """
    HALF: gl.constexpr = ROWS // 2
    N: gl.constexpr = HALF * HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16 if EXACT else 32])
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)
    row_layout: gl.constexpr = gl.BlockedLayout([ROWS], [32], [4], [0])

    blocks = gl.num_programs(0) // chunks
    block = blocks - 1 - gl.program_id(0) % blocks
    begin = (chunks - 1 - gl.program_id(0) // blocks) * (tiles * KEYS)
    first_row = block * ROWS
    row = first_row + gl.arange(0, ROWS, layout=row_layout)
    start = gl.load(start_ptr + row, mask=row < rows, other=2147483647)
    end = gl.load(end_ptr + row, mask=row < rows, other=0)
    low = gl.maximum(gl.min(start, axis=0) // KEYS * KEYS, begin)
    high = gl.minimum(gl.minimum(gl.max(end, axis=0), begin + tiles * KEYS), keys)
    if low < high:
        k_smem = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, KEYS, k_desc.block_shape[1]], k_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        for i in gl.static_range(SLOTS):
            mbarrier.expect(ready.index(i), KEYS * 128)
            tma.async_copy_global_to_shared(k_desc, [low + i * KEYS, 0], ready.index(i), k_smem.index(i))

        column = gl.arange(0, N, layout=column_layout)
        place = first_row.to(gl.int64) * HEADS + column
        held = first_row + column // HEADS
        gate_a = gl.load(gate_ptr + place, mask=held < rows, other=0.0)[None, :]
        gate_b = gl.load(gate_ptr + place + N, mask=held + HALF < rows, other=0.0)[None, :]
        q_smem = _queries(q_desc, q_ptr, first_row, rows, ROWS, HEADS, EXACT)
        q_a = q_smem.slice(0, N, 0).permute([1, 0])
        q_b = q_smem.slice(N, N, 0).permute([1, 0])
        entry = gl.arange(0, KEYS, layout=gl.SliceLayout(1, mma))

        phase = 0
        for first in range(low, high, SLOTS * KEYS):
            mbarrier.wait(ready.index(0), phase)
            operand = operand_of(k_smem.index(0), mma, EXACT)
            acc_a = product(operand, q_a, N, mma)
            for i in gl.static_range(SLOTS):
                at = first + i * KEYS
                acc_b = product(operand, q_b, N, mma)
                scale = gl.load(key_scales_ptr + at + entry, mask=at + entry < keys, other=1.0)
                done = warpgroup_mma_wait(num_outstanding=1, deps=[acc_a])
                score = score_of(done, gate_a, scale, HALF, HEADS)
                r = gl.arange(0, HALF, layout=gl.SliceLayout(0, score.type.layout))
                e = gl.arange(0, KEYS, layout=gl.SliceLayout(1, score.type.layout))
                to = out_ptr + (first_row + r).to(gl.int64)[None, :] * out_stride + (at + e)[:, None]
                fits = (e < high - at)[:, None]
                gl.store(to, score, mask=(first_row + r < rows)[None, :] & fits)
                if i + 1 < SLOTS:
                    mbarrier.wait(ready.index(i + 1), phase)
                    operand = operand_of(k_smem.index(i + 1), mma, EXACT)
                    acc_a = product(operand, q_a, N, mma)
                    done = warpgroup_mma_wait(num_outstanding=1, deps=[acc_b])
                else:
                    done = warpgroup_mma_wait(num_outstanding=0, deps=[acc_b])
                cta_barrier()  # every warp has read slot i
                mbarrier.expect(ready.index(i), KEYS * 128)
                tma.async_copy_global_to_shared(
                    k_desc, [at + SLOTS * KEYS, 0], ready.index(i), k_smem.index(i)
                )  # beyond the keys: zeros
                score = score_of(done, gate_b, scale, HALF, HEADS)
                below = (first_row + HALF + r < rows)[None, :]
                gl.store(to + HALF * out_stride.to(gl.int64), score, mask=below & fits)
            phase ^= 1
        for i in gl.static_range(SLOTS):
            mbarrier.wait(ready.index(i), phase)
            mbarrier.invalidate(ready.index(i))


def rows_of(heads: int, exact: bool) -> int:
    """Query rows of one program; 0 where this kernel does not run."""
    columns = SM90.prefill_columns[exact]
    fits = heads >= 16 and heads & (heads - 1) == 0 and 2 * heads <= columns
    return columns // heads if fits else 0


def tiles_of(blocks: int, total: int, slots: int) -> int:
    """Tiles of keys of one program, for so many blocks of rows, tiles of keys, and programs that run at a time.

    Few blocks leave multiprocessors idle unless their keys are shared out, and every program costs a start. Which keys
    a row sees is known on the device only, so two times are estimated, in tiles: of rows that all see all keys, which
    go in waves of equal programs, and of causal rows, half the work in ever shorter programs, but no less than the
    longest. The choice is the most tiles whose sum is within 2 % of the least.
    """
    causal = blocks * total / (2 * slots)

    def cost(tiles: int) -> float:
        waves = triton.cdiv(blocks * triton.cdiv(total, tiles), slots)
        return float(waves * (tiles + SM90.prefill_start) + max(tiles, causal))

    costs = {tiles: cost(min(tiles, total)) for tiles in SM90.prefill_tiles}
    return next(tiles for tiles in SM90.prefill_tiles if costs[tiles] <= 1.02 * min(costs.values()))


def descriptors(
    codes: Tensor, keys: Tensor, block: int, exact: bool
) -> tuple[TensorDescriptor, TensorDescriptor, Tensor]:
    """What the copy engine is told about keys [N, 128] and queries [M, H, 128], `block` rows of these at a time; and
    the queries as e4m3 [M * H, 128].
    """
    rows, heads = codes.shape[:2]
    flat = codes.view(torch.float8_e4m3fn).view(rows * heads, 128)
    q_desc = TensorDescriptor(flat, [rows * heads, 128], [128, 1], [block * heads, 128], QUERY_LAYOUT)
    view, width = (keys.view(torch.int32), 32) if exact else (keys.view(torch.float8_e4m3fn), 128)
    k_desc = TensorDescriptor(view, [len(keys), width], [width, 1], [KEYS.value, width], KEY_LAYOUTS[exact])
    return k_desc, q_desc, flat


def prefill_sm90(
    codes: Tensor, gate: Tensor, keys: Tensor, key_scales: Tensor, start: Tensor, end: Tensor, out: Tensor, exact: bool
) -> None:
    """Write scores into `out`, fp32 [M, N]: whole tiles of 64 keys, garbage outside [start, end) of a row.

    codes: e4m3 [M, H, 128]; gate fp32 [M, H]; keys e4m3 [N, 128] and key_scales fp32 [N]; start, end int32 [M]. The
    caller has checked them, `rows_of`, and that codes and keys lie at multiples of 16 bytes.
    """
    rows, heads = codes.shape[:2]
    count, block = len(keys), rows_of(heads, exact)
    blocks, total = triton.cdiv(rows, block), triton.cdiv(count, KEYS.value)
    tiles = tiles_of(blocks, total, SM90.prefill_programs * multiprocessors(keys.device))
    chunks = triton.cdiv(total, tiles)
    k_desc, q_desc, flat = descriptors(codes, keys, block, exact)
    prefill_sm90_kernel[(chunks * blocks,)](
        k_desc, q_desc, flat, gate, key_scales, start, end, out, rows, count, out.stride(0), chunks, tiles,
        HEADS=heads, ROWS=block, SLOTS=SM90.prefill_slots[exact], EXACT=exact, num_warps=4,
    )  # fmt: skip
