"""store_key: from the compressor's fp32 projections to an entry in its cache page, in one kernel.

    kv, gate --(+ ape, softmax over 8 slots, weighted sum)--> pool --RMSNorm--> norm --RoPE--> rope
    --Walsh-Hadamard--> hadamard --(FP4 step)--> quantise --> page

Entry i pools the *first* 128 columns of the four tokens of window i-1 and the *last* 128 columns of those of
window i; for i = 0 the previous window is absent. RoPE turns the last 64 dims by the angle of the entry's
first token, position 4i: the caller passes that line of the table. Which stages are rounded to bf16 is the
recipe's choice: the DeepSeek reference rounds all four, SGLang none, vLLM once before quantising.

Letters: N tokens, E entries of this call, D = 128, P pages. The arithmetic is fp32 throughout, in the order
of DeepSeek's published inference code; the eight slots are added one after the other, so the bits do not
depend on the launch. Only the norm's mean over 128 dims is a tree sum.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_devices, check_tensor, recipe_constants, scale_floor
from .layout import ENTRIES_PER_PAGE, HEAD_DIM, check_pages, page_format
from .rounding import INTERPRETED, bf16_code_to_fp32, exponential, fp32_bits, quotient, reciprocal, round_to_bf16
from .transforms import (
    bf16_words,
    fp4_fake_quantise,
    hadamard_128,
    quantise_e2m1,
    quantise_e4m3,
    rotate_pairs,
)
from .tuning import plain

KEY_STAGES = ("pool", "norm", "rope", "hadamard")
"""Stages after which `round_bf16` can ask for one rounding to bf16."""

ROWS = 32 if INTERPRETED.value else 1
"""Entries of one program."""

_PAGE = tl.constexpr(ENTRIES_PER_PAGE)
_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _slot(slot: tl.constexpr, kv_ptr, gate_ptr, previous):
    """kv and gate of one of the 8 pooled slots, fp32 [ROWS, 128] each; kv_ptr and gate_ptr point to the 128
    columns of each entry's first token. The slots of an absent window have gate -inf. Read once, they leave the caches
    before the bias, which every entry reads.
    """
    offset: tl.constexpr = (slot - 4) * 256 + slot // 4 * 128
    if slot < 4:
        kv = tl.load(kv_ptr + offset, mask=previous, other=0.0, eviction_policy="evict_first")
        return kv, tl.load(gate_ptr + offset, mask=previous, other=_MINUS_INF, eviction_policy="evict_first")
    kv = tl.load(kv_ptr + offset, eviction_policy="evict_first")
    return kv, tl.load(gate_ptr + offset, eviction_policy="evict_first")


@triton.jit
def _position_bias(slot: tl.constexpr, ape_ptr):
    """ape of a slot, fp32 [1, 128]."""
    return tl.load(ape_ptr + (slot % 4 * 256 + slot // 4 * 128) + tl.arange(0, 128)[None, :])


@triton.jit
def _pool(kv_ptr, gate_ptr, ape_ptr, first_row, entry, tokens):
    """The softmax-weighted sum of the 8 slots, fp32 [ROWS, 128], slot after slot; NaN if one of their rows is
    outside the projections.
    """
    inside = (first_row >= 0) & (first_row <= tokens - 4) & ((entry == 0) | (first_row >= 4))
    previous = (inside & (entry != 0))[:, None]
    start = tl.where(inside, first_row, 0).to(tl.int64)[:, None] * 256 + tl.arange(0, 128)[None, :]
    kv_ptr += start
    gate_ptr += start
    kv0, gate0 = _slot(0, kv_ptr, gate_ptr, previous)
    kv1, gate1 = _slot(1, kv_ptr, gate_ptr, previous)
    kv2, gate2 = _slot(2, kv_ptr, gate_ptr, previous)
    kv3, gate3 = _slot(3, kv_ptr, gate_ptr, previous)
    kv4, gate4 = _slot(4, kv_ptr, gate_ptr, previous)
    kv5, gate5 = _slot(5, kv_ptr, gate_ptr, previous)
    kv6, gate6 = _slot(6, kv_ptr, gate_ptr, previous)
    kv7, gate7 = _slot(7, kv_ptr, gate_ptr, previous)
    if not INTERPRETED:
        # holds nothing up in a single warp, but keeps the compiler from loading kv only after the exponentials
        tl.debug_barrier()
    gate0 += _position_bias(0, ape_ptr)
    gate1 += _position_bias(1, ape_ptr)
    gate2 += _position_bias(2, ape_ptr)
    gate3 += _position_bias(3, ape_ptr)
    gate4 += _position_bias(4, ape_ptr)
    gate5 += _position_bias(5, ape_ptr)
    gate6 += _position_bias(6, ape_ptr)
    gate7 += _position_bias(7, ape_ptr)
    # a maximum drops NaN, but exp(NaN - maximum) brings it back
    highest = tl.maximum(tl.maximum(gate0, gate1), tl.maximum(gate2, gate3))
    highest = tl.maximum(highest, tl.maximum(tl.maximum(gate4, gate5), tl.maximum(gate6, gate7)))
    power0, power1 = exponential(gate0 - highest), exponential(gate1 - highest)
    power2, power3 = exponential(gate2 - highest), exponential(gate3 - highest)
    power4, power5 = exponential(gate4 - highest), exponential(gate5 - highest)
    power6, power7 = exponential(gate6 - highest), exponential(gate7 - highest)
    total = power0 + power1 + power2 + power3 + power4 + power5 + power6 + power7
    inverse = reciprocal(total)
    x = kv0 * quotient(power0, total, inverse) + kv1 * quotient(power1, total, inverse)
    x += kv2 * quotient(power2, total, inverse)
    x += kv3 * quotient(power3, total, inverse)
    x += kv4 * quotient(power4, total, inverse)
    x += kv5 * quotient(power5, total, inverse)
    x += kv6 * quotient(power6, total, inverse)
    x += kv7 * quotient(power7, total, inverse)
    return tl.where(inside[:, None], x, float("nan"))


@triton.jit
def store_key_kernel(
    kv_ptr,
    gate_ptr,
    ape_ptr,
    norm_weight_ptr,
    cos_ptr,
    sin_ptr,
    token_row_ptr,
    entry_index_ptr,
    slots_ptr,
    page_ptr,
    page_stride,
    tokens,
    entries,
    capacity,
    eps,
    amax_floor,
    FMT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TIES_DOWN: tl.constexpr,
    FP4_STEP: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUND_POOL: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    ROUND_ROPE: tl.constexpr,
    ROUND_HADAMARD: tl.constexpr,
    WEIGHT_BF16: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program makes ROWS entries. The pool is addressed in int32 words, page_stride words a page."""
    # int64: projections and a pool may be larger than 2^31 elements
    e = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = tl.minimum(e, entries - 1)  # past the end the last entry once more
    first_row = tl.load(token_row_ptr + there)
    entry = tl.load(entry_index_ptr + there)
    slot_number = tl.load(slots_ptr + there)
    cols = tl.arange(0, 128)[None, :]
    weight = tl.load(norm_weight_ptr + cols)
    if WEIGHT_BF16:
        weight = bf16_code_to_fp32(weight)
    pair = tl.arange(0, 64)[None, :]
    angles = there[:, None] * 32 + pair % 32
    cos, sin = tl.load(cos_ptr + angles), tl.load(sin_ptr + angles)

    x = _pool(kv_ptr, gate_ptr, ape_ptr, first_row, entry, tokens)
    if ROUND_POOL:
        x = round_to_bf16(x)

    mean_square = tl.sum(x * x, axis=1) * 0.0078125  # 1/128
    inverse = reciprocal(tl.sqrt_rn(mean_square + eps))
    x = x * inverse[:, None] * weight
    if ROUND_NORM:
        x = round_to_bf16(x)

    a, b = tl.split(tl.reshape(x, (ROWS, 64, 2)))
    turned_a, turned_b = rotate_pairs(a, b, cos, sin)
    turns = pair >= 32
    x = tl.reshape(tl.join(tl.where(turns, turned_a, a), tl.where(turns, turned_b, b)), (ROWS, 128))
    if ROUND_ROPE:
        x = round_to_bf16(x)
    x = tl.trans(x)
    if HADAMARD:
        x = hadamard_128(x)
        if ROUND_HADAMARD:
            x = round_to_bf16(x)
    if FP4_STEP:
        x = fp4_fake_quantise(x)

    stored = (slot_number >= 0) & (slot_number < capacity)
    slot_number = tl.where(stored, slot_number, 0)
    page_ptr += slot_number // _PAGE * page_stride
    row = slot_number % _PAGE
    if FMT == "bf16":
        words = bf16_words(x)
    elif FMT == "e4m3":
        words, scale = quantise_e4m3(x, amax_floor, POWER_OF_TWO)
        tl.store(page_ptr + _PAGE * 32 + row, fp32_bits(scale), mask=stored)
    else:
        words, bytes_ = quantise_e2m1(x, amax_floor, TIES_DOWN)
        tl.store(page_ptr + _PAGE * 16 + row, bytes_, mask=stored)
    columns = tl.arange(0, words.shape[0])[None, :]
    words_ptr = (page_ptr + row * words.shape[0])[:, None] + columns
    tl.store(words_ptr, tl.trans(words), mask=stored[:, None])


