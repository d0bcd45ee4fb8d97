"""load_keys and score_tile: a tile of quantised keys, and its scores for one query row.

What a dot is made of:

============  ========  ==============================================  ==================================
query         keys      compiled                                        interpreted
============  ========  ==============================================  ==================================
e4m3          e4m3      fp8 product, every 32 dims added up in fp32     decoded, fp32 product
e4m3, bf16    bf16      bf16 product (e4m3 is exact in bf16)            decoded, fp32 product
e2m1          e2m1      bf16 product of decoded values times scales     decoded, fp32 product
============  ========  ==============================================  ==================================

An e2m1 byte holds an even and an odd dim; both sides are packed alike, so the even and the odd halves are two
products and nothing is interleaved. relu keeps NaN (a floating-point maximum would turn it into 0), so a
poisoned key shows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

from .rounding import INTERPRETED, bf16_code_to_fp32, e2m1_to_fp32, e4m3_to_fp32, ue8m0_to_fp32


@triton.jit
def _e2m1_operand(byte, scale_byte, HIGH: tl.constexpr):
    """Low or high nibbles of packed bytes times their block's scale: fp32 interpreted, bf16 (exact)
    compiled.
    """
    byte = byte.to(tl.int32)
    nibble = (byte >> 4) & 15 if HIGH else byte & 15
    value = e2m1_to_fp32(nibble) * ue8m0_to_fp32(scale_byte)
    return value if INTERPRETED else value.to(tl.bfloat16)


@triton.jit
def _e4m3_operand(code, FOR_BF16: tl.constexpr):
    """e4m3 bytes as a dot operand: fp32 interpreted, else bf16 (beside a bf16 operand) or fp8 itself."""
    if INTERPRETED:
        operand = e4m3_to_fp32(code)
    elif FOR_BF16:
        operand = e4m3_to_fp32(code).to(tl.bfloat16)
    else:
        operand = code.to(tl.float8e4nv, bitcast=True)
    return operand


@triton.jit
def _bf16_operand(code):
    """bf16 bits as a dot operand: fp32 interpreted, else bf16."""
    return bf16_code_to_fp32(code) if INTERPRETED else code.to(tl.bfloat16, bitcast=True)


@triton.jit
def _dot(keys, queries):
    """[KEYS, K] x [K, HEADS] with fp32 accumulation."""
    if INTERPRETED:
        dots = tl.dot(keys, queries, input_precision="ieee")
    else:
        # 0: on Hopper, add each fp8 instruction's 32 dims up outside the tensor core's narrow accumulator
        dots = tl.dot(keys, queries, max_num_imprecise_acc=0)
    return dots


@triton.jit
def load_keys(values_ptr, offsets, scales_ptr, scale_offsets, mask, FMT: tl.constexpr):
    """Two dot operands of a tile of keys and their fp32 scale [KEYS]; e2m1: even, odd dims; else the same one
    twice.

    offsets: element of each key's first value; scale_offsets: of its (first) scale. A masked key reads as
    zero.
    """
    if FMT == "e2m1":
        byte_index = tl.arange(0, 64)[None, :]
        byte = tl.load(values_ptr + offsets[:, None] + byte_index, mask=mask[:, None], other=0)
        block = tl.arange(0, 4)[None, :]
        scale_byte = tl.load(scales_ptr + scale_offsets[:, None] + block, mask=mask[:, None], other=127)
        scale_byte = tl.reshape(tl.broadcast_to(scale_byte[:, :, None], (mask.shape[0], 4, 16)), (mask.shape[0], 64))
        first = _e2m1_operand(byte, scale_byte, False)
        second = _e2m1_operand(byte, scale_byte, True)
        scale = tl.full(mask.shape, 1.0, tl.float32)
    else:
        dims = tl.arange(0, 128)[None, :]
        code = tl.load(values_ptr + offsets[:, None] + dims, mask=mask[:, None], other=0)
        if FMT == "bf16":
            first = _bf16_operand(code)
            scale = tl.full(mask.shape, 1.0, tl.float32)
        else:
            first = _e4m3_operand(code, False)
            scale = tl.load(scales_ptr + scale_offsets, mask=mask, other=1.0)
        second = first
    return first, second, scale


@triton.jit
def score_tile(
    first,
    second,
    scale,
    q_ptr,
    q_scales_ptr,
    gate_ptr,
    row,
    FMT: tl.constexpr,
    Q_FMT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """Scores fp32 [KEYS] of one query row (int64) against a tile of keys."""
    score = tl.zeros(scale.shape, tl.float32)
    for tile in tl.static_range(HEADS // HEAD_TILE):
        head = row * HEADS + tile * HEAD_TILE + tl.arange(0, HEAD_TILE)[None, :]
        if Q_FMT == "e2m1":
            byte_index = tl.arange(0, 64)[:, None]
            byte = tl.load(q_ptr + head * 64 + byte_index)
            scale_byte = tl.load(q_scales_ptr + head * 4 + tl.arange(0, 4)[:, None])
            scale_byte = tl.reshape(tl.broadcast_to(scale_byte[:, None, :], (4, 16, HEAD_TILE)), (64, HEAD_TILE))
            dots = _dot(first, _e2m1_operand(byte, scale_byte, False))
            dots += _dot(second, _e2m1_operand(byte, scale_byte, True))
        else:
            code = tl.load(q_ptr + head * 128 + tl.arange(0, 128)[:, None])
            if Q_FMT == "bf16":
                dots = _dot(first, _bf16_operand(code))
            else:
                dots = _dot(first, _e4m3_operand(code, FMT == "bf16"))
        gate = tl.load(gate_ptr + head)
        score += tl.sum(tl.where(dots <= 0.0, 0.0, dots) * gate, axis=1)
    return score * scale
