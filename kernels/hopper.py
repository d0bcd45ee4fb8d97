"""What the Hopper kernels share: operand unpacking in registers, the score of an accumulator, and launch choices.

Written in Gluon, Triton's language with explicit layouts, because here the layouts are the point: an 8- or 4-bit key is
widened in the registers in which the tensor core wants it, and nothing passes through shared memory twice. These
kernels exist for sm_90 only and cannot be interpreted; `logits` takes its plain kernels everywhere else, and a test
on the device holds both to the same naive result.

A dot is a sum over dims, so any order of dims will do if both operands have it. `widen_e4m3` and `unpack_e2m1` leave a
key's dims in the order in which its bytes lie in the registers; `byte_of_place` tells the query side that order.
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


def _unpack_asm() -> str:
    """Two words of eight e2m1 codes -> eight bf16 pairs (code i of the first word, code i of the second), scaled.

    A code s e e m moved to bits 15 and 8..6 is a bf16 of 2^-126 times its value, subnormal 0.5 included; one product
    with the factor ($10, a bf16 twice) makes it the key times 2^-63. $0..$3 are the low, $4..$7 the high nibbles.
    """
    lines = [".reg .b32 t, a, b;"]
    for half, selector in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 t, $8, $9, {selector};")
        for nibble in range(4):
            byte, high = divmod(nibble, 2)
            sign, magnitude = 12 - 4 * nibble, 6 - 4 * nibble
            lines.append(f"shl.b32 a, t, {sign};")
            lines.append(f"shl.b32 b, t, {magnitude};" if magnitude > 0 else f"shr.u32 b, t, {-magnitude};")
            lines.append("and.b32 b, b, 0x01C001C0;")
            lines.append("lop3.b32 a, a, 0x80008000, b, 0xEA;")
            lines.append(f"mul.bf16x2 ${2 * half + byte + 4 * high}, a, $10;")
    return "{\n" + "\n".join(lines) + "\n}"


_UNPACK = gl.constexpr(_unpack_asm())


@gluon.constexpr_function
def word_layout(words):
    """Registers of [64, words] int32: a thread holds the words c, c + 4, c + 8 .. of its two keys, c its lane % 4."""
    registers = [[0, 4 << i] for i in range((words // 4).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*registers, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, words])


@gluon.jit
def _bytes(b0, b1, b2, b3):
    """Four tensors [64, W], one for each byte of a word, as [64, W, 2, 2]."""
    return gl.join(gl.join(b0, b2), gl.join(b1, b3))


@gluon.jit
def widen_e4m3(words, operand: gl.constexpr):
    """[64, 32] words of e4m3 -> fp16 [64, 128], the left operand of a product; dims as `byte_of_place`."""
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,=r,=r,r,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=2
    )
    x = _bytes(b0, b1, b2, b3).reshape([64, 4, 2, 4, 2, 2])
    x = x.permute([0, 1, 4, 5, 3, 2]).reshape([64, 128])
    return gl.convert_layout(x, operand, assert_trivial=True)


@gluon.jit
def _unpack_words(words, factor):
    l0, l1, l2, l3, h0, h1, h2, h3 = gl.inline_asm_elementwise(
        _UNPACK,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, factor],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    return _bytes(l0, l1, l2, l3), _bytes(h0, h1, h2, h3)


@gluon.jit
def _in_order(a, b, operand: gl.constexpr):
    x = gl.join(a, b).reshape([64, 2, 4, 2, 2, 2])
    x = x.permute([0, 5, 3, 4, 2, 1]).reshape([64, 64])
    return gl.convert_layout(x, operand, assert_trivial=True)


@gluon.jit
def unpack_e2m1(packed, scale, operand: gl.constexpr):
    """Packed e2m1 in shared memory, [64, 16] words, and four ue8m0 bytes a key -> even and odd dims, bf16 [64, 64].

    What comes out is the key times 2^-63, exact for scales in [2^-63, 2^64]; dims as `byte_of_place`. scale: int32
    [64], the four bytes of a key, in the slice layout of `word_layout(8)`.
    """
    layout: gl.constexpr = word_layout(8)
    # the bf16 of 2^(byte - 64) for bytes 0 and 2, 1 and 3, then for a pair of blocks in one register
    even = (scale & 0x00FF00FF) * 128 + 0x1F801F80
    odd = ((scale >> 8) & 0x00FF00FF) * 128 + 0x1F801F80
    first = (even & 0xFFFF) | (odd << 16)
    second = ((even >> 16) & 0xFFFF) | (odd & -65536)
    zero = gl.zeros([64, 8], gl.int32, layout)
    low0, high0 = _unpack_words(packed.slice(0, 8, 1).load(layout), first[:, None] + zero)
    low1, high1 = _unpack_words(packed.slice(8, 8, 1).load(layout), second[:, None] + zero)
    return _in_order(low0, low1, operand), _in_order(high0, high1, operand)


@gluon.jit
def byte_of_place(place):
    """Which byte of a key's values stands at a place of the widened operand (e4m3: a dim, e2m1: a pair of dims)."""
    word = place // 32 * 8 + place % 2 * 4 + place // 2 % 4
    return word * 4 + place // 16 % 2 * 2 + place // 8 % 2


@gluon.jit
def score_of(acc, gate, factor, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """fp32 [64, ROWS]: sum over heads of gate * relu(product), times the key's factor [64]. relu keeps NaN."""
    terms = gl.maximum(acc, 0.0, propagate_nan=_KEEP_NAN) * gate
    score = gl.sum(terms.reshape([64, ROWS, HEADS]), axis=2)
    return score * gl.convert_layout(factor[:, None], score.type.layout)
