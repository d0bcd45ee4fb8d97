"""This project's fused Triton kernels as a backend.

The projections (wq_b, wkv, wgate, weights_proj) are ordinary matrix products in every engine and come from the
emulation; everything after them runs in kernels: keys are pooled, normalised, rotated, quantised and stored into
cache pages in shuffled order, queries are rotated and quantised, scores are read through a block table, and the
selection is exact. What the kernels have no option for is refused.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..formats import Format
from ..pipeline import Pipeline
from ..recipe import Recipe, Rounding
from ..refimpl import IndexerConfig, Trace
from ..refimpl.compressor import WINDOW
from ..refimpl.rotation import inverse_frequencies, rope_table
from ..stages import through, visible_under

if TYPE_CHECKING:
    from ..kernels import QuantisedQuery


class TritonBackend:
    """`store_key`, `quantise_query`, `paged_logits` and `topk` in a row, as in decoding."""

    name: str = "triton"
    stages: tuple[str, ...] = ("k_quant", "q_quant", "gate_folded", "scores", "topk")

    def unavailable(self, device: str) -> str | None:
        """None on CUDA, or interpreted (very slow) where TRITON_INTERPRET=1 is set."""
        if find_spec("triton") is None:
            return "package triton is missing: pip install triton"
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a CUDA device (or TRITON_INTERPRET=1 set beforehand, which is very slow)"
        return None

    def refusal(self, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Compare the recipe with what the kernels can do, field by field."""
        r = recipe
        fixed: dict[str, Any] = {
            "compute": "fp32", "round_q": "bf16", "q_pairing": "interleaved", "k_pairing": "interleaved",
            "q_slice": "last", "k_slice": "last", "rope_dims": 64, "ape": True, "round_ape": "none",
            "overlap": True, "round_pool_sum": "none", "round_gate": "none", "round_dot": "none",
            "round_product": "none", "round_score": "none", "relu": True, "ties": "lower",
        }  # fmt: skip
        for field, value in fixed.items():
            if getattr(r, field) != value:
                return f"{field} is {getattr(r, field)!r} and the kernels only have {value!r}"
        if config.index_head_dim != 128 or config.index_n_heads % 16:
            return f"{config.index_n_heads} heads of {config.index_head_dim}, the kernels need 16, 32, ... heads of 128"
        for field in ("q_format", "k_format"):
            try:
                kernel_format(getattr(r, field))
            except ValueError as error:
                return f"{field}: {error}"
        pair = (kernel_format(r.q_format)["fmt"], kernel_format(r.k_format)["fmt"])
        if pair not in (("e4m3", "e4m3"), ("e4m3", "bf16"), ("bf16", "bf16"), ("e2m1", "e2m1")):
            return f"no kernel scores {pair[0]} queries against {pair[1]} keys"
        rounds = (
            r.round_pool,
            r.round_k_norm,
            r.round_k_rope,
            r.round_k_hadamard,
            r.round_q_rope,
            r.round_q_hadamard,
        )
        return "the kernels can round to bf16 only, not fp16" if "fp16" in rounds else None

    def run(self, pipeline: Pipeline, recipe: Recipe) -> Trace:
        """Run the kernels on the pipeline's projections; also returns `pages` and `block_table`."""
        from .. import kernels

        call = pipeline.call
        fmt = kernel_format(recipe.k_format)["fmt"]
        pages, table, slots = self.store_keys(pipeline, recipe)
        query = self.quantise_queries(pipeline, recipe)
        visible = visible_under(call, recipe, call.rows).to(torch.int32)
        tables = table.expand(len(visible), -1).contiguous()
        scores = kernels.paged_logits(query, pages, tables, visible, fmt=fmt, max_length=len(slots))
        tensors: dict[str, Tensor] = {
            "k_quant": kernels.dequantise(*kernels.read_entries(pages, fmt, slots), fmt),
            "q_quant": kernels.dequantise(query.codes, query.scales, query.fmt),
            "gate_folded": query.gate,
            "scores": scores,
            "topk": kernels.topk(scores, visible, min(recipe.k, len(slots))).long(),
            "pages": pages,
            "block_table": table,
            "queries": pipeline.queries,
        }
        if query.fmt == "e4m3" and query.scales is not None:
            tensors["q_scale"] = query.scales
        return Trace(tensors, start=call.start, metadata={"page_format": fmt})

    def quantise_queries(self, pipeline: Pipeline, recipe: Recipe) -> QuantisedQuery:
        """The query kernel on the projections of all query rows."""
        from .. import kernels

        return kernels.quantise_query(
            pipeline.stage(recipe, "q").contiguous(),
            pipeline.stage(recipe, "gate_gemm"),
            *self._angles(recipe, "q", pipeline.queries, pipeline.call.x.device),
            gate_scale=pipeline.call.config.gate_scale,
            hadamard=recipe.q_hadamard,
            fp4_step=recipe.q_fp4,
            round_bf16=bf16_stages(rope=recipe.round_q_rope, hadamard=recipe.round_q_hadamard),
            **kernel_format(recipe.q_format),
        )

    def store_keys(self, pipeline: Pipeline, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
        """The key kernel on all tokens: (pages uint8, block table int32 [1, pages], slot of each entry int64 [E])."""
        from .. import kernels

        call, device = pipeline.call, pipeline.call.x.device
        assert call.start == 0, "a run starts at token 0"
        kv, gate = (t.contiguous() for t in pipeline.stage(recipe, "kv_gate").chunk(2, dim=1))
        entries = call.x.shape[0] // WINDOW
        entry = torch.arange(entries, device=device)
        count = -(-max(entries, 1) // kernels.ENTRIES_PER_PAGE)
        table = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
        slots = (
            table[entry // kernels.ENTRIES_PER_PAGE].long() * kernels.ENTRIES_PER_PAGE
            + entry % kernels.ENTRIES_PER_PAGE
        )
        position = {"first": WINDOW * entry, "last": WINDOW * entry + WINDOW - 1, "index": entry}[recipe.k_position]
        form = kernel_format(recipe.k_format)
        pages = kernels.allocate_pages(form["fmt"], count, device)
        kernels.store_key(
            kv, gate, call.weights.ape.float(), call.weights.norm.float(), *self._angles(recipe, "k", position, device),
            (WINDOW * entry).to(torch.int32), entry.to(torch.int32), slots, pages,
            eps=recipe.eps, hadamard=recipe.k_hadamard, fp4_step=recipe.k_fp4,
            round_bf16=bf16_stages(
                pool=recipe.round_pool, norm=recipe.round_k_norm,
                rope=recipe.round_k_rope, hadamard=recipe.round_k_hadamard,
            ),
            **form,
        )  # fmt: skip
        return pages, table[None], slots

    def _angles(self, recipe: Recipe, side: str, position: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        theta, yarn, mscale = (getattr(recipe, f"{side}_{name}") for name in ("theta", "yarn", "mscale"))
        table = rope_table(position, inverse_frequencies(theta, recipe.rope_dims, yarn))
        cos, sin = (through(t * mscale, recipe.round_rope_table).to(device) for t in table)
        return cos, sin


def kernel_format(fmt: Format | None) -> dict[str, Any]:
    """The kernels' arguments for a storage format; ValueError names what no kernel stores."""
    if fmt is None:
        raise ValueError("unquantised values have no cache format")
    if fmt.element == "bf16":
        return {"fmt": "bf16"}
    known = {"e4m3": (128, ("fp32", "ue8m0")), "e2m1": (32, ("ue8m0",))}
    block, scales = known.get(fmt.element, (0, ()))
    if fmt.block != block or fmt.scale not in scales or fmt.rule != "ceil" or fmt.amax_floor <= 0:
        raise ValueError(f"no kernel stores {fmt} with amax floor {fmt.amax_floor:g}")
    if fmt.element == "e4m3" and (fmt.ties != "even" or (fmt.scale == "fp32" and not fmt.reciprocal)):
        raise ValueError(
            f"no kernel stores {fmt}: e4m3 rounds ties to even and multiplies by the reciprocal of the scale"
        )
    return {"fmt": fmt.element, "scale": fmt.scale, "amax_floor": fmt.amax_floor, "ties": fmt.ties}


def bf16_stages(**roundings: Rounding) -> tuple[str, ...]:
    """Names of the stages that are rounded to bf16."""
    return tuple(name for name, rounding in roundings.items() if rounding == "bf16")
