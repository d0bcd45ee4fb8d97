"""e2m1 keys and queries as integers on Hopper: products without rounding, at the rate of 8-bit numbers.

Twice an e2m1 number is 0, 1, 2, 3, 4, 6, 8 or 12. A row (a key, a head of a query) is held over its largest block's
scale: twice the number, times 2^(3 - d) in a block whose scale is 2^-d of the largest. Up to d = NEAR that is an
integer of 8 bits, products of two rows are integers below 2^21, and the tensor core adds them up without rounding.

Integers meet fp32 without a conversion: the bits of v >= 0 are those of the denormal number v * 2^-149, which a
multiplication by a gate of about 2^126 brings back. `gates` makes such gates, and `finish` takes off what they are too
large by.

Rows with blocks farther apart are rare (amax of two blocks differ more than eight times) and `score_far` scores their
pages block by block, so every scale is exact.

The order of dims is that in which a thread finds them; both sides are unpacked alike.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .hopper import sum_heads

NEAR = gl.constexpr(3)
"""Powers of two that a block may lie below its row's largest and still fit."""
_TOP = gl.constexpr(126)
"""Exponent of the largest gate of a request, see `gates`."""
_LACKS = gl.constexpr(149 - 2 * (NEAR.value + 1))
"""A product of a key and a head is 2^_LACKS times what the multiplication by a gate sees, times their scales."""


# Eight codes -> their integers, by byte permutation of two tables, magnitudes ($3, $4) and these negated ($5, $6). A
# permutation takes three bits of a selector's nibble for one of eight bytes; where the fourth bit is set it spreads the
# sign of the byte instead, which makes masks of the codes' signs.
_UNPACK = gl.constexpr(
    """{
    .reg .b32 w, x, p, n, s;
    and.b32 w, $2, 0x77777777;
    shl.b32 x, $2, 4;
    prmt.b32 p, $3, $4, w;
    prmt.b32 n, $5, $6, w;
    prmt.b32 s, x, $2, 0xD9C8;
    lop3.b32 $0, s, n, p, 0xCA;
    shr.u32 w, w, 16;
    prmt.b32 p, $3, $4, w;
    prmt.b32 n, $5, $6, w;
    prmt.b32 s, x, $2, 0xFBEA;
    lop3.b32 $1, s, n, p, 0xCA;
    }"""
)
_BYTES = gl.constexpr("".join(f"mov.b32 ${i}, ${8 + i % 2 * 4 + i // 2};" for i in range(8)))
_LARGER = gl.constexpr("max.u16x2 $0, $1, $2;")
_SMALLER = gl.constexpr("min.u16x2 $0, $1, $2;")


@gluon.constexpr_function
def block_layout():
    """Registers of [64, 16] int32, packed e2m1: a thread holds the four words of one block of each of its two keys."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 16])


@gluon.jit
def _pairs(a, b, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def largest_byte(scale):
    """The largest of the four bytes of each int32."""
    both = _pairs(scale & 0x00FF00FF, (scale >> 8) & 0x00FF00FF, _LARGER)
    return gl.maximum(both & 0xFFFF, both >> 16)


@gluon.jit
def farther(farthest, scale, largest):
    """`farthest` [64], raised to how far the bytes of each int32 lie below their largest; two numbers of 16 bits."""
    least = _pairs(scale & 0x00FF00FF, (scale >> 8) & 0x00FF00FF, _SMALLER)
    return _pairs(farthest, largest * 0x00010001 - least, _LARGER)


@gluon.jit
def is_far(farthest):
    """Whether any row of `farther` does not fit; the same in all threads."""
    return gl.max(gl.maximum(farthest & 0xFFFF, farthest >> 16), axis=0) > NEAR


@gluon.jit
def power(byte):
    """2^(byte - 127) of a ue8m0 byte as fp32; of 255, infinity."""
    return gl.maximum(byte << 23, 0x400000).to(gl.float32, bitcast=True)


@gluon.jit
def unpack(words, times):
    """Packed e2m1, [64, 16] words of `block_layout` -> words of four int8 each, of the even and the odd halves: twice
    the numbers, times `times` [64, 16], a power of two up to 8 of a word's block.
    """
    low, high = times * 0x03020100, times * 0x0C080604
    # every byte negated: a byte below that is not zero borrows one, which is given back
    less_low, less_high = times * -0x03020100 + 0x01010000, times * -0x0C080604 + 0x01010100
    return gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,r,r,r,r,r", [words, low, high, less_low, less_high], dtype=(gl.int32,) * 2, is_pure=True, pack=1
    )


@gluon.jit
def operand_of(words):
    """What `unpack` makes as int8 [64, 128], as a left operand lies."""
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        _BYTES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words[0], words[1]], dtype=(gl.int8,) * 8, is_pure=False,
        pack=4,
    )  # fmt: skip
    x = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    return x.reshape([64, 4, 4, 2, 2, 2]).permute([0, 5, 4, 3, 1, 2]).reshape([64, 128])


@gluon.jit
def unpack_rows(words, scale, largest):
    """`unpack` of rows over their largest block's scale; scale: int32 [64], the four ue8m0 bytes of a row."""
    layout: gl.constexpr = words.type.layout
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, layout)) // 4
    below = largest[:, None] - ((scale[:, None] >> (block * 8)[None, :]) & 255)
    return unpack(words, (1 << NEAR) >> gl.minimum(below, 31))


