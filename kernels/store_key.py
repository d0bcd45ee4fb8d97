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

from .checks import check_choice, check_devices, check_stages, check_tensor, scale_floor
from .layout import ENTRIES_PER_PAGE, HEAD_DIM, check_pages, page_format
from .rounding import INTERPRETED, exponential, fp32_to_bf16_code, round_to_bf16
from .transforms import (
    fp4_fake_quantise,
    hadamard_128,
    quantise_e2m1,
    quantise_e4m3,
    rotate_last_64,
)

KEY_STAGES = ("pool", "norm", "rope", "hadamard")
"""Stages after which `round_bf16` can ask for one rounding to bf16."""

ROWS = 32 if INTERPRETED.value else 4
"""Entries of one program; more than 4 would spill, since the compiler keeps all 8 slots in registers."""

_PAGE = tl.constexpr(ENTRIES_PER_PAGE)
_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _slot(slot: tl.constexpr, kv_ptr, gate_ptr, ape_ptr, first_row, entry, mask, tokens):
    """kv and gate + ape of one of the 8 pooled slots, fp32 [ROWS, 128] each. A row outside the projections is
    NaN.
    """
    cols = tl.arange(0, 128)[None, :] + (slot // 4) * 128
    row = first_row + (slot - 4)
    absent = (entry == 0) & (slot < 4)
    offsets = row.to(tl.int64)[:, None] * 256 + cols
    wanted = (mask & (absent == 0) & (row >= 0) & (row < tokens))[:, None]
    kv = tl.load(kv_ptr + offsets, mask=wanted, other=float("nan"))
    gate = tl.load(gate_ptr + offsets, mask=wanted, other=float("nan")) + tl.load(ape_ptr + (slot % 4) * 256 + cols)
    kv = tl.where(absent[:, None], 0.0, kv)
    return kv, tl.where(absent[:, None], _MINUS_INF, gate)


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
    page_u8_ptr,
    page_i16_ptr,
    page_f32_ptr,
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
    """One program makes ROWS entries."""
    e = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = e < entries
    first_row = tl.load(token_row_ptr + e, mask=mask, other=0)
    entry = tl.load(entry_index_ptr + e, mask=mask, other=0)
    cols = tl.arange(0, 128)[None, :]

    # a maximum drops NaN, but exp(NaN - maximum) brings it back
    highest = tl.full((ROWS, 128), _MINUS_INF, tl.float32)
    for slot in tl.static_range(8):
        _, gate = _slot(slot, kv_ptr, gate_ptr, ape_ptr, first_row, entry, mask, tokens)
        highest = tl.maximum(highest, gate)
    total = tl.zeros((ROWS, 128), tl.float32)
    for slot in tl.static_range(8):
        _, gate = _slot(slot, kv_ptr, gate_ptr, ape_ptr, first_row, entry, mask, tokens)
        total += exponential(gate - highest)
    x = tl.zeros((ROWS, 128), tl.float32)
    for slot in tl.static_range(8):
        kv, gate = _slot(slot, kv_ptr, gate_ptr, ape_ptr, first_row, entry, mask, tokens)
        x += kv * tl.div_rn(exponential(gate - highest), total)
    if ROUND_POOL:
        x = round_to_bf16(x)

    mean_square = tl.sum(x * x, axis=1) * 0.0078125  # 1/128
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
    if WEIGHT_BF16:
        weight = (tl.load(norm_weight_ptr + cols).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(norm_weight_ptr + cols)
    x = x * inverse[:, None] * weight
    if ROUND_NORM:
        x = round_to_bf16(x)

    x = rotate_last_64(x, cos_ptr, sin_ptr, e, mask, ROWS)
    if ROUND_ROPE:
        x = round_to_bf16(x)
    if HADAMARD:
        x = hadamard_128(x, ROWS)
        if ROUND_HADAMARD:
            x = round_to_bf16(x)
    if FP4_STEP:
        x = fp4_fake_quantise(x, ROWS)

    slot_number = tl.load(slots_ptr + e, mask=mask, other=-1)
    stored = (slot_number >= 0) & (slot_number < capacity)
    slot_number = tl.where(stored, slot_number, 0)
    page = slot_number // _PAGE
    row = slot_number % _PAGE
    page_byte = page * page_stride  # int64: a pool may be larger than 2^31 bytes
    if FMT == "bf16":
        offsets = page_byte // 2 + row * 128
        tl.store(page_i16_ptr + offsets[:, None] + cols, fp32_to_bf16_code(x), mask=stored[:, None])
    elif FMT == "e4m3":
        codes, scale = quantise_e4m3(x, amax_floor, POWER_OF_TWO)
        offsets = page_byte + row * 128
        tl.store(page_u8_ptr + offsets[:, None] + cols, codes, mask=stored[:, None])
        tl.store(page_f32_ptr + page_byte // 4 + _PAGE * 32 + row, scale, mask=stored)
    else:
        packed, byte = quantise_e2m1(x, amax_floor, TIES_DOWN, ROWS)
        offsets = page_byte + row * 64
        tl.store(page_u8_ptr + offsets[:, None] + tl.arange(0, 64)[None, :], packed, mask=stored[:, None])
        offsets = page_byte + _PAGE * 64 + row * 4
        tl.store(page_u8_ptr + offsets[:, None] + tl.arange(0, 4)[None, :], byte, mask=stored[:, None])


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
    check_choice("scale", scale, ("fp32", "ue8m0"))
    check_choice("ties", ties, ("even", "down"))
    check_stages(round_bf16, KEY_STAGES)
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
        pages,
        pages.view(torch.int16),
        pages.view(torch.float32),
        pages.stride(0),
        kv.shape[0],
        entries,
        pages.shape[0] * ENTRIES_PER_PAGE,
        eps,
        floor,
        FMT=form.name,
        POWER_OF_TWO=scale == "ue8m0",
        TIES_DOWN=ties == "down",
        FP4_STEP=fp4_step,
        HADAMARD=hadamard,
        ROUND_POOL="pool" in round_bf16,
        ROUND_NORM="norm" in round_bf16,
        ROUND_ROPE="rope" in round_bf16,
        ROUND_HADAMARD="hadamard" in round_bf16,
        WEIGHT_BF16=weight_bf16,
        ROWS=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
