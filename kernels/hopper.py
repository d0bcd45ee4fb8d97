"""What the Hopper kernels share: operand unpacking in registers, the score of an accumulator, and launch choices.

Written in Gluon, Triton's language with explicit layouts, because here the layouts are the point: an 8- or 4-bit key is
widened in the registers in which the tensor core wants it, and nothing passes through shared memory twice. These
kernels exist for sm_90 only and cannot be interpreted; `logits` takes its plain kernels everywhere else, and a test
on the device holds both to the same naive result.

A dot is a sum over dims, so any order of dims will do if both operands have it. `widen_e4m3` leaves a key's dims in the
order in which its bytes lie in the registers, and `byte_of_place` tells the query side that order.
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


@gluon.jit
def byte_of_place(place):
    """Which dim of an e4m3 key stands at a place of the operand that `widen_e4m3` makes."""
    word = place // 32 * 8 + place % 2 * 4 + place // 2 % 4
    return word * 4 + place // 16 % 2 * 2 + place // 8 % 2


@gluon.jit
def sum_heads(terms, factor, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """fp32 [64, ROWS]: sum over heads of [64, ROWS * HEADS], times the key's factor [64]."""
    score = gl.sum(terms.reshape([64, ROWS, HEADS]), axis=2)
    return score * gl.convert_layout(factor[:, None], score.type.layout)


@gluon.jit
def score_of(acc, gate, factor, ROWS: gl.constexpr, HEADS: gl.constexpr, HALVED: gl.constexpr = False):
    """fp32 [64, ROWS]: sum over heads of gate * relu(product), times the key's factor [64]. relu keeps NaN.

    HALVED: the gates are halved, so that relu can be a sum: the maximum runs on the integer pipe, which may be busy.
    """
    relu = acc + gl.abs(acc) if HALVED else gl.maximum(acc, 0.0, propagate_nan=_KEEP_NAN)
    return sum_heads(relu * gate, factor, ROWS, HEADS)
