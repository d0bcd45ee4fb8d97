"""Problems of the kernels that write: queries quantised, keys pooled and stored.

The error is the share of codes that differ from plain torch functions of the reference port, on a sample. bytes is
what must be read and written once; there are no matrix products, so no operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..refimpl.compressor import WINDOW, PoolState, pool_windows, rms_norm
from ..refimpl.rotation import apply_rope, hadamard, inverse_frequencies, rope_table
from .shapes import DIM, HEADS, Shape

SAMPLE = 512
DIFFERENT = 1e-3
"""Largest share of codes off by a rounding (bf16 keys are the finest grid)."""
EPS = 1e-6
THETA, ROPE_DIMS = 160000.0, 64

Run = Callable[[Any], Callable[[], Any]]
"""Returns the call to be timed."""


def runners(kind: str) -> dict[str, Run]:
    """Who can solve these problems here. Queries twice: rounded to bf16 after RoPE and after Walsh-Hadamard, as
    sglang-fp4 and trtllm-fp8 do, and in fp32 to the codes, as sglang-fp8 does.
    """
    if kind == "keys":
        return {"triton": lambda problem: problem.run}
    return {
        "triton": lambda problem: problem.prepared(rounded=True),
        "triton-fp32": lambda problem: problem.prepared(rounded=False),
    }


def _angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rope_table(positions, inverse_frequencies(THETA, ROPE_DIMS, None))
    return cos.cuda().contiguous(), sin.cuda().contiguous()


def _formats(fmt: str, side: str) -> Any:
    from ..presets import CHANGES

    preset = {"e4m3": "sglang-fp8", "bf16": "sglang-bf16", "e2m1": "sglang-fp4"}[fmt]
    return CHANGES[preset][side]


def _different(codes: Tensor, want: Tensor) -> float:
    return float((codes.view(torch.uint8) != want.view(torch.uint8)).double().mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """`rows` tokens of bf16 queries and fp32 gates; the query format of the preset with `fmt` keys."""

    shape: Shape
    fmt: str
    q: Tensor
    gate: Tensor
    cos: Tensor
    sin: Tensor

    measure = "different"
    limit = DIFFERENT
    operations = 0

    @staticmethod
    def make(shape: Shape, fmt: str, seed: int) -> Queries:
        """Gaussian queries at positions 0, 1, 2 .."""
        generator = torch.Generator("cuda").manual_seed(seed)
        q = torch.randn(shape.rows, HEADS, DIM, device="cuda", generator=generator).bfloat16()
        gate = torch.randn(shape.rows, HEADS, device="cuda", generator=generator)
        cos, sin = _angles(torch.arange(shape.rows))
        return Queries(shape=shape, fmt=fmt, q=q, gate=gate, cos=cos, sin=sin)

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one head's query."""
        from ..kernels import PAGE_FORMATS

        return PAGE_FORMATS[_formats(self.fmt, "q_format").element].bytes_per_entry

    @property
    def bytes(self) -> int:
        """q, gates and angles read; codes, scales and gates written."""
        return self.q.numel() * 2 + self.gate.numel() * (8 + self.bytes_per_entry) + self.cos.numel() * 8

    def prepared(self, *, rounded: bool) -> Callable[[], Any]:
        """The call that is timed. Raises ValueError if no preset works so."""
        if not rounded and _formats(self.fmt, "q_format").element == "e2m1":
            raise ValueError("no preset quantises e2m1 queries from fp32")
        return partial(self.run, rounded)

    def run(self, rounded: bool) -> tuple[Any, bool]:
        """The kernel's result, and whether it rounded to bf16 after RoPE and after Walsh-Hadamard."""
        from .. import kernels

        fmt = _formats(self.fmt, "q_format")
        query = kernels.quantise_query(
            self.q, self.gate, self.cos, self.sin, gate_scale=DIM**-0.5, fmt=fmt.element, ties=fmt.ties,
            round_bf16=("rope", "hadamard") if rounded else (),
        )  # fmt: skip
        return query, rounded

    def error(self, result: tuple[Any, bool]) -> float:
        """Share of bytes of the codes that differ, on the last tokens."""
        from ..backends.emulated import encode

        query, rounded = result
        part = slice(-min(SAMPLE, self.shape.rows), None)
        x = apply_rope(self.q[part].float(), self.cos[part].cpu(), self.sin[part].cpu())
        x = hadamard(x.bfloat16().float()).bfloat16().float() if rounded else hadamard(x)
        codes, _ = encode(x, _formats(self.fmt, "q_format"))
        return _different(query.codes[part], codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Projections of `rows` tokens, and pages in shuffled order for their entries."""

    shape: Shape
    fmt: str
    kv: Tensor
    gate: Tensor
    ape: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor
    entry: Tensor
    first_token: Tensor
    slots: Tensor
    pages: Tensor

    measure = "different"
    limit = DIFFERENT
    operations = 0

    @staticmethod
    def make(shape: Shape, fmt: str, seed: int) -> Keys:
        """Gaussian projections."""
        from .. import kernels

        generator = torch.Generator("cuda").manual_seed(seed)

        def gaussian(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", generator=generator)

        entries = shape.rows // WINDOW
        cos, sin = _angles(WINDOW * torch.arange(entries))
        pages = kernels.allocate_pages(fmt, -(-entries // kernels.ENTRIES_PER_PAGE), "cuda")
        return Keys(
            shape=shape, fmt=fmt, kv=gaussian(shape.rows, 2 * DIM), gate=gaussian(shape.rows, 2 * DIM),
            ape=gaussian(WINDOW, 2 * DIM), norm=1 + gaussian(DIM) / 8, cos=cos, sin=sin,
            entry=torch.arange(entries, device="cuda", dtype=torch.int32),
            first_token=torch.arange(0, shape.rows, WINDOW, device="cuda", dtype=torch.int32),
            slots=torch.randperm(entries, device="cuda", generator=generator), pages=pages,
        )  # fmt: skip

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one key with its scales."""
        from ..kernels import PAGE_FORMATS

        return PAGE_FORMATS[self.fmt].bytes_per_entry

    @property
    def bytes(self) -> int:
        """Projections, angles and slots read; entries written."""
        return self.kv.numel() * 8 + self.cos.numel() * 8 + len(self.slots) * (16 + self.bytes_per_entry)

    def run(self) -> Tensor:
        """The kernel, with SGLang's roundings: none."""
        from .. import kernels

        fmt = _formats(self.fmt, "k_format")
        kernels.store_key(
            self.kv, self.gate, self.ape, self.norm, self.cos, self.sin, self.first_token, self.entry, self.slots,
            self.pages, fmt=self.fmt, eps=EPS, round_bf16=(), ties=fmt.ties,
        )  # fmt: skip
        return self.pages

    def error(self, result: Tensor) -> float:
        """Share of bytes of the codes that differ, on the first entries."""
        from .. import kernels
        from ..backends.emulated import encode

        tokens = min(SAMPLE, len(self.slots)) * WINDOW
        kv, gate = self.kv[:tokens], self.gate[:tokens] + self.ape.repeat(tokens // WINDOW, 1)
        kv, gate, _ = PoolState.start(2 * DIM, "cuda").then(kv, gate)
        x = rms_norm(pool_windows(kv, gate), self.norm, EPS)
        x = hadamard(apply_rope(x, self.cos[: tokens // WINDOW].cpu(), self.sin[: tokens // WINDOW].cpu()))
        codes, _ = encode(x, _formats(self.fmt, "k_format"))
        stored, _ = kernels.read_entries(result, self.fmt, self.slots[: tokens // WINDOW])
        return _different(stored, codes)
