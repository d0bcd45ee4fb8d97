"""The stages as functions of a Recipe: what each reads, and what it computes.

Every stage declares the stages and the recipe fields that it reads; the pipeline uses that to share results between
recipes. With `Recipe.reference` each stage does exactly what the reference port does, operation by operation; the
arithmetic itself is the port's own small functions wherever a recipe does not ask for something else.

`kv_gate`, the projections [T, 4D] before pooling (kv, then gate), and `gate_gemm` are internal: no trace holds them.
Letters: T tokens, E entries, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .custom import CustomFormat, Storage
from .formats import E2M1_REFERENCE, PLAIN_DTYPES, Format, fake_quantise
from .recipe import Recipe, Rounding
from .refimpl import IndexerConfig, IndexerState, IndexerWeights, dequantise_weight
from .refimpl.compressor import WINDOW, pool_windows, rms_norm, softmax_pool
from .refimpl.formats import e4m3_fake_quantise, fp4_step
from .refimpl.indexer import head_gates
from .refimpl.linear import row_tiled_product
from .refimpl.rotation import apply_rope, hadamard, inverse_frequencies, rope_table
from .refimpl.scoring import reduce_heads_bf16, select_topk, sort_keys, tiled_scores

_ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTE = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One layer's weights and inputs for T tokens from position `start`; see `run_indexer` for shapes.

    rows are the query rows within the call; wq_b is the dequantised fp32 weight; state is where the stream stood.
    """

    config: IndexerConfig
    weights: IndexerWeights
    wq_b: Tensor
    x: Tensor
    qr: Tensor
    start: int
    state: IndexerState
    rows: Tensor


Function = Callable[[Call, Recipe, dict[str, Tensor], Tensor], Tensor]
"""(call, recipe, inputs by stage name, query rows of this block) -> the stage's tensor."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage reads: earlier stages, recipe fields (always also `compute`); `query_side`: one row per query."""

    function: Function
    inputs: tuple[str, ...]
    fields: tuple[str, ...]
    query_side: bool


def rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """x as the named type, or unchanged for "none"."""
    return x if rounding == "none" else x.to(_ROUNDED[rounding])


def through(x: Tensor, rounding: Rounding) -> Tensor:
    """x rounded to the named type but kept in its own dtype."""
    return x if rounding == "none" else x.to(_ROUNDED[rounding]).to(x.dtype)


def wide(x: Tensor, recipe: Recipe) -> Tensor:
    """x in the recipe's compute type."""
    return x.to(_COMPUTE[recipe.compute])


