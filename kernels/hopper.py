"""What the Hopper kernels share: operand unpacking in registers, the score of an accumulator, and launch choices.

Written in Gluon, Triton's language with explicit layouts, because here the layouts are the point: an 8- or 4-bit key is
widened in the registers in which the tensor core wants it, and nothing passes through shared memory twice. These
kernels exist for sm_90 only and cannot be interpreted; `logits` takes its plain kernels everywhere else, and a test
on the device holds both to the same naive result.

A dot is a sum over dims, so any order of dims will do if both operands have it. `widen_e4m3` leaves a key's dims in the
order in which its bytes lie in the registers, and `byte_of_place` tells the query side that order; `unpack_e2m1` serves
both sides.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed between triton 3.6 and 3.7

KEYS = gl.constexpr(64)
"""Keys of one product: the rows of one warpgroup instruction, and of one page."""
_KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)

# Two words of four e4m3 codes each -> four fp16 pairs (code j of the first word, code j of the second). Exact: every
# e4m3 number is an fp16 number, NaN stays NaN.
_WIDEN = gl.constexpr(
    """{
    .reg .b32 t;
    .reg .b16 low, high;
    prmt.b32 t, $4, $5, 0x5140;
    mov.b32 {low, high}, t;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    prmt.b32 t, $4, $5, 0x7362;
    mov.b32 {low, high}, t;
    cvt.rn.f16x2.e4m3x2 $2, low;
    cvt.rn.f16x2.e4m3x2 $3, high;
    }"""
)


def _lookup_asm(words: int, finish: str) -> str:
    """`words` words of eight e2m1 codes each -> their values by byte permutation, the eight magnitudes in a table.

    A permutation takes three bits of a selector's nibble for one of eight bytes, so the table (two words, $T and $U,
    as they are numbered below) turns four codes at once; two more permutations spread the sign bits. `finish` writes
    what four bytes (lo: codes 0..3, hi: codes 4..7 of word w) become, with {d} the first output register.
    """
    per_word = finish.count("{d")
    lines = [".reg .b32 m, lo, hi, s;"]
    for w in range(words):
        word, low, high = (f"${words * per_word + part * words + w}" for part in range(3))
        lines += [
            f"and.b32 m, {word}, 0x77777777;",
            f"prmt.b32 lo, {low}, {high}, m;",
            "shr.u32 m, m, 16;",
            f"prmt.b32 hi, {low}, {high}, m;",
            f"shl.b32 m, {word}, 4;",
            f"prmt.b32 s, m, {word}, 0xD9C8;",
            "lop3.b32 lo, s, 0x80808080, lo, 0xEA;",
            f"prmt.b32 s, m, {word}, 0xFBEA;",
            "lop3.b32 hi, s, 0x80808080, hi, 0xEA;",
            finish.format(**{f"d{i}": f"${per_word * w + i}" for i in range(per_word)}),
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_TO_E4M3 = gl.constexpr(_lookup_asm(4, "mov.b32 {d0}, lo; mov.b32 {d1}, hi;"))
_TO_FP16 = gl.constexpr(
    _lookup_asm(
        2,
        "prmt.b32 {d0}, lo, 0, 0x1404; prmt.b32 {d1}, lo, 0, 0x3424; "
        "prmt.b32 {d2}, hi, 0, 0x1404; prmt.b32 {d3}, hi, 0, 0x3424;",
    )
)
_LARGER = gl.constexpr("max.u16x2 $0, $1, $2;")


@gluon.constexpr_function
def word_layout(words):
    """Registers of [64, words] int32: a thread holds the words c, c + 4, c + 8 .. of its two keys, c its lane % 4."""
    registers = [[0, 4 << i] for i in range((words // 4).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*registers, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, words])


@gluon.jit
def widen_e4m3(words, operand: gl.constexpr):
    """[64, 32] words of e4m3 -> fp16 [64, 128], the left operand of a product; dims as `byte_of_place`."""
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,=r,=r,r,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=2
    )
    x = gl.join(gl.join(b0, b2), gl.join(b1, b3)).reshape([64, 4, 2, 4, 2, 2])
    x = x.permute([0, 1, 4, 5, 3, 2]).reshape([64, 128])
    return gl.convert_layout(x, operand, assert_trivial=True)


@gluon.constexpr_function
def block_layout():
    """Registers of [64, 16] int32, packed e2m1: a thread holds the four words of one block of each of its two keys."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 16])


@gluon.jit
def largest_byte(scale):
    """The largest of the four bytes of each int32."""
    even, odd = scale & 0x00FF00FF, (scale >> 8) & 0x00FF00FF
    both = gl.inline_asm_elementwise(_LARGER, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return gl.maximum(both & 0xFFFF, both >> 16)


@gluon.jit
def unpack_e2m1(words, scale, largest, tables_ptr, WIDE: gl.constexpr):
    """Packed e2m1, [64, 16] words of `block_layout` -> [64, 128] of e4m3 or (WIDE) fp16, as a left operand lies.

    What comes out is a row over the scale of its largest block, times 2^6 (WIDE: 2^13), with the dims in an order of
    its own: rows unpacked alike can be multiplied. scale: int32 [64], the four ue8m0 bytes of a row, and the largest
    of them, in the slice layout. tables_ptr: int64 [32], a block's eight magnitudes d powers of two below the largest.
    """
    layout: gl.constexpr = words.type.layout
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, layout)) // 4
    below = largest[:, None] - ((scale[:, None] >> (block * 8)[None, :]) & 255)
    table = gl.load(tables_ptr + gl.minimum(below, 31))
    low, high = table.to(gl.int32), (table >> 32).to(gl.int32)
    if WIDE:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _TO_FP16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [words, low, high], dtype=(gl.float16,) * 8,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _TO_E4M3, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [words, low, high],
            dtype=(gl.float8e4nv,) * 8, is_pure=True, pack=4,
        )  # fmt: skip
    x = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    if WIDE:
        x = x.reshape([64, 4, 2, 2, 2, 2, 2]).permute([0, 2, 6, 5, 4, 1, 3])
    else:
        x = x.reshape([64, 4, 4, 2, 2, 2]).permute([0, 5, 4, 3, 1, 2])
    return x.reshape([64, 128])


@gluon.jit
def byte_of_place(place):
    """Which dim of an e4m3 key stands at a place of the operand that `widen_e4m3` makes."""
    word = place // 32 * 8 + place % 2 * 4 + place // 2 % 4
    return word * 4 + place // 16 % 2 * 2 + place // 8 % 2


@gluon.jit
def score_of(acc, gate, factor, ROWS: gl.constexpr, HEADS: gl.constexpr, HALVED: gl.constexpr = False):
    """fp32 [64, ROWS]: sum over heads of gate * relu(product), times the key's factor [64]. relu keeps NaN.

    HALVED: the gates are halved, so that relu can be a sum: the maximum runs on the integer pipe, which may be busy.
    """
    relu = acc + gl.abs(acc) if HALVED else gl.maximum(acc, 0.0, propagate_nan=_KEEP_NAN)
    terms = relu * gate
    score = gl.sum(terms.reshape([64, ROWS, HEADS]), axis=2)
    return score * gl.convert_layout(factor[:, None], score.type.layout)
