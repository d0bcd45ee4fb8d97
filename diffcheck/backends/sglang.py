"""SGLang's indexer kernels as steps: keys, queries and top-k.

SGLang compiles them with nvcc when they are first called. They are fixed functions: every field of a recipe that a
kernel has built in is compared with the preset that describes it (`sglang-fp8`, `sglang-fp4`), and what differs is
refused. Free are only what enters as data: the RoPE table, eps, and the projections.

Keys take two kernels. The *pool* reads rows |kv overlap|kv|gate overlap|gate| of 128 fp32 each, which is the order of
our `kv_gate`, and ape as 4 overlap rows above 4 own rows. A *plan* has one line of four words per entry:

    word 0  tokens up to and including the entry's last one, 4 * (entry + 1)
    word 1  low half: row of that token in this call's input; high half: how many of the eight slots come from the
            state kept between calls
    word 2, 3  pages of that state

Rows are 16 bit wide, so long requests go in parts; each part is given the window before its first entry again, and
no slot ever comes from the state. The *store* (norm, RoPE, Hadamard, quantise, write) reads the same plan: the RoPE
position is word 0 less 4, and the slot is looked up by the token's row.

Top-k comes in two versions. Both return an unordered set, and either is right about equal scores.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..formats import Format
from ..packages import installed_version, present
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerConfig
from ..refimpl.compressor import WINDOW
from ..stages import GRAPH, angle_table
from .base import KeyCache, fixed_refusal, shown
from .emulated import shuffled_slots

if TYPE_CHECKING:
    from ..kernels import QuantisedQuery

TopkVersion = Literal["v2", "v1"]

MODULE = "sglang.kernels.ops.attention.dsv4"
TESTED = "0.5.23"
"""Version of SGLang that this was written for."""
SYMBOLS = (
    "CompressorPrefillPlan",
    "compress_forward",
    "compress_norm_rope_store",
    "fused_q_indexer_rope_hadamard_fp4_quant",
    "fused_q_indexer_rope_hadamard_quant",
    "plan_topk_v2",
    "topk_transform_paged",
    "topk_transform_paged_v2",
)
"""What is called of it."""

PART = 8192
"""Entries pooled and stored by one call; at most 16383, since a plan numbers the input rows with 16 bits."""
V2_K = (512, 1024)
V1_LARGEST_K = 1024
# scores are read 16 bytes at a time
SCORE_ALIGNMENT = 4


class SglangKernels:
    """`compress_forward` + `compress_norm_rope_store`, the fused query kernels, and one of the two top-k versions."""

    steps: tuple[str, ...] = ("keys", "queries", "topk")

    def __init__(self, topk_version: TopkVersion = "v2") -> None:
        self.topk_version = topk_version
        self.name: str = "sglang" if topk_version == "v2" else f"sglang-topk-{topk_version}"

    def unavailable(self, device: str) -> str | None:
        """None on CUDA with SGLang and what it compiles with."""
        if not present("sglang"):
            return "package sglang is missing: pip install sglang"
        if device != "cuda":
            return "needs a CUDA device"
        try:
            module = _sglang()
        except Exception as error:  # whatever an import can raise: missing dependencies, libraries, symbols
            return f"sglang cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        missing = [name for name in SYMBOLS if not hasattr(module, name)]
        if missing:
            return f"sglang {self.version()} has no {', '.join(missing)} in {MODULE}: pip install sglang=={TESTED}"
        return _cannot_compile()

    def version(self) -> str | None:
        """Version of the installed package."""
        unknown = "unknown (importable without metadata)" if present("sglang") else None
        return installed_version("sglang") or unknown

    def refusal(self, step: str, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Compare the fields that the step's kernels have built in with what the presets say about them."""
        if step == "topk":
            return self._topk_refusal(recipe.k)
        if config.index_head_dim != 128 or recipe.rope_dims != 64:
            return f"SGLang needs heads of 128 with 64 RoPE dims, not {config.index_head_dim} with {recipe.rope_dims}"
        presets = [Recipe.preset(name, config) for name in ("sglang-fp8", "sglang-fp4")]
        name = "k_format" if step == "keys" else "q_format"
        built_in = next((preset for preset in presets if getattr(preset, name) == getattr(recipe, name)), None)
        if built_in is None:
            known = " or ".join(shown(getattr(preset, name)) for preset in presets)
            return f"{name} is {shown(getattr(recipe, name))} and SGLang's kernels only have {known}"
        return fixed_refusal(recipe, {field: getattr(built_in, field) for field in BUILT_IN[step]}, "SGLang's kernel")

    def _topk_refusal(self, k: int) -> str | None:
        if self.topk_version == "v2" and k not in V2_K:
            return f"SGLang's top-k v2 supports k = 512 or 1024, this is k = {k}"
        if self.topk_version == "v1" and k > V1_LARGEST_K:
            return f"SGLang's top-k v1 supports k up to {V1_LARGEST_K}, this is k = {k}"
        return None

    def store_keys(self, pipeline: Pipeline, recipe: Recipe) -> KeyCache:
        """Pool and store all entries, into pages in shuffled order."""
        from .. import kernels

        assert isinstance(recipe.k_format, Format), "refused before"
        call, device, fmt = pipeline.call, pipeline.call.x.device, recipe.k_format.element
        assert call.start == 0, "a run starts at token 0"
        sglang = _sglang()
        entries = call.x.shape[0] // WINDOW
        table, slots = shuffled_slots(entries, device)
        pages = kernels.allocate_pages(fmt, table.shape[1], device)
        rows = pipeline.stage(recipe, "kv_gate")
        half = call.config.index_head_dim
        ape = call.weights.ape.float()
        ape = torch.cat((ape[:, :half], ape[:, half:])).contiguous()
        norm = call.weights.norm.float().contiguous()
        angles = _angles(recipe, "k", WINDOW * entries, device)
        # nothing reads the state, but the kernel wants one
        state = torch.zeros(1, WINDOW, rows.shape[1], device=device)
        for first_token, last_token, words in plans(entries):
            plan = sglang.CompressorPrefillPlan(
                WINDOW,
                words.to(device).view(torch.uint8),
                torch.empty(0, 8, dtype=torch.uint8, device=device),
            )
            pooled = sglang.compress_forward(
                state, rows[first_token:last_token].contiguous(), ape, plan, head_dim=half, compress_ratio=WINDOW
            )
            sglang.compress_norm_rope_store(
                pooled,
                plan,
                norm_weight=norm,
                norm_eps=recipe.eps,
                freq_cis=angles,
                # the slot of each token's entry; the plan picks the last token's
                out_loc=slots[first_token // WINDOW : last_token // WINDOW].repeat_interleave(WINDOW),
                kvcache=pages,
                page_size=kernels.ENTRIES_PER_PAGE,
                use_fp4=fmt == "e2m1",
            )
        return KeyCache(pages=pages, block_table=table, slots=slots, fmt=fmt)

    def quantise_queries(self, pipeline: Pipeline, recipe: Recipe) -> QuantisedQuery:
        """The fused query kernel on the projections of all query rows.

        The fp8 kernel gives back its scales only inside the gates. It runs a second time on gates of 1, which gives the
        scales themselves, also of heads whose gate is 0.
        """
        from .. import kernels

        assert isinstance(recipe.q_format, Format), "refused before"
        device = pipeline.call.x.device
        sglang = _sglang()
        q, gate = (pipeline.stage(recipe, name).contiguous() for name in ("q", "gate_gemm"))
        positions = pipeline.queries.to(device)
        angles = _angles(recipe, "q", int(positions.max()) + 1 if len(positions) else 1, device)
        scale = pipeline.call.config.gate_scale
        if recipe.q_format.element == "e2m1":
            quantise = sglang.fused_q_indexer_rope_hadamard_fp4_quant
            (codes, packed), gates = quantise(q, gate, scale, angles, positions)
            scales = packed.unsqueeze(-1).view(torch.uint8)  # four ue8m0 bytes in an int32, the lowest block first
            return kernels.QuantisedQuery(codes=codes.view(torch.uint8), scales=scales, gate=gates.squeeze(-1))
        quantise = sglang.fused_q_indexer_rope_hadamard_quant
        codes, gates = quantise(q, gate, scale, angles, positions)
        _, scales = quantise(q, torch.ones_like(gate), 1.0, angles, positions)
        return kernels.QuantisedQuery(codes=codes, scales=scales.squeeze(-1), gate=gates.squeeze(-1))

    def topk(self, scores: Tensor, visible: Tensor, k: int) -> Tensor:
        """The selection kernel. It writes k places a row; with fewer entries than k, those beyond stay empty."""
        from .. import kernels

        rows, entries = scores.shape
        if not rows or not entries:
            return torch.empty(rows, min(k, entries), dtype=torch.int64, device=scores.device)
        sglang = _sglang()
        lengths = visible.to(torch.int32).contiguous()
        found = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
        page = kernels.ENTRIES_PER_PAGE
        if self.topk_version == "v2":
            plan = sglang.plan_topk_v2(lengths)
            sglang.topk_transform_paged_v2(_aligned(scores), lengths, None, found, page, plan)
        else:
            # entries in page order, so that the slots are the entries
            table = torch.arange(-(-entries // page), dtype=torch.int32, device=scores.device).repeat(rows, 1)
            sglang.topk_transform_paged(_aligned(scores), lengths, table, torch.empty_like(found), page, found)
        return found[:, :entries].long()


FREE = frozenset(side + name for side in ("q_", "k_") for name in ("theta", "yarn", "mscale")) | {
    "round_rope_table",
    "eps",
}
"""Recipe fields that reach the kernels as data."""


def _fields(*stages: str) -> tuple[str, ...]:
    read = dict.fromkeys(field for stage in stages for field in GRAPH[stage].fields)
    return ("compute", *(field for field in read if field not in FREE))


BUILT_IN: dict[str, tuple[str, ...]] = {
    "keys": _fields("pool", "k_norm", "k_rope", "k_hadamard", "k_quant"),
    # the kernel takes q and the gates' projection in bf16
    "queries": ("round_q", "round_gate_gemm", *_fields("q_rope", "q_hadamard", "q_quant", "gate")),
}
"""Recipe fields for which a step's kernels have only one value."""


def plans(entries: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first token, token after the last, plan int32 [n, 4]) of each part of the entries; see the module."""
    for first in range(0, entries, PART):
        entry = torch.arange(first, min(first + PART, entries), dtype=torch.int32)
        start = max(first - 1, 0)
        zero = torch.zeros_like(entry)
        words = torch.stack((WINDOW * (entry + 1), WINDOW * (entry - start) + WINDOW - 1, zero, zero), dim=1)
        yield WINDOW * start, WINDOW * (first + len(entry)), words


def _sglang() -> Any:
    return import_module(MODULE)


def _cannot_compile() -> str | None:
    if not present("tvm_ffi"):
        return "package tvm_ffi is missing, SGLang loads its kernels with it: pip install apache-tvm-ffi"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):
        return "nvcc is missing, SGLang compiles its kernels on first use: install the CUDA toolkit or set CUDA_HOME"
    return None


def _angles(recipe: Recipe, side: Literal["q", "k"], length: int, device: torch.device) -> Tensor:
    """complex64 [length, 32]: cos + i sin of each token position."""
    return torch.complex(*angle_table(recipe, side, torch.arange(length))).to(device)


def _aligned(scores: Tensor) -> Tensor:
    """The scores in fp32, every row on a 16-byte boundary; the shape stays, since the kernels choose a path by it."""
    scores = scores.float()
    rows, entries = scores.shape
    if scores.stride() == (entries, 1) and entries % SCORE_ALIGNMENT == 0 and scores.data_ptr() % 16 == 0:
        return scores
    room = scores.new_full((rows, -(-entries // SCORE_ALIGNMENT) * SCORE_ALIGNMENT), -torch.inf)
    room[:, :entries] = scores
    return room[:, :entries]