@gluon.jit
def product(keys, q_smem, N: gl.constexpr, mma: gl.constexpr):
    """int32 [64, N], in flight."""
    keys = gl.convert_layout(operand_of(keys), gl.DotOperandLayout(0, mma, 4), assert_trivial=True)
    acc = gl.zeros([64, N], gl.int32, mma)
    return warpgroup_mma(keys, q_smem.slice(0, N, 0).permute([1, 0]), acc, use_acc=False, is_async=True)


@gluon.jit
def score_near(k_smem, s_smem, q_smem, gate, lacks, farthest, ROWS: gl.constexpr, HEADS: gl.constexpr,
               mma: gl.constexpr):  # fmt: skip
    """Scores [64, ROWS] of a page whose blocks are near, and `farther` of its keys."""
    layout: gl.constexpr = block_layout()
    scale = s_smem.load(gl.SliceLayout(1, layout))
    largest = largest_byte(scale)
    acc = product(unpack_rows(k_smem.load(layout), scale, largest), q_smem, ROWS * HEADS, mma)
    factor = gl.where(largest == 255, float("nan"), power(largest) * lacks)
    farthest = farther(farthest, scale, largest)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    relu = gl.maximum(acc, 0).to(gl.float32, bitcast=True)
    return sum_heads(relu * gate, gl.convert_layout(factor, gl.SliceLayout(1, mma)), ROWS, HEADS), farthest


@gluon.jit
def gates(gate, byte):
    """Gates [N] of heads whose largest block has the scale 2^(byte - 127), and what scores lack then.

    The gate of a head times its scale, over a power of two for all heads so that the largest is about 2^_TOP. NaN and
    infinity stay; smaller than 2^-252 of the largest becomes 0.
    """
    bits = gate.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    most = gl.max(gl.where(exponent == 255, 0, exponent + byte), axis=0)
    new = exponent + byte - most + (_TOP + 127)
    moved = ((bits & -0x7F800001) | (new << 23)).to(gl.float32, bitcast=True)
    moved = gl.where((exponent == 0) | (new <= 0), 0.0, moved)
    moved = gl.where(exponent == 255, gate, moved)
    return gl.where(byte == 255, float("nan"), moved), power(gl.maximum(gl.minimum(most + (_LACKS - _TOP - 127), 255), 0))


@gluon.constexpr_function
def far_layout(heads):
    """Registers of products with so many heads."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 32])


@gluon.jit
def score_far(words_ptr, page, q_scales_ptr, gate_ptr, head, q_smem, HEADS: gl.constexpr):
    """Scores [64] of some heads against a page of any scales: products of a block of dims at a time, added up in fp32.

    words_ptr: the pages as words. q_smem: these HEADS heads (head: the first, int64) as integers without their scales.
    """
    mma: gl.constexpr = far_layout(HEADS)
    layout: gl.constexpr = block_layout()
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    words = gl.load(words_ptr + page * 1088 + entry[:, None] * 16 + word[None, :])
    scale = gl.load(words_ptr + page * 1088 + 1024 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma)))
    head += gl.arange(0, HEADS, layout=gl.SliceLayout(0, mma))
    q_scale = gl.load(q_scales_ptr + head)
    largest, q_largest = largest_byte(scale), largest_byte(q_scale)
    total = gl.zeros([64, HEADS], gl.float32, mma)
    for block in range(4):
        keys = unpack(gl.where((word // 4 == block)[None, :], words, 0), gl.full_like(words, 1 << NEAR))
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[product(keys, q_smem, HEADS, mma)])
        below = power(127 - gl.minimum(largest - ((scale >> (block * 8)) & 255), 127))
        q_below = power(127 - gl.minimum(q_largest - ((q_scale >> (block * 8)) & 255), 127))
        total += acc.to(gl.float32) * below[:, None] * q_below[None, :]
    gate = gl.load(gate_ptr + head) * power(q_largest) * 2.0 ** -(2 * (NEAR + 1))
    gate = gl.where(q_largest == 255, float("nan"), gate)
    score = gl.sum(gl.maximum(total, 0.0) * gate[None, :], axis=1)
    return score * gl.where(largest == 255, float("nan"), power(largest))