def q(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Query projection [rows, H, D]."""
    qr = call.qr[rows]
    if call.weights.quantised and recipe.activation_quant:
        qr = e4m3_fake_quantise(qr)
    wq_b = call.wq_b if recipe.weight_scale == "stored" else _rescaled_weight(call, recipe)
    flat = rounded(row_tiled_product(qr, wide(wq_b, recipe)), recipe.round_q)
    return flat.view(-1, call.config.index_n_heads, call.config.index_head_dim)


def _rescaled_weight(call: Call, recipe: Recipe) -> Tensor:
    """The query weight, fp32 [H*D, q_lora], with its block scales misread; a plain weight has none to misread."""
    weights = call.weights
    if weights.wq_b_scale is None:
        return call.wq_b
    scale = weights.wq_b_scale
    exponents = torch.frexp(scale.float()).exponent.float() + 126  # the e8m0 byte, 127 + log2 of a power of two
    scale = exponents if recipe.weight_scale == "byte" else torch.ones_like(exponents)
    return dequantise_weight(weights.wq_b, scale, call.config.weight_block)


def angle_table(recipe: Recipe, side: Literal["q", "k"], positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of one side's RoPE under a recipe, each fp32 [n, R/2] on the CPU; positions are those of tokens."""
    theta, yarn, mscale = (getattr(recipe, f"{side}_{name}") for name in ("theta", "yarn", "mscale"))
    positions = positions + getattr(recipe, f"{side}_position_offset")
    table = rope_table(positions, inverse_frequencies(theta, recipe.rope_dims, yarn))
    cos, sin = (through(t * mscale, recipe.round_rope_table) for t in table)
    return cos, sin


def entry_positions(recipe: Recipe, entry: Tensor) -> Tensor:
    """Token position whose angle each entry's key gets."""
    return {"first": WINDOW * entry, "last": WINDOW * entry + WINDOW - 1, "index": entry}[recipe.k_position]


def _rope(x: Tensor, positions: Tensor, recipe: Recipe, side: Literal["q", "k"]) -> Tensor:
    first = getattr(recipe, f"{side}_slice") == "first"
    half = getattr(recipe, f"{side}_pairing") == "half"
    cos, sin = angle_table(recipe, side, positions)
    x = wide(x, recipe)
    if first:
        x = x.roll(-recipe.rope_dims, dims=-1)  # the rotated dims are last now
    if half:
        x = _regroup(x, recipe.rope_dims, (2, -1))
    x = apply_rope(x, cos, sin)
    if half:
        x = _regroup(x, recipe.rope_dims, (-1, 2))
    return x.roll(recipe.rope_dims, dims=-1) if first else x


def _regroup(x: Tensor, rope_dims: int, shape: tuple[int, int]) -> Tensor:
    """Transpose the last rope_dims seen as `shape`: (2, -1) brings half-split pairs side by side, (-1, 2) undoes it."""
    head, tail = x.split((x.shape[-1] - rope_dims, rope_dims), dim=-1)
    return torch.cat((head, tail.unflatten(-1, shape).transpose(-1, -2).flatten(-2)), dim=-1)


def q_rope(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Queries rotated by their token position."""
    return rounded(_rope(inputs["q"], rows + call.start, recipe, "q"), recipe.round_q_rope)


def k_rope(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Keys rotated by their entry's position."""
    first = call.start // WINDOW
    entry = torch.arange(first, first + inputs["k_norm"].shape[0])
    return rounded(_rope(inputs["k_norm"], entry_positions(recipe, entry), recipe, "k"), recipe.round_k_rope)


def q_hadamard(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Queries after the Hadamard rotation, or as they were."""
    x = inputs["q_rope"]
    return rounded(hadamard(wide(x, recipe)), recipe.round_q_hadamard) if recipe.q_hadamard else x


def k_hadamard(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Keys after the Hadamard rotation, or as they were."""
    x = inputs["k_rope"]
    return rounded(hadamard(wide(x, recipe)), recipe.round_k_hadamard) if recipe.k_hadamard else x


def _stored(x: Tensor, fp4: Format | None, fmt: Storage | None) -> Tensor:
    """x after the FP4 step and storage, as the reader gets it: a plain format's own type, else fp32."""
    if fp4 is not None:
        x = (fp4_step(x) if fp4 == E2M1_REFERENCE else fake_quantise(x, fp4)).bfloat16()
    if fmt is None:
        return x
    if isinstance(fmt, CustomFormat):
        return fmt.fake_quantise(x)
    return x.to(PLAIN_DTYPES[fmt.element]) if fmt.plain else fake_quantise(x, fmt)


def q_quant(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Queries as the score kernel reads them, dequantised."""
    return _stored(inputs["q_hadamard"], recipe.q_fp4_format if recipe.q_fp4 else None, recipe.q_format)


def k_quant(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Keys as the cache gives them back, dequantised."""
    return _stored(inputs["k_hadamard"], recipe.k_fp4_format if recipe.k_fp4 else None, recipe.k_format)


def kv_gate(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Projections [T, 4D]: kv [T, 2D] beside gate [T, 2D] before ape, rounded as the GEMM's output is."""
    parts = [row_tiled_product(call.x, wide(w, recipe)) for w in (call.weights.wkv, call.weights.wgate)]
    return through(torch.cat(parts, dim=1), recipe.round_pool_gemm)


def gate_with_ape(call: Call, recipe: Recipe, gate: Tensor) -> Tensor:
    """Pool gates plus the learned row of each token's place in its window."""
    if not recipe.ape:
        return gate
    position = torch.arange(call.start, call.start + gate.shape[0], device=gate.device)
    ape = through(call.weights.ape.float(), recipe.round_ape)
    return gate + ape.to(gate.dtype)[(position + recipe.ape_shift) % WINDOW]


def pool(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Pooled entries [E of this call, D]."""
    kv, gate = inputs["kv_gate"].chunk(2, dim=1)
    kv, gate, _ = call.state.pool.then(kv, gate_with_ape(call, recipe, gate))
    if recipe.overlap_order == "own-first":
        kv, gate = (t.roll(t.shape[-1] // 2, dims=-1) for t in (kv, gate))
    if not recipe.overlap:
        half = kv.shape[-1] // 2
        gate = torch.cat((torch.full_like(gate[..., :half], -torch.inf), gate[..., half:]), dim=-1)
    return rounded(pool_windows(kv, gate, _pool_rounded(recipe)), recipe.round_pool)


def _pool_rounded(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    rounding = recipe.round_pool_sum
    if rounding == "none":
        return softmax_pool

    def pool_slots(kv: Tensor, gate: Tensor) -> Tensor:
        weights = through(gate.softmax(dim=1), rounding)
        return through(through(kv * weights, rounding).sum(dim=1), rounding)

    return pool_slots


def k_norm(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """RMS-normalised entries."""
    return rounded(rms_norm(wide(inputs["pool"], recipe), call.weights.norm, recipe.eps), recipe.round_k_norm)


def gate_gemm(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Projection of the head gates [rows, H], before the constant."""
    return rounded(row_tiled_product(call.x[rows], wide(call.weights.weights_proj, recipe)), recipe.round_gate_gemm)


def gate(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Head gates [rows, H]."""
    return rounded(head_gates(inputs["gate_gemm"], call.config.gate_scale), recipe.round_gate)


def scores(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Scores [rows, E so far], -inf where invisible."""
    r = recipe
    choices = (r.compute, r.round_dot, r.round_product, r.round_score, r.relu, inputs["gate"].dtype)
    # with a wider gate that reduction would not round the product
    reference = choices == ("fp32", "bf16", "bf16", "bf16", True, torch.bfloat16)
    dtype = _COMPUTE[r.compute] if r.round_score == "none" else _ROUNDED[r.round_score]

    def reduce(dots: Tensor, gates: Tensor) -> Tensor:
        dots = through(dots, r.round_dot)
        terms = dots.relu_() if r.relu else dots
        terms = through(terms.mul_(gates.to(dots.dtype).unsqueeze(-1)), r.round_product)
        return terms.sum(dim=1).to(dtype)

    def reduce_exact(dots: Tensor, gates: Tensor) -> Tensor:
        # without roundings in between, the gated sum over heads is a product of [1, H] and [H, e] per query
        return torch.bmm(gates.to(dots.dtype).unsqueeze(1), dots.relu_() if r.relu else dots).squeeze(1).to(dtype)

    unrounded = r.round_dot == "none" and r.round_product == "none"
    chosen = reduce_heads_bf16 if reference else reduce_exact if unrounded else reduce
    visible = visible_under(call, recipe, rows)
    keys = torch.cat((call.state.keys.to(inputs["k_quant"].dtype), inputs["k_quant"]))
    return tiled_scores(inputs["q_quant"], keys, inputs["gate"], visible, chosen, dtype, _COMPUTE[r.compute])


def visible_under(call: Call, recipe: Recipe, rows: Tensor) -> Tensor:
    """Entries each query row may read under the recipe's mask, never beyond those that exist."""
    entries = (call.start + call.x.shape[0]) // WINDOW
    return ((rows + call.start + 1 + recipe.mask_shift) // WINDOW).clamp(max=entries)


def topk(call: Call, recipe: Recipe, inputs: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Selected entries [rows, min(k, E)], -1 where empty."""
    visible = visible_under(call, recipe, rows)
    if recipe.ties == "lower":
        return select_topk(inputs["scores"], visible, recipe.k)
    # mirror the entries, so that the lower mirrored index is the higher one
    entries = inputs["scores"].shape[1]
    hidden = torch.arange(entries - 1, -1, -1, device=rows.device) >= visible[:, None]
    keys = sort_keys(inputs["scores"].flip(1)).masked_fill_(hidden, torch.iinfo(torch.int64).min)
    mirrored = keys.topk(min(recipe.k, entries), dim=1).indices
    empty = torch.arange(mirrored.shape[1], device=rows.device) >= visible[:, None]
    return (entries - 1 - mirrored).masked_fill(empty, -1)


_Q_ROPE = (
    "q_theta",
    "q_yarn",
    "q_mscale",
    "q_pairing",
    "q_slice",
    "q_position_offset",
    "rope_dims",
    "round_rope_table",
    "round_q_rope",
)
_K_ROPE = (
    "k_theta",
    "k_yarn",
    "k_mscale",
    "k_pairing",
    "k_slice",
    "k_position",
    "k_position_offset",
    "rope_dims",
    "round_rope_table",
    "round_k_rope",
)
_POOL = ("ape", "ape_shift", "round_ape", "overlap", "overlap_order", "round_pool_sum", "round_pool")
_SCORES = ("round_dot", "relu", "round_product", "round_score", "mask_shift")

GRAPH: dict[str, Stage] = {
    "q": Stage(q, (), ("activation_quant", "weight_scale", "round_q"), True),
    "q_rope": Stage(q_rope, ("q",), _Q_ROPE, True),
    "q_hadamard": Stage(q_hadamard, ("q_rope",), ("q_hadamard", "round_q_hadamard"), True),
    "q_quant": Stage(q_quant, ("q_hadamard",), ("q_fp4", "q_fp4_format", "q_format"), True),
    "kv_gate": Stage(kv_gate, (), ("round_pool_gemm",), False),
    "pool": Stage(pool, ("kv_gate",), _POOL, False),
    "k_norm": Stage(k_norm, ("pool",), ("eps", "round_k_norm"), False),
    "k_rope": Stage(k_rope, ("k_norm",), _K_ROPE, False),
    "k_hadamard": Stage(k_hadamard, ("k_rope",), ("k_hadamard", "round_k_hadamard"), False),
    "k_quant": Stage(k_quant, ("k_hadamard",), ("k_fp4", "k_fp4_format", "k_format"), False),
    "gate_gemm": Stage(gate_gemm, (), ("round_gate_gemm",), True),
    "gate": Stage(gate, ("gate_gemm",), ("round_gate",), True),
    "scores": Stage(scores, ("q_quant", "k_quant", "gate"), _SCORES, True),
    "topk": Stage(topk, ("scores",), ("mask_shift", "k", "ties"), True),
}
"""All stages in pipeline order."""
INTERNAL = ("kv_gate", "gate_gemm")
"""Stages that no trace holds; where a stage is judged on given inputs, these count as part of it."""
