"""e2m1 keys and queries on Hopper: unpacked in registers to 8 bits, as integers where sums are to be exact.

A row (a key, a head of a query) is held over its largest block's scale; below: how many powers of two a block's scale
lies under that. Blocks near enough are turned into

=======  =======================================  ===========================  ====
EXACT    an element                               products                     NEAR
=======  =======================================  ===========================  ====
True     twice the number, times 2^(3 - below)    8-bit integers, exact        3
False    e4m3, the number times 2^(6 - below)     fp8, narrow accumulator      11
=======  =======================================  ===========================  ====

Integers meet fp32 without a conversion: the bits of v >= 0 are those of the denormal number v * 2^-149, which a
multiplication by a gate of about 2^126 brings back. `gates` makes such gates, and says what scores lack then.

Rows with blocks farther apart are rare (the largest elements of two blocks differ more than eight times) and
`score_far` scores their pages block by block, so scales may be of any size.

The order of dims is that in which a thread finds them; both sides are unpacked alike.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .hopper import sum_heads

NEAR = gl.constexpr({True: 3, False: 11})
"""Powers of two that a block may lie below its row's largest, by EXACT."""
_TOP = gl.constexpr(126)
"""Exponent of the largest gate of a request where products are integers."""
_LACKS = gl.constexpr(149 - 8)
"""An integer product is 2^_LACKS times what the multiplication by a gate sees, times the scales."""

