"""Problems of the logits and selection kernels, and who can solve them.

operations = 2 * H * D per visible (row, entry) pair
bytes      = the keys each request reads once, and fp32 scores (or int32 places) written once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shapes import DIM, HEADS, TOPK, Shape

SAMPLED_ROWS = 16
CALC_DIFF = 5e-6
MISSED = 0.005
"""Share of the exact k best that a selection may miss: DeepGEMM's accuracy exchanges a few at the k-th place."""

Run = Callable[["Problem"], Callable[[], Tensor]]
"""Prepares what is made once a step (plans, tables), and returns the call to be timed; ValueError: refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Random codes on the device."""

    shape: Shape
    fmt: str
    query: Any
    keys: Tensor
    key_scales: Tensor | None
    pages: Tensor | None
    block_table: Tensor | None
    visible: Tensor

    @staticmethod
    def make(shape: Shape, fmt: str, seed: int) -> Problem:
        """Codes of Gaussian values, as quantised by the format; pages of all requests in shuffled order."""
        from .. import kernels
        from ..backends.emulated import encode
        from ..presets import CHANGES

        generator = torch.Generator("cuda").manual_seed(seed)

        def gaussian(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", generator=generator)

        preset = {"e4m3": "sglang-fp8", "bf16": "sglang-bf16", "e2m1": "sglang-fp4"}[fmt]
        q_format, k_format = (CHANGES[preset][side] for side in ("q_format", "k_format"))
        q_codes, q_scales = encode(gaussian(shape.rows, HEADS, DIM), q_format)
        gate = gaussian(shape.rows, HEADS) * HEADS**-0.5
        if q_codes.dtype == torch.float8_e4m3fn and q_scales is not None:
            gate = gate * q_scales
        query = kernels.QuantisedQuery(codes=q_codes, scales=q_scales, gate=gate)
        total = shape.entries * (shape.rows if shape.paged else 1)
        parts = [encode(gaussian(min(1 << 20, total - first), DIM), k_format) for first in range(0, total, 1 << 20)]
        codes = torch.cat([c.view(torch.uint8) if c.dtype != torch.bfloat16 else c for c, _ in parts])
        keys = codes.view(torch.float8_e4m3fn) if fmt == "e4m3" else codes
        scales = None if parts[0][1] is None else torch.cat([s for _, s in parts if s is not None])
        pages = table = None
        if shape.paged:
            per_request = -(-shape.entries // kernels.ENTRIES_PER_PAGE)
            table = torch.randperm(shape.rows * per_request, device="cuda", generator=generator).to(torch.int32)
            table = table.view(shape.rows, per_request)
            entry = torch.arange(shape.entries, device="cuda")
            slots = table[:, entry // kernels.ENTRIES_PER_PAGE].long() * kernels.ENTRIES_PER_PAGE
            slots = (slots + entry % kernels.ENTRIES_PER_PAGE).flatten()
            pages = kernels.allocate_pages(fmt, table.numel(), "cuda")
            kernels.write_entries(pages, fmt, slots, keys, scales)
        return Problem(
            shape=shape, fmt=fmt, query=query, keys=keys, key_scales=scales, pages=pages, block_table=table,
            visible=shape.visible().cuda(),
        )  # fmt: skip

    @property
    def operations(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * HEADS * DIM * int(self.visible.sum())

    @property
    def bytes(self) -> int:
        """Least traffic with memory."""
        written = 4 * (TOPK * self.shape.rows if self.shape.selects else int(self.visible.sum()))
        return len(self.keys) * self.bytes_per_entry + written

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one key with its scales."""
        from ..kernels import PAGE_FORMATS

        return PAGE_FORMATS[self.fmt].bytes_per_entry

    @property
    def measure(self) -> str:
        """Name of the error."""
        return "missed" if self.shape.selects else "calc_diff"

    @property
    def limit(self) -> float:
        """Largest error of a right result."""
        return MISSED if self.shape.selects else CALC_DIFF

    def error(self, result: Tensor) -> float:
        """Of some rows, against fp64 products of the dequantised codes.

        Scores: 1 - 2<a,b>/(<a,a> + <b,b>) over visible entries. Selections: share of the k best that is missing.
        """
        rows = torch.linspace(0, self.shape.rows - 1, min(SAMPLED_ROWS, self.shape.rows)).long().tolist()
        difference = total = 0.0
        for row in rows:
            want = self._exact(row)
            if self.shape.selects:
                best = want.topk(min(TOPK, len(want))).indices
                places = result[row]
                difference += float((~torch.isin(best, places)).sum())
                total += len(best)
                valid = places[places >= 0]
                if len(valid) != len(best) or len(valid.unique()) != len(valid) or (valid >= len(want)).any():
                    return 1.0
            else:
                got = result[row, : len(want)].double()
                difference += float((got - want).square().sum())
                total += float(got.square().sum() + want.square().sum())
        return difference / total

    def _exact(self, row: int) -> Tensor:
        from .. import kernels

        first = row * self.shape.entries if self.shape.paged else 0
        seen = slice(first, first + int(self.visible[row]))
        scales = None if self.key_scales is None else self.key_scales[seen]
        keys = kernels.dequantise(self.keys[seen], scales, self.fmt).double()
        q_scales = self.query.scales[row] if self.query.fmt == "e2m1" else None
        q = kernels.dequantise(self.query.codes[row], q_scales, self.query.fmt).double()
        scores: Tensor = (self.query.gate[row].double()[:, None] * (q @ keys.T).relu()).sum(0)
        return scores


def runners(kind: str) -> dict[str, Run]:
    """Who can solve a kind of problem here."""
    from ..backends.deep_gemm import DeepGemmKernels

    selects = kind.startswith("select")
    found: dict[str, Run] = {"triton": _triton_select(True) if selects else _triton(True)}
    found["triton-fast"] = _triton_select(False) if selects else _triton(False)
    if not DeepGemmKernels().unavailable("cuda"):
        if selects:
            found |= {f"deep_gemm + {name}": _deep_gemm_select(topk) for name, topk in _selections().items()}
        else:
            found["deep_gemm"] = _deep_gemm
    return found


def _refuse_if_always_exact(p: Problem, exact: bool) -> None:
    if not exact and (p.fmt == "bf16" or (p.fmt == "e2m1" and p.pages is None)):
        raise ValueError("products of these keys are always added up in fp32")


def _triton(exact: bool) -> Run:
    def prepare(p: Problem) -> Callable[[], Tensor]:
        from .. import kernels

        _refuse_if_always_exact(p, exact)
        if p.pages is None or p.block_table is None:
            start = torch.zeros_like(p.visible)
            return lambda: kernels.ragged_logits(
                p.query, p.keys, p.key_scales, start, p.visible, fmt=p.fmt, exact=exact, fill=False
            )
        pages, table = p.pages, p.block_table
        return lambda: kernels.paged_logits(
            p.query, pages, table, p.visible, fmt=p.fmt, max_length=p.shape.entries, exact=exact, fill=False
        )

    return prepare


def _deep_gemm(p: Problem) -> Callable[[], Tensor]:
    """DeepGEMM's own functions: its schedule, made once a step, is not timed, and nothing is filled in."""
    from .. import kernels
    from ..backends.deep_gemm import as_tensor, load_package

    if p.fmt != "e4m3":
        raise ValueError("DeepGEMM has logits for e4m3 keys only on this GPU")
    deep_gemm, gate, visible = load_package(), p.query.gate, p.visible
    if p.pages is None or p.block_table is None:
        start, keys = torch.zeros_like(visible), (p.keys, p.key_scales)
        return lambda: as_tensor(deep_gemm.fp8_mqa_logits(p.query.codes, keys, gate, start, visible, False))
    cache = p.pages.view(len(p.pages), kernels.ENTRIES_PER_PAGE, 1, -1)
    lengths = visible[:, None].contiguous()
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, kernels.ENTRIES_PER_PAGE, deep_gemm.get_num_sms())
    codes, table, width = p.query.codes[:, None], p.block_table, p.shape.entries
    return lambda: as_tensor(
        deep_gemm.fp8_paged_mqa_logits(codes, cache, gate, lengths, table, plan, width, False)
    )  # fmt: skip


def _triton_select(exact: bool) -> Run:
    def prepare(p: Problem) -> Callable[[], Tensor]:
        from .. import kernels

        _refuse_if_always_exact(p, exact)
        if p.pages is None or p.block_table is None:
            start = torch.zeros_like(p.visible)
            return lambda: kernels.select(p.query, p.keys, p.key_scales, start, p.visible, TOPK, fmt=p.fmt, exact=exact)
        pages, table = p.pages, p.block_table
        return lambda: kernels.select_paged(
            p.query, pages, table, p.visible, TOPK, fmt=p.fmt, max_length=p.shape.entries, exact=exact
        )

    return prepare


def _selections() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Exact top-k functions to put behind another's logits: (scores, visible) -> places, -1 where empty."""
    from .. import kernels
    from ..backends.sglang import SglangKernels

    found = {"triton topk": lambda scores, visible: kernels.topk(scores, visible, TOPK)}
    sglang = SglangKernels(topk_version="v1")
    if not sglang.unavailable("cuda"):
        found["sglang topk v1"] = lambda scores, visible: sglang.topk(scores, visible, TOPK)
    return found


def _deep_gemm_select(topk: Callable[[Tensor, Tensor], Tensor]) -> Run:
    def prepare(p: Problem) -> Callable[[], Tensor]:
        scores = _deep_gemm(p)
        return lambda: topk(scores(), p.visible)

    return prepare
