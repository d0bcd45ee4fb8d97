"""This project's fused Triton kernels as steps.

The projections (wq_b, wkv, wgate, weights_proj) are ordinary matrix products in every engine and come from the
emulation; everything after them runs in kernels. What the kernels have no option for is refused.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..custom import CustomFormat, Storage
from ..formats import Format
from ..packages import installed_version, present
from ..pipeline import Pipeline
from ..recipe import Recipe, Rounding
from ..refimpl import IndexerConfig
from ..refimpl.compressor import WINDOW
from ..stages import angle_table, entry_positions
from ..version import __version__
from .base import STEPS, KeyCache, fixed_refusal
from .emulated import shuffled_slots

if TYPE_CHECKING:
    from ..kernels import QuantisedQuery


class TritonKernels:
    """`store_key`, `quantise_query`, `paged_logits` and `topk`."""

    name: str = "triton"
    steps: tuple[str, ...] = STEPS

    def unavailable(self, device: str) -> str | None:
        """None on CUDA, or interpreted (very slow) where TRITON_INTERPRET=1 is set."""
        if not present("triton"):
            return "package triton is missing: pip install triton"
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a CUDA device (or TRITON_INTERPRET=1 set beforehand, which is very slow)"
        return None

    def version(self) -> str | None:
        """Version of this package and of the compiler."""
        compiler = installed_version("triton")
        return f"{__version__} (triton {compiler})" if compiler else None

    def refusal(self, step: str, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Compare the fields that the step reads with what its kernel can do."""
        if reason := fixed_refusal(recipe, FIXED[step]):
            return reason
        if config.index_head_dim != 128 or config.index_n_heads % 16:
            return f"{config.index_n_heads} heads of {config.index_head_dim}, the kernels need 16, 32, ... heads of 128"
        try:
            if step in ("keys", "logits"):
                kernel_format(recipe.k_format)
            if step in ("queries", "logits"):
                kernel_format(recipe.q_format)
        except ValueError as error:
            return str(error)
        if step == "logits":
            assert isinstance(recipe.q_format, Format), "kernel_format refuses others"
            assert isinstance(recipe.k_format, Format), "kernel_format refuses others"
            pair = (recipe.q_format.element, recipe.k_format.element)
            if pair not in (("e4m3", "e4m3"), ("e4m3", "bf16"), ("bf16", "bf16"), ("e2m1", "e2m1")):
                return f"no kernel scores {pair[0]} queries against {pair[1]} keys"
        fp16 = [name for name in BF16_ONLY[step] if getattr(recipe, name) == "fp16"]
        return f"{fp16[0]} is 'fp16' and the kernel rounds to bf16 only" if fp16 else None

    def paged_logits(self, query: QuantisedQuery, cache: KeyCache, visible: Tensor) -> Tensor:
        """The decode kernel, every query row as a request of its own over the same pages."""
        from .. import kernels

        tables = cache.block_table.expand(len(visible), -1).contiguous()
        length = len(cache.slots)
        return kernels.paged_logits(query, cache.pages, tables, visible, fmt=cache.fmt, max_length=length)

    def topk(self, scores: Tensor, visible: Tensor, k: int) -> Tensor:
        """The selection kernel."""
        from .. import kernels

        return kernels.topk(scores, visible, min(k, scores.shape[1])).long()

    def quantise_queries(self, pipeline: Pipeline, recipe: Recipe) -> QuantisedQuery:
        """The query kernel on the projections of all query rows."""
        from .. import kernels

        return kernels.quantise_query(
            pipeline.stage(recipe, "q").contiguous(),
            pipeline.stage(recipe, "gate_gemm"),
            *_angles(recipe, "q", pipeline.queries, pipeline.call.x.device),
            gate_scale=pipeline.call.config.gate_scale,
            hadamard=recipe.q_hadamard,
            fp4_step=recipe.q_fp4,
            round_bf16=bf16_stages(rope=recipe.round_q_rope, hadamard=recipe.round_q_hadamard),
            **kernel_format(recipe.q_format),
        )

    def store_keys(self, pipeline: Pipeline, recipe: Recipe) -> KeyCache:
        """The key kernel on all tokens, into pages in shuffled order."""
        from .. import kernels

        call, device = pipeline.call, pipeline.call.x.device
        assert call.start == 0, "a run starts at token 0"
        kv, gate = (t.contiguous() for t in pipeline.stage(recipe, "kv_gate").chunk(2, dim=1))
        entry = torch.arange(call.x.shape[0] // WINDOW, device=device)
        table, slots = shuffled_slots(len(entry), device)
        position = entry_positions(recipe, entry)
        form = kernel_format(recipe.k_format)
        pages = kernels.allocate_pages(form["fmt"], table.shape[1], device)
        kernels.store_key(
            kv, gate, call.weights.ape.float(), call.weights.norm.float(), *_angles(recipe, "k", position, device),
            (WINDOW * entry).to(torch.int32), entry.to(torch.int32), slots, pages,
            eps=recipe.eps, hadamard=recipe.k_hadamard, fp4_step=recipe.k_fp4,
            round_bf16=bf16_stages(
                pool=recipe.round_pool, norm=recipe.round_k_norm,
                rope=recipe.round_k_rope, hadamard=recipe.round_k_hadamard,
            ),
            **form,
        )  # fmt: skip
        return KeyCache(pages=pages, block_table=table, slots=slots, fmt=form["fmt"])


def _angles(recipe: Recipe, side: Literal["q", "k"], position: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = angle_table(recipe, side, position)
    return cos.to(device), sin.to(device)


FIXED: dict[str, dict[str, Any]] = {
    "keys": {
        "compute": "fp32", "k_pairing": "interleaved", "k_slice": "last", "rope_dims": 64, "ape": True,
        "round_ape": "none", "overlap": True, "round_pool_sum": "none",
    },
    "queries": {
        "compute": "fp32", "round_q": "bf16", "q_pairing": "interleaved", "q_slice": "last", "rope_dims": 64,
        "round_gate": "none",
    },
    "logits": {"compute": "fp32", "relu": True, "round_dot": "none", "round_product": "none", "round_score": "none"},
    "topk": {"ties": "lower"},
}  # fmt: skip
"""Recipe fields for which a step's kernel has only one value."""
BF16_ONLY: dict[str, tuple[str, ...]] = {
    "keys": ("round_pool", "round_k_norm", "round_k_rope", "round_k_hadamard"),
    "queries": ("round_q_rope", "round_q_hadamard"),
    "logits": (),
    "topk": (),
}
"""Roundings that a step's kernel can do to bf16 or not at all."""


def kernel_format(fmt: Storage | None) -> dict[str, Any]:
    """The kernels' arguments for a storage format; ValueError names what no kernel stores."""
    if fmt is None:
        raise ValueError("unquantised values have no cache format")
    if isinstance(fmt, CustomFormat):
        raise ValueError(f"no kernel stores {fmt}")
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