# Eight codes -> eight bytes, by byte permutation: three bits of a selector's nibble take one of a table's eight bytes,
# and where the fourth is set the sign of the byte is spread instead, which makes masks of the codes' signs.
# Two tables, magnitudes ($3, $4) and these negated ($5, $6):
_INTEGERS = gl.constexpr(
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
# One table and a sign bit:
_FLOATS = gl.constexpr(
    """{
    .reg .b32 w, x, p, s;
    and.b32 w, $2, 0x77777777;
    shl.b32 x, $2, 4;
    prmt.b32 p, $3, $4, w;
    prmt.b32 s, x, $2, 0xD9C8;
    lop3.b32 $0, s, 0x80808080, p, 0xEA;
    shr.u32 w, w, 16;
    prmt.b32 p, $3, $4, w;
    prmt.b32 s, x, $2, 0xFBEA;
    lop3.b32 $1, s, 0x80808080, p, 0xEA;
    }"""
)
_BYTES = gl.constexpr("".join(f"mov.b32 ${i}, ${8 + i % 2 * 4 + i // 2};" for i in range(8)))
# The larger byte of each half comes to its top, then the larger of those:
_LARGEST = gl.constexpr(
    """{
    .reg .b32 t, u;
    prmt.b32 t, $1, 0, 0x2301;
    max.u16x2 u, $1, t;
    prmt.b32 t, u, 0, 0x1032;
    max.u16x2 u, u, t;
    shr.u32 $0, u, 24;
    }"""
)
_BYTE = gl.constexpr("prmt.b32 $0, $1, 0, $2;")


@gluon.constexpr_function
def block_layout():
    """Registers of words [64, 4, 4], packed e2m1: a thread holds the four words of one block of each of two keys."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])


@gluon.constexpr_function
def word_layout():
    """`block_layout` of words [64, 16]."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 16])


@gluon.constexpr_function
def row_layout():
    """`block_layout` of something [64] a row."""
    return gl.SliceLayout(1, gl.SliceLayout(2, block_layout()))


@gluon.jit
def largest_byte(scale):
    """The largest of the four bytes of each int32."""
    return gl.inline_asm_elementwise(_LARGEST, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def below_largest(scale, largest):
    """int32 [64, 4]: powers of two of each block below its row's largest, at most 31. scale, largest: [64]."""
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, block_layout())))
    own = gl.inline_asm_elementwise(
        _BYTE, "=r,r,r", [scale[:, None], (0x4440 + block)[None, :]], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.minimum(largest[:, None] - own, 31)


@gluon.jit
def is_far(below, EXACT: gl.constexpr):
    """Whether any block is far; the same in all threads."""
    return gl.max(gl.max(below, axis=1), axis=0) > NEAR[EXACT]


@gluon.jit
def power(byte):
    """2^(byte - 127) of a ue8m0 byte as fp32; of 255, infinity."""
    return gl.maximum(byte << 23, 0x400000).to(gl.float32, bitcast=True)


@gluon.jit
def unpack(words, below, EXACT: gl.constexpr):
    """Packed e2m1 [64, 16], as `word_layout`, and `below_largest` -> [64, 128] of 8 bits, as a left operand lies."""
    words = gl.convert_layout(words.reshape([64, 4, 4]), block_layout(), assert_trivial=True)
    if EXACT:
        times = ((1 << NEAR[EXACT]) >> below)[:, :, None] + gl.zeros_like(words)
        low, high = times * 0x03020100, times * 0x0C080604
        # every byte negated: a byte below that is not zero borrows one, which is given back
        less_low, less_high = times * -0x03020100 + 0x01010000, times * -0x0C080604 + 0x01010100
        even, odd = gl.inline_asm_elementwise(
            _INTEGERS, "=r,=r,r,r,r,r,r", [words, low, high, less_low, less_high], dtype=(gl.int32,) * 2, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        below = below[:, :, None] + gl.zeros_like(words)
        low, high = 0x6C686000 - below * 0x08080800, 0x7C787470 - below * 0x08080808
        even, odd = gl.inline_asm_elementwise(
            _FLOATS, "=r,=r,r,r,r", [words, low, high], dtype=(gl.int32,) * 2, is_pure=True, pack=1
        )
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        _BYTES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [even, odd], dtype=(gl.int8,) * 8, is_pure=True, pack=4
    )
    x = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    x = x.permute([0, 5, 4, 3, 1, 2]).reshape([64, 128])
    if not EXACT:
        x = x.to(gl.float8e4nv, bitcast=True)
    return x


@gluon.jit
def product(keys, q_smem, N: gl.constexpr, mma: gl.constexpr):
    """[64, N] of int32 or fp32, in flight."""
    keys = gl.convert_layout(keys, gl.DotOperandLayout(0, mma, 4), assert_trivial=True)
    acc = gl.zeros([64, N], gl.int32 if keys.dtype == gl.int8 else gl.float32, mma)
    return warpgroup_mma(keys, q_smem.slice(0, N, 0).permute([1, 0]), acc, use_acc=False, is_async=True)


@gluon.jit
def score_near(k_smem, scale, q_smem, gate, lacks, farthest, ROWS: gl.constexpr, HEADS: gl.constexpr,
               EXACT: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Scores [64, ROWS] of a page whose blocks are near, and `farthest` [64, 4] raised to `below_largest`."""
    largest = largest_byte(scale)
    below = below_largest(scale, largest)
    acc = product(unpack(k_smem.load(word_layout()), below, EXACT), q_smem, ROWS * HEADS, mma)
    factor = power(largest)
    factor = factor * lacks + factor * 0.0  # the latter is NaN if the scale is
    farthest = gl.maximum(farthest, below)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    # a sum is done on another pipe than unpacking
    relu = gl.maximum(acc, 0).to(gl.float32, bitcast=True) if EXACT else acc + gl.abs(acc)
    return sum_heads(relu * gate, gl.convert_layout(factor, gl.SliceLayout(1, mma)), ROWS, HEADS), farthest


@gluon.jit
def gates(gate, byte, EXACT: gl.constexpr):
    """Gates [N] of heads whose largest block has the scale 2^(byte - 127), and what scores lack then.

    EXACT: the gate of a head times its scale, over a power of two for all heads so that the largest is about 2^_TOP.
    NaN and infinity stay; smaller than 2^-252 of the largest becomes 0.
    """
    lacks = 1.0
    if EXACT:
        bits = gate.to(gl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        most = gl.max(gl.where(exponent == 255, 0, exponent + byte), axis=0)
        new = exponent + byte - most + (_TOP + 127)
        moved = ((bits & -0x7F800001) | (new << 23)).to(gl.float32, bitcast=True)
        moved = gl.where((exponent == 0) | (new <= 0), 0.0, moved)
        gate = gl.where(exponent == 255, gate, moved)
        lacks = power(gl.maximum(gl.minimum(most + (_LACKS - _TOP - 127), 255), 0))
    else:
        gate = gate * power(byte) * 2.0**-13  # twice 2^6, and half for relu as a sum
    return gl.where(byte == 255, float("nan"), gate), lacks


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
    layout: gl.constexpr = word_layout()
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    words = gl.load(words_ptr + page * 1088 + entry[:, None] * 16 + word[None, :])
    near = gl.zeros([64, 4], gl.int32, gl.SliceLayout(2, block_layout()))
    scale = gl.load(words_ptr + page * 1088 + 1024 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma)))
    head += gl.arange(0, HEADS, layout=gl.SliceLayout(0, mma))
    q_scale = gl.load(q_scales_ptr + head)
    largest, q_largest = largest_byte(scale), largest_byte(q_scale)
    total = gl.zeros([64, HEADS], gl.float32, mma)
    for block in range(4):
        keys = unpack(gl.where((word // 4 == block)[None, :], words, 0), near, True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[product(keys, q_smem, HEADS, mma)])
        below = power(127 - gl.minimum(largest - ((scale >> (block * 8)) & 255), 127))
        q_below = power(127 - gl.minimum(q_largest - ((q_scale >> (block * 8)) & 255), 127))
        total += acc.to(gl.float32) * below[:, None] * q_below[None, :]
    gate = gl.where(q_largest == 255, float("nan"), gl.load(gate_ptr + head) * power(q_largest) * 2.0**-8)
    score = gl.sum(gl.maximum(total, 0.0) * gate[None, :], axis=1)
    return score * gl.where(largest == 255, float("nan"), power(largest))
