"""The emulation: any recipe in plain torch, as a backend of its own and as stand-in for steps that a chain lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..custom import CustomFormat, Storage
from ..formats import Format, quantise
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import STAGES, IndexerConfig, Trace
from ..refimpl.formats import E2M1_VALUES
from ..refimpl.scoring import select_topk
from ..version import __version__
from .base import STEPS, KeyCache

if TYPE_CHECKING:
    from ..kernels import QuantisedQuery


class EmulatedBackend:
    """Runs the stage pipeline; by definition without any kernel error."""

    name: str = "emulated"
    stages: tuple[str, ...] = STAGES

    def unavailable(self, device: str) -> str | None:
        """Never: torch is all it needs."""
        return None

    def version(self) -> str | None:
        """This package's own version."""
        return __version__

    def refusal(self, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Never: every recipe can be emulated."""
        return None

    def run(self, pipeline: Pipeline, recipe: Recipe) -> Trace:
        """All stages of the recipe."""
        return pipeline.trace(recipe)


class EmulatedKernels:
    """The steps in plain torch: pages and codes from the emulated stages, products and selection exact."""

    name: str = "emulated"
    steps: tuple[str, ...] = STEPS

    def unavailable(self, device: str) -> str | None:
        """Never."""
        return None

    def version(self) -> str | None:
        """This package's own version."""
        return __version__

    def refusal(self, step: str, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Only what no cache page or code can hold."""
        formats = {"keys": (recipe.k_format,), "queries": (recipe.q_format,)}.get(step, ())
        return next((reason for fmt in formats if (reason := not_storable(fmt))), None)

    def store_keys(self, pipeline: Pipeline, recipe: Recipe) -> KeyCache:
        """The emulated keys, encoded and written to pages in shuffled order."""
        from .. import kernels

        assert isinstance(recipe.k_format, Format), "refused before"
        keys = pipeline.stage(recipe.replace(k_format=None), "k_quant")
        codes, scales = encode(keys, recipe.k_format)
        table, slots = shuffled_slots(len(codes), codes.device)
        pages = kernels.allocate_pages(recipe.k_format.element, table.shape[1], codes.device)
        kernels.write_entries(pages, recipe.k_format.element, slots, codes, scales)
        return KeyCache(pages=pages, block_table=table, slots=slots, fmt=recipe.k_format.element)

    def quantise_queries(self, pipeline: Pipeline, recipe: Recipe) -> QuantisedQuery:
        """The emulated queries, encoded, and gates with an e4m3 query's scale folded in."""
        from .. import kernels

        assert isinstance(recipe.q_format, Format), "refused before"
        codes, scales = encode(pipeline.stage(recipe.replace(q_format=None), "q_quant"), recipe.q_format)
        gate = pipeline.stage(recipe, "gate").float()
        if recipe.q_format.element == "e4m3" and scales is not None:
            gate = gate * scales
        return kernels.QuantisedQuery(codes=codes, scales=scales, gate=gate)

    def paged_logits(self, query: QuantisedQuery, cache: KeyCache, visible: Tensor) -> Tensor:
        """fp32 products of the dequantised codes, summed over heads."""
        from .. import kernels

        keys = kernels.dequantise(*kernels.read_entries(cache.pages, cache.fmt, cache.slots), cache.fmt)
        scales = query.scales if query.fmt == "e2m1" else None
        queries = kernels.dequantise(query.codes, scales, query.fmt)
        scores = torch.empty(len(queries), len(keys), device=keys.device)
        for row in range(len(queries)):
            scores[row] = (query.gate[row, :, None] * (queries[row] @ keys.T).relu()).sum(0)
        hidden = torch.arange(len(keys), device=keys.device) >= visible[:, None]
        return scores.masked_fill(hidden, -torch.inf)

    def topk(self, scores: Tensor, visible: Tensor, k: int) -> Tensor:
        """Exact, lower index first among equals."""
        return select_topk(scores, visible.long(), k)


def not_storable(fmt: Storage | None) -> str | None:
    """Why a format has no page layout here; None for e4m3/128, e2m1/32/ue8m0 and bf16."""
    if fmt is None:
        return "unquantised values have no cache format"
    if isinstance(fmt, CustomFormat):
        return f"no cache page holds {fmt}"
    known = {"bf16": True, "e4m3": fmt.block == 128, "e2m1": fmt.block == 32 and fmt.scale == "ue8m0"}
    return None if known.get(fmt.element) else f"no cache page holds {fmt}"


def encode(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """(codes, scales) of x [..., 128] as the page layouts want them.

    bf16: (bf16, None). e4m3: (float8_e4m3fn, fp32 [...]). e2m1: (two codes a byte, low nibble first, uint8 [..., 64];
    e8m0 bytes [..., 4]).
    """
    if fmt.plain:
        return x.bfloat16(), None
    grid, scales = quantise(x, fmt)
    if fmt.element == "e4m3":
        return grid.to(torch.float8_e4m3fn), scales.squeeze(-1)
    table = torch.tensor(E2M1_VALUES, device=x.device)
    codes = torch.searchsorted(table, grid.abs().contiguous()) + 8 * torch.signbit(grid).long()
    low, high = codes.nan_to_num(0).unflatten(-1, (-1, 2)).unbind(-1)
    exponent = torch.where(scales.isnan(), 255, torch.frexp(scales)[1] + 126)
    return (low | (high << 4)).to(torch.uint8), exponent.to(torch.uint8)


def shuffled_slots(entries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(block table int32 [1, pages] with shuffled page ids, slot int64 of each entry)."""
    from ..kernels import ENTRIES_PER_PAGE

    count = -(-max(entries, 1) // ENTRIES_PER_PAGE)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    entry = torch.arange(entries, device=device)
    slots = table[entry // ENTRIES_PER_PAGE].long() * ENTRIES_PER_PAGE + entry % ENTRIES_PER_PAGE
    return table[None], slots
