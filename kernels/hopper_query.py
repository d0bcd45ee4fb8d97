"""quantise_query on Hopper, for recipes that round to bf16 after RoPE and after Walsh-Hadamard.

Walsh-Hadamard of 128 dims is one of 64, a product on the tensor core, and a butterfly over one bit of the dim, here bit
1: what the product makes of the dims with bit 1 clear, plus or minus what it makes of the others, is the result at the
dims with bit 1 clear, or set. The matrix of 1 and -1 is exact in bf16, and so are queries, unturned or rounded after
RoPE. The two parts of a row are two lines of the operand, eight lines apart: then a thread has both, and 16 bytes of a
row in shared memory are four registers of the operand as they are.

The order of the matrix's lines is free, and chosen so that each thread ends with the dims that it will store, a quarter
of two rows. They stay in pairs, as bf16, that the butterfly makes of one number of either part:

====  ===================================================  =====================================================
e2m1  one block of 32 dims, which has one scale            four words of eight dims from (0 2) (1 3) (4 6) (5 7)
e4m3  16 dims of either half: 16 bytes that lie together   eight words of four dims from (0 2) (1 3)
====  ===================================================  =====================================================

A bf16 over an e2m1 unit is exact in fp16, and with that unit at the smallest normal of fp16 the code is the upper bits
of the pattern, rounded.

Some multiprocessors are 10 % slower than others, with the same work, so programs draw their tiles from a counter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"

from typing import Any

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

from .hopper import cta_barrier
from .rounding import bf16_word, bf16_word_to_fp32, ceil_power_of_two, e4m3_word, fp32_of_bits, larger_magnitude
from .transforms import HADAMARD_NORM, ONE_SIXTH, e4m3_scale, rotate_pairs
from .tuning import SM90, programs

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

_FP16_UNIT = gl.constexpr(2.0**-14)
_TO_FP32 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
_LARGER = gl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
_DRAW = gl.constexpr(
    "{ .reg .pred first; setp.eq.u32 first, $1, 0; @first atom.relaxed.gpu.global.inc.u32 $0, [$2], $3; }"
)
_UNIFORM = gl.constexpr("redux.sync.max.s32 $0, $1, 0xFFFFFFFF;")


def _e2m1_asm(ties_down: bool) -> str:
    """bf16 pairs (0 2), (1 3), (4 6), (5 7) and the inverse scale times 2^-14 -> a word of eight e2m1 codes."""
    lines = [".reg .b32 low, high, even, odd, r0, r1, r2, r3;"]
    for w in range(4):
        lines += [
            f"shl.b32 low, ${w + 1}, 16;",
            f"and.b32 high, ${w + 1}, 0xFFFF0000;",
            "mul.rn.f32 low, low, $5;",
            "mul.rn.f32 high, high, $5;",
            f"cvt.rn.f16x2.f32 r{w}, high, low;",
        ]
        if not ties_down:  # half a unit, but less by one bit if the code is even
            lines += [f"shr.u32 low, r{w}, 9;", "and.b32 low, low, 0x00010001;", f"add.u32 r{w}, r{w}, low;"]
        lines.append(f"add.u32 r{w}, r{w}, 0x00FF00FF;")
    lines += [
        "prmt.b32 even, r0, r2, 0x7531;",  # bytes: a sign, three zeros, three bits of magnitude, a remainder
        "prmt.b32 odd, r1, r3, 0x7531;",
        "shl.b32 r0, odd, 4;",
        "lop3.b32 r0, even, r0, 0x0F0F0F0F, 0xE4;",
        "shr.u32 r0, r0, 1;",
        "shr.u32 r1, even, 4;",
        "lop3.b32 r1, r1, odd, 0x0F0F0F0F, 0xE4;",
        "lop3.b32 $0, r0, 0x77777777, r1, 0xEA;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


_TO_E2M1 = gl.constexpr(_e2m1_asm(False))
_TO_E2M1_DOWN = gl.constexpr(_e2m1_asm(True))


@gluon.constexpr_function
def pair_layout(rows):
    """Registers of [rows / 16, 16, 32, 2]: a thread holds 8 pairs in a row of two rows."""
    registers = [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 8, 0, 0]]
    lanes = [[0, 0, 8, 0], [0, 0, 16, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = [[1 << i, 0, 0, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows // 16, 16, 32, 2])


@gluon.constexpr_function
def row_layout(rows, run, columns):
    """Registers of [rows, columns]: a thread holds `run` columns in a row, every 4 * run of them, of two rows."""
    registers = [[0, 1 << i] for i in range(run.bit_length() - 1)]
    registers += [[0, 4 * run << i] for i in range((columns // (4 * run)).bit_length() - 1)]
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([*registers, [8, 0]], lanes, warps, [], [rows, columns])


@gluon.constexpr_function
def matrix_layout():
    """Registers of [64, 32] int32: half a line a thread."""
    lanes = [[0, 16], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1 << i] for i in range(4)], lanes, [[16, 0], [32, 0]], [], [64, 32])


@gluon.constexpr_function
def thread_layout():
    """Registers of [128]: one for each thread."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def _matrix(FMT: gl.constexpr):
    """bf16 [64, 64] of 1 and -1: one line a column of the result, one column a place of the operand, both without bit 1
    of their dims.

    Column 8 j + 2 q + b of the result is number 2 j + b of a thread q. Word 8 s + 4 h + q of the operand holds two dims
    from 64 (s / 2) + 16 q + 8 (s % 2) + 4 h on.
    """
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, matrix_layout()))
    j, q, b = n // 8, n // 2 % 4, n % 2
    dim = 32 * q + 4 * j + b if FMT == "e2m1" else 64 * (j // 4) + 16 * q + 4 * (j % 4) + b
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, matrix_layout()))
    place = (64 * (word // 16) + 16 * (word % 4) + 8 * (word // 8 % 2) + 4 * (word // 4 % 2))[None, :]
    ones = (0x3F80_3F80 | dim << 31)[:, None]
    for i in gl.static_range(2, 7):
        odd = ((dim >> i & 1) * -0x7FFF_8000)[:, None]
        ones = gl.where(place >> i & 1 == 0, ones, ones ^ odd)
    return _bf16_of(ones).reshape([64, 64])


@gluon.jit
def _bf16_of(words):
    """Pairs of bf16, int32 [..] -> bf16 [.., 2]."""
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.join(a, b)


@gluon.jit
def _larger(a, b):
    """Larger magnitudes of two pairs of bf16, under any sign; NaN if one is."""
    return gl.inline_asm_elementwise(_LARGER, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _amax_of(pairs):
    """The larger magnitude of a pair of bf16, fp32."""
    return (_larger(pairs, pairs >> 16) << 16 & 0x7FFF_0000).to(gl.float32, bitcast=True)


@gluon.jit
def _quarters(x):
    """[.., 4, n] -> four of [.., n]."""
    x = x.reshape([x.shape[0], x.shape[1], 2, 2, x.shape[3]]).permute([0, 1, 4, 2, 3])
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _quantise_e2m1(words, amax_floor, TIES_DOWN: gl.constexpr):
    """Words [rows, 16, 4] of a block a thread -> codes int32 [rows, 4 blocks, 4] and scale bytes [rows, 4]."""
    rows: gl.constexpr = words.shape[0]
    amax = _amax_of(gl.reduce(words, 1, _larger))
    byte = ceil_power_of_two(larger_magnitude(amax, amax_floor) * ONE_SIXTH)
    factor = fp32_of_bits((254 - byte) << 23) * _FP16_UNIT  # of byte 255 no number, but its codes are 0
    w0, w1, w2, w3 = _quarters(words.reshape([rows, 4, 4, 4]))
    layout: gl.constexpr = w0.type.layout
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout), assert_trivial=True)[:, None, :]
    poisoned = gl.convert_layout(byte == 255, gl.SliceLayout(1, layout), assert_trivial=True)[:, None, :]
    codes = gl.inline_asm_elementwise(
        _TO_E2M1_DOWN if TIES_DOWN else _TO_E2M1, "=r,r,r,r,r,f", [w0, w1, w2, w3, factor], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.where(poisoned, 0, codes).permute([0, 2, 1]), byte


@gluon.jit
def _quantise_e4m3(words, amax_floor, POWER_OF_TWO: gl.constexpr):
    """Words [rows, 16, 4] -> codes int32 [rows, 2, 4, 4] and scale fp32 [rows]."""
    rows: gl.constexpr = words.shape[0]
    amax = _amax_of(gl.reduce(gl.reduce(words, 1, _larger), 1, _larger))
    scale, inverse = e4m3_scale(amax, amax_floor, POWER_OF_TWO)
    w0, w1 = gl.split(words.reshape([rows, 8, 2, 4]).permute([0, 1, 3, 2]))
    x0, x2 = bf16_word_to_fp32(w0)
    x1, x3 = bf16_word_to_fp32(w1)
    whole: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, x0.type.layout))
    inverse = gl.convert_layout(inverse, whole, assert_trivial=True)[:, None, None]
    codes = e4m3_word(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    return codes.reshape([rows, 2, 4, 4]).permute([0, 1, 3, 2]), scale


@gluon.jit
def _angles(cos_ptr, sin_ptr, tile, tokens, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """cos and sin of a tile, fp32 [ROWS / 16, 1, 32]; past the end the last token's."""
    pairs: gl.constexpr = gl.SliceLayout(3, pair_layout(ROWS))
    layout: gl.constexpr = gl.SliceLayout(1, pairs)
    group = gl.arange(0, ROWS // 16, layout=gl.SliceLayout(1, layout))
    token = gl.minimum((tile * (ROWS // 16) + group) // (HEADS // 16), tokens - 1)
    at = token.to(gl.int64)[:, None] * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(cos_ptr + at)[:, None, :], gl.load(sin_ptr + at)[:, None, :]


@gluon.jit
def _turned(x, cos, sin, ROWS: gl.constexpr):
    """RoPE of bf16 [ROWS, 64] -> pairs, fp32 [ROWS / 16, 16, 32] each."""
    x = gl.inline_asm_elementwise(_TO_FP32, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    a, b = gl.split(gl.convert_layout(x.reshape([ROWS // 16, 16, 32, 2]), pair_layout(ROWS), assert_trivial=True))
    return rotate_pairs(a, b, cos, sin)


@gluon.jit
def _operand(still, words, ROWS: gl.constexpr, operand: gl.constexpr):
    """bf16 [ROWS, 64] unturned and pairs, int32 [ROWS / 16, 16, 32] -> bf16 [2 ROWS, 64] in the order of `_matrix`.

    Lines are ordered by bit 3 of the row, the row / 16, bit 1 of the dim, the row % 8: a warp has its 16 rows.
    """
    turning = gl.convert_layout(_bf16_of(words).reshape([ROWS, 64]), row_layout(ROWS, 16, 64), assert_trivial=True)
    x = gl.join(still, turning).reshape([ROWS // 16, 2, 8, 4, 2, 2, 2, 2, 2]).permute([1, 0, 6, 2, 8, 4, 5, 3, 7])
    return gl.convert_layout(x.reshape([2 * ROWS, 64]), operand, assert_trivial=True)


@gluon.jit
def _butterfly(acc, ROWS: gl.constexpr):
    """fp32 [2 ROWS, 64], lines as `_operand` -> words of two bf16, bit 1 of the dim clear and set: [ROWS, 16, 4]."""
    a, b = gl.split(acc.reshape([2, ROWS // 16, 2, 8, 64]).permute([1, 0, 3, 4, 2]))
    a, b = a.reshape([ROWS, 64]), b.reshape([ROWS, 64])
    words = bf16_word((a + b) * HADAMARD_NORM, (a - b) * HADAMARD_NORM)
    return words.reshape([ROWS, 8, 4, 2]).permute([0, 1, 3, 2]).reshape([ROWS, 16, 4])


@gluon.jit
def _draw(counter_ptr, last):
    """The next ticket, int32 [128], in thread 0 only; the one after `last` is 0 again."""
    thread = gl.arange(0, 128, layout=thread_layout())
    at = counter_ptr.to(gl.int64) + gl.zeros_like(thread)
    return gl.inline_asm_elementwise(
        _DRAW, "=r,r,l,r", [thread, at, last + gl.zeros_like(thread)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _first_of(box):
    """The first of int32 [128] in shared memory as a scalar, known to be the same in all threads of a warp."""
    x = box.slice(0, 1).load(thread_layout())
    return gl.max(gl.inline_asm_elementwise(_UNIFORM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1), 0)


@gluon.jit
def quantise_query_sm90_kernel(
    q_desc,
    gate_ptr,
    cos_ptr,
    sin_ptr,
    codes_ptr,
    scales_ptr,
    gate_out_ptr,
    counter_ptr,
    rows,
    gate_scale,
    amax_floor,
    FMT: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    TIES_DOWN: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Programs, at most as many as tiles, draw tiles of ROWS rows of q viewed as [T * H, 128]; codes are int32 words.

    A program begins with the tile of its number; ticket t is tile num_programs + t. It draws a ticket before its first
    tile and in each, num_programs + tiles in all, after which the counter is 0 again for the next launch. While it
    quantises a tile the next is on its way; several programs on a multiprocessor hide each other's waiting.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    half: gl.constexpr = row_layout(ROWS, 16, 64)
    WIDTH: gl.constexpr = 16 if FMT == "e2m1" else 32
    words_of: gl.constexpr = row_layout(ROWS, 4, WIDTH)
    tiles = (rows + ROWS - 1) // ROWS
    tokens = rows // HEADS
    last = gl.num_programs(0) + tiles - 1
    q = gl.allocate_shared_memory(gl.bfloat16, [ROWS, 128], q_desc.layout)
    matrix = gl.allocate_shared_memory(gl.bfloat16, [64, 64], q_desc.layout)
    box = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    tile = gl.program_id(0)
    mbarrier.expect(ready, ROWS * 256)
    tma.async_copy_global_to_shared(q_desc, [tile * ROWS, 0], ready, q)
    ticket = _draw(counter_ptr, last)
    cos, sin = _angles(cos_ptr, sin_ptr, tile, tokens, HEADS, ROWS)
    matrix.store(_matrix(FMT))
    fence_async_shared()
    cta_barrier()
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, words_of))
    phase = 0
    while tile < tiles:
        first = tile.to(gl.int64) * ROWS
        inside = line < rows - tile * ROWS
        mbarrier.wait(ready, phase)
        still, turning = q.slice(0, 64, 1).load(half), q.slice(64, 64, 1).load(half)
        gate = gl.load(gate_ptr + first + line, mask=inside, other=0.0)
        a, b = _turned(turning, cos, sin, ROWS)
        x = _operand(still, bf16_word(a, b), ROWS, operand)
        acc = gl.zeros([2 * ROWS, 64], gl.float32, mma)
        acc = warpgroup_mma(x, matrix.permute([1, 0]), acc, use_acc=False, is_async=True)
        box.store(ticket)
        # here, where the angles of the next tile are not under way yet: the fence waits for every load before it
        fence_async_shared()
        cta_barrier()  # every warp has read the tile
        tile = gl.num_programs(0) + _first_of(box)
        if tile < tiles:
            mbarrier.expect(ready, ROWS * 256)
            tma.async_copy_global_to_shared(q_desc, [tile * ROWS, 0], ready, q)
        ticket = _draw(counter_ptr, last)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        cos, sin = _angles(cos_ptr, sin_ptr, tile, tokens, HEADS, ROWS)
        words = _butterfly(acc, ROWS)
        gate = gate.to(gl.float32) * gate_scale
        if FMT == "e2m1":
            codes, scale = _quantise_e2m1(words, amax_floor, TIES_DOWN)
            block: gl.constexpr = scale.type.layout
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, block))[:, None]
            to = scales_ptr + first * 4 + (row * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, block))[None, :])
            gl.store(to, scale.to(gl.uint8), mask=row < rows - first)
        else:
            codes, scale = _quantise_e4m3(words, amax_floor, POWER_OF_TWO)
            scale = gl.convert_layout(scale, gl.SliceLayout(1, words_of), assert_trivial=True)
            gl.store(scales_ptr + first + line, scale, mask=inside)
            gate = gate * scale
        gl.store(gate_out_ptr + first + line, gate, mask=inside)
        codes = gl.convert_layout(codes.reshape([ROWS, WIDTH]), words_of, assert_trivial=True)
        column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, words_of))
        to = codes_ptr + first * WIDTH + (line[:, None] * WIDTH + column[None, :])
        gl.store(to, codes, mask=inside[:, None])
        phase ^= 1
    mbarrier.invalidate(ready)


_counters: dict[tuple[int, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """int32 [1], 0 whenever a launch begins.

    Launches of one stream come one after the other and each leaves it at 0, so a stream keeps its counter. A graph has
    its own: it may be replayed beside the stream that captured it.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


def runs(heads: int, recipe: dict[str, Any]) -> bool:
    """Whether this kernel takes such queries in e4m3 or e2m1, by a recipe's constants for the plain kernel: the 16 rows
    of a warp need the same angles.
    """
    rounded = recipe["HADAMARD"] and recipe["ROUND_ROPE"] and recipe["ROUND_HADAMARD"]
    return heads % 16 == 0 and rounded and not recipe["FP4_STEP"]


def quantise_query_sm90(
    q: Tensor, gate: Tensor, cos: Tensor, sin: Tensor, gate_scale: float, fmt: str, power_of_two: bool,
    amax_floor: float, ties_down: bool, codes: Tensor, scales: Tensor, gate_out: Tensor,
) -> None:  # fmt: skip
    """Fill codes, scales and gate_out of e4m3 or e2m1 queries; arguments as `quantise_query` has checked them, q at a
    multiple of 16 bytes.
    """
    rows = q.shape[0] * q.shape[1]
    tile = 16 * SM90.query_warps
    quantise_query_sm90_kernel[(programs(q.device, SM90.query_programs, triton.cdiv(rows, tile)),)](
        TensorDescriptor(q.view(rows, 128), [rows, 128], [128, 1], [tile, 128], LAYOUT),
        gate, cos, sin, codes.view(torch.int32), scales, gate_out, _counter(q.device), rows, gate_scale, amax_floor,
        FMT=fmt, POWER_OF_TWO=power_of_two, TIES_DOWN=ties_down, HEADS=gate.shape[1],
        ROWS=tile, num_warps=SM90.query_warps, maxnreg=SM90.query_registers,
        enable_fp_fusion=False,
    )  # fmt: skip