def store_key(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    token_row: Tensor,
    entry_index: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    fmt: str,
    eps: float = 1e-6,
    hadamard: bool = True,
    scale: str = "fp32",
    amax_floor: float | None = None,
    ties: str = "even",
    fp4_step: bool = False,
    round_bf16: Collection[str] = KEY_STAGES,
) -> None:
    """Compute E entries and write them to their slots of `pages`, in place.

    kv, gate: fp32 [N, 256], x @ wkv^T and x @ wgate^T *without* ape; a row may belong to any request. ape:
    fp32 [4, 256], added to the gates by the token's row in its window. norm_weight: fp32 or bf16 [128]. cos,
    sin: fp32 [E, 32], line e for position 4 * entry_index[e]. token_row: int32 [E], row of kv holding the
    first token of the entry's window; its previous window is the four rows before. entry_index: int32 [E], 0
    means that there is no previous window. A row outside kv makes the entry NaN. slots: int64 [E]; -1 (or a
    slot outside the pool) stores nothing. pages: uint8 [P, page_bytes] of format `fmt`.

    fmt "e4m3" | "bf16" | "e2m1". scale (e4m3 only): "fp32" is max(amax, floor) / 448, "ue8m0" that
    rounded up to a power of two; codes are RNE(x / scale). e2m1 has one ue8m0 scale 2^ceil(log2(max(amax,
    floor) * fp32(1/6))) per 32 dims, and `ties` is "even" or "down" (toward zero). amax_floor: by default
    1e-4 (e4m3) or 6 * 2^-126 (e2m1). fp4_step: the reference's FP4 fake quantisation before the format.
    round_bf16: stages of KEY_STAGES rounded once to bf16 ("hadamard" counts only with hadamard=True).

    A NaN or inf anywhere in an entry makes its scales NaN (bf16: its values), see `rounding`. Formulas:
    DeepSeek-V4 inference code (compressor, indexer, fp4 step); SGLang and vLLM for the other recipes. Raises
    ValueError for other shapes, dtypes or choices.
    """
    form = page_format(fmt)
    recipe = recipe_constants(form.name, scale, ties, fp4_step, hadamard, round_bf16, KEY_STAGES)
    entries = token_row.shape[0] if token_row.ndim == 1 else 0
    check_tensor("kv", kv, torch.float32, (None, 2 * HEAD_DIM))
    check_tensor("gate", gate, torch.float32, tuple(kv.shape))
    check_tensor("ape", ape, torch.float32, (4, 2 * HEAD_DIM))
    check_tensor("norm_weight", norm_weight, (torch.float32, torch.bfloat16), (HEAD_DIM,))
    check_tensor("token_row", token_row, torch.int32, (None,))
    check_tensor("entry_index", entry_index, torch.int32, (entries,))
    check_tensor("slots", slots, torch.int64, (entries,))
    check_tensor("cos", cos, torch.float32, (entries, 32))
    check_tensor("sin", sin, torch.float32, (entries, 32))
    check_pages(pages, form)
    check_devices(
        kv=kv,
        gate=gate,
        ape=ape,
        norm_weight=norm_weight,
        cos=cos,
        sin=sin,
        token_row=token_row,
        entry_index=entry_index,
        slots=slots,
        pages=pages,
    )
    floor = scale_floor(form.name, amax_floor)
    if entries == 0:
        return
    tokens = kv.shape[0]
    if tokens < 4:  # the kernel reads a whole window, if only to find that it is outside
        kv, gate = (torch.nn.functional.pad(x, (0, 0, 0, 4 - tokens)) for x in (kv, gate))
    weight_bf16 = norm_weight.dtype == torch.bfloat16
    store_key_kernel[(triton.cdiv(entries, ROWS),)](
        kv,
        gate,
        ape,
        norm_weight.view(torch.int16) if weight_bf16 else norm_weight,
        cos,
        sin,
        token_row,
        entry_index,
        slots,
        pages.view(torch.int32),
        pages.stride(0) // 4,
        tokens,
        entries,
        pages.shape[0] * ENTRIES_PER_PAGE,
        eps,
        floor,
        **recipe,
        WEIGHT_BF16=weight_bf16,
        ROWS=ROWS,
        num_warps=plain(kv.device).key_warps,
        enable_fp_fusion=False,
    )
