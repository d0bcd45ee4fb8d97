"""quantise_query: RoPE, Walsh-Hadamard and quantisation of index queries, with the head gates made ready for
scoring.

    q --RoPE--> rope --Walsh-Hadamard--> hadamard --(FP4 step)--> quantise --> codes, scales
    gate --(* gate_scale)--(e4m3: * the query's scale)--> gate

An e4m3 query has one scale per (token, head). Since a score is sum_h gate[h] * relu(q[h] . k), a positive
scale can move from q to the gate: SGLang and vLLM fold it there, and the logits kernel never sees it. e2m1
has four scales a head and keeps them.

On Hopper the recipes that round after both stages take `hopper_query`; the codes are the same but for sums of another
order (7 of 673 million e4m3 codes, no e2m1 code).

Letters: T tokens, H heads, D = 128.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from collections.abc import Collection
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_devices, check_tensor, recipe_constants, scale_floor
from .layout import HEAD_DIM, page_format
from .rounding import INTERPRETED, bf16_code_to_fp32, bf16_word, bf16_word_to_fp32, round_to_bf16
from .transforms import (
    bf16_words,
    fp4_fake_quantise,
    hadamard_128,
    interleave,
    quantise_e2m1,
    quantise_e4m3,
    rotate_pairs,
    stack,
)
from .tuning import on_hopper, plain, programs

QUERY_STAGES = ("rope", "hadamard")
"""Stages after which `round_bf16` can ask for one rounding to bf16."""

ROWS = 32
"""(token, head) rows of one program: one to each thread of one warp, once a transposition gave it the whole row."""


@dataclass(frozen=True, slots=True)
class QuantisedQuery:
    """Index queries as the logits kernels take them.

    codes: float8_e4m3fn [T, H, 128], bfloat16 [T, H, 128] or packed uint8 [T, H, 64] (e2m1); the dtype is the
    format. scales: fp32 [T, H] (e4m3; already folded into the gate), uint8 ue8m0 [T, H, 4] (e2m1) or None
    (bf16). gate: fp32 [T, H], the factor of each head's relu.
    """

    codes: Tensor
    scales: Tensor | None
    gate: Tensor

    @property
    def fmt(self) -> str:
        """Name of the format, by the dtype of the codes. Raises ValueError for another dtype."""
        names = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.uint8: "e2m1"}
        if self.codes.dtype not in names:
            raise ValueError(f"query codes are {self.codes.dtype}, expected float8_e4m3fn, bfloat16 or uint8")
        return names[self.codes.dtype]


@triton.jit
def quantise_query_kernel(
    q_ptr,
    gate_ptr,
    cos_ptr,
    sin_ptr,
    codes_ptr,
    scales_ptr,
    gate_out_ptr,
    rows,
    gate_scale,
    amax_floor,
    FMT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TIES_DOWN: tl.constexpr,
    FP4_STEP: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUND_ROPE: tl.constexpr,
    ROUND_HADAMARD: tl.constexpr,
    GATE_BF16: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program makes ROWS rows of q viewed as [T * H, 128]; q and the codes are int32 words."""
    blocks = tl.cdiv(rows, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        first = block * ROWS
        row = tl.arange(0, ROWS)
        pairs = tl.arange(0, 32)[None, :]
        if HEADS % ROWS == 0:  # all rows are one token's
            angles = first // HEADS * 32 + tl.arange(0, 32)
            cos, sin = tl.load(cos_ptr + angles)[None, :], tl.load(sin_ptr + angles)[None, :]
        else:
            row = tl.minimum(row, rows - 1 - first)  # past the end the last row once more
            angles = ((first + row) // HEADS).to(tl.int64)[:, None] * 32 + pairs
            cos, sin = tl.load(cos_ptr + angles), tl.load(sin_ptr + angles)
        start = first.to(tl.int64)
        words = q_ptr + start * 64 + row[:, None] * 64 + pairs
        still, turning = tl.load(words), tl.load(words + 32)
        gate = tl.load(gate_ptr + start + row)
        if GATE_BF16:
            gate = bf16_code_to_fp32(gate)
        if not INTERPRETED and STAGES == 1:
            # holds nothing up in a single warp, but keeps the compiler from putting a load off until its use
            tl.debug_barrier()
        a, b = bf16_word_to_fp32(turning)
        a, b = rotate_pairs(a, b, cos, sin)
        if ROUND_ROPE:
            a, b = bf16_word_to_fp32(tl.trans(bf16_word(a, b)))
        else:
            a, b = tl.trans(a), tl.trans(b)
        c, d = bf16_word_to_fp32(tl.trans(still))
        x = stack(interleave(c, d), interleave(a, b))
        if HADAMARD:
            x = hadamard_128(x)
            if ROUND_HADAMARD:
                x = round_to_bf16(x)
        if FP4_STEP:
            x = fp4_fake_quantise(x)

        gate = gate * gate_scale
        if FMT == "bf16":
            codes = bf16_words(x)
        elif FMT == "e4m3":
            codes, scale = quantise_e4m3(x, amax_floor, POWER_OF_TWO)
            tl.store(scales_ptr + start + row, scale)
            gate = gate * scale
        else:
            codes, scale_bytes = quantise_e2m1(x, amax_floor, TIES_DOWN)
            tl.store(scales_ptr + start + row, scale_bytes)
        WIDTH: tl.constexpr = codes.shape[0]
        tl.store(codes_ptr + start * WIDTH + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], tl.trans(codes))
        tl.store(gate_out_ptr + start + row, gate)


def quantise_query(
    q: Tensor,
    gate: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    gate_scale: float,
    fmt: str = "e4m3",
    scale: str = "fp32",
    amax_floor: float | None = None,
    ties: str = "even",
    hadamard: bool = True,
    fp4_step: bool = False,
    round_bf16: Collection[str] = QUERY_STAGES,
) -> QuantisedQuery:
    """Turn, rotate and quantise index queries.

    q: bf16 [T, H, 128]; gate: bf16 or fp32 [T, H]; cos, sin: fp32 [T, 32], line t for the position of token
    t. gate_scale: the constant in front of the gates (128^-0.5 * H^-0.5 in V4). The returned gate is fp32
    (gate * gate_scale), times the query's scale for e4m3. fmt, scale, amax_floor, ties, hadamard, fp4_step as
    in `store_key`; round_bf16 is a subset of QUERY_STAGES ("hadamard" counts only with hadamard=True).

    A NaN or inf in a row makes its scale (and an e4m3 row's gate) NaN.
    Formulas: DeepSeek-V4 inference code; the folded gate is SGLang's and DeepGEMM's `weights`.
    Raises ValueError for other shapes, dtypes or choices.
    """
    form = page_format(fmt)
    recipe = recipe_constants(form.name, scale, ties, fp4_step, hadamard, round_bf16, QUERY_STAGES)
    check_tensor("q", q, torch.bfloat16, (None, None, HEAD_DIM))
    tokens, heads = q.shape[0], q.shape[1]
    check_tensor("gate", gate, (torch.bfloat16, torch.float32), (tokens, heads))
    check_tensor("cos", cos, torch.float32, (tokens, 32))
    check_tensor("sin", sin, torch.float32, (tokens, 32))
    check_devices(q=q, gate=gate, cos=cos, sin=sin)
    floor = scale_floor(form.name, amax_floor)

    codes = torch.empty(tokens, heads, form.codes_width, dtype=form.codes_dtype, device=q.device)
    scales = {
        "e4m3": torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
        "e2m1": torch.empty(tokens, heads, 4, dtype=torch.uint8, device=q.device),
        "bf16": None,
    }[form.name]
    gate_out = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    result = QuantisedQuery(codes=codes, scales=scales, gate=gate_out)
    rows = tokens * heads
    if not rows:
        return result
    q = q if q.data_ptr() % 16 == 0 else q.clone()
    if scales is not None and on_hopper(q):
        from . import hopper_query

        if hopper_query.runs(heads, recipe):
            hopper_query.quantise_query_sm90(
                q, gate, cos, sin, gate_scale, form.name, recipe["POWER_OF_TWO"], floor, recipe["TIES_DOWN"],
                codes, scales, gate_out,
            )  # fmt: skip
            return result
    gate_bf16 = gate.dtype == torch.bfloat16
    choice = plain(q.device)
    quantise_query_kernel[(programs(q.device, choice.query_programs, triton.cdiv(rows, ROWS)),)](
        q.view(torch.int32),
        gate.view(torch.int16) if gate_bf16 else gate,
        cos,
        sin,
        codes.view(torch.int32),
        gate_out if scales is None else scales.view(torch.int32) if form.name == "e2m1" else scales,
        gate_out,
        rows,
        gate_scale,
        floor,
        **recipe,
        GATE_BF16=gate_bf16,
        HEADS=heads,
        ROWS=ROWS,
        STAGES=choice.query_stages[form.name],
        num_warps=choice.query_warps,
        enable_fp_fusion=False,
    )
    return result
