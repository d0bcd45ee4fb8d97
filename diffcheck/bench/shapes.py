"""What is timed: `kind:ROWSxENTRIES`, or `kind:TOKENS` for the kernels that write queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError

HEADS, DIM, TOPK = 64, 128, 512
TWO_SIDED = ("prefill", "decode", "select", "select-decode")
TOKENS = ("queries", "keys")
EXPECTED = (
    "prefill:ROWSxENTRIES, select:ROWSxENTRIES, decode:REQUESTSxENTRIES, select-decode:REQUESTSxENTRIES, "
    "queries:TOKENS, keys:TOKENS, or one of these words alone"
)

DEFAULT_SHAPES = (
    "prefill:2048x8192", "prefill:4096x65536", "prefill:8192x32768",
    "decode:1x131072", "decode:32x16384", "decode:64x32768", "decode:256x8192",
    "select:8192x131072", "select-decode:64x32768",
    "queries:8192", "queries:65536", "keys:8192", "keys:65536",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A problem's size.

    prefill, select: `rows` query rows of one text over `entries` keys, row i seeing (i + 1) * entries // rows of them.
    decode, select-decode: one row of each of `rows` requests over `entries` entries of its own, in shuffled pages.
    queries, keys: `rows` tokens. H = 64 heads of D = 128; selections take k = 512.
    """

    kind: str
    rows: int
    entries: int = 0

    @staticmethod
    def parse(text: str) -> Shape:
        """Read one shape; InputError otherwise."""
        kind, _, size = text.partition(":")
        parts = size.split("x")
        sides = 2 if kind in TWO_SIDED else 1 if kind in TOKENS else 0
        if len(parts) != sides or not all(p.isdecimal() and int(p) for p in parts):
            raise InputError(f"--shapes: {text!r}, expected {EXPECTED}")
        if kind == "keys" and int(parts[0]) % 4:
            raise InputError(f"--shapes: {text!r}, expected a multiple of 4 tokens")
        return Shape(kind=kind, rows=int(parts[0]), entries=int(parts[1]) if sides == 2 else 0)

    @staticmethod
    def named_by(text: str) -> list[Shape]:
        """The one shape that a text is, or the default shapes of a kind; InputError otherwise."""
        if text in TWO_SIDED + TOKENS:
            return [shape for shape in map(Shape.parse, DEFAULT_SHAPES) if shape.kind == text]
        return [Shape.parse(text)]

    @property
    def paged(self) -> bool:
        """Whether keys lie in pages of several requests."""
        return self.kind in ("decode", "select-decode")

    @property
    def selects(self) -> bool:
        """Whether the result is a selection."""
        return self.kind.startswith("select")

    def visible(self) -> Tensor:
        """Entries that each row sees, int32 [rows]."""
        if self.paged:
            return torch.full((self.rows,), self.entries, dtype=torch.int32)
        return ((torch.arange(self.rows) + 1) * self.entries // self.rows).to(torch.int32)

    def __str__(self) -> str:
        return f"{self.kind}:{self.rows}" + (f"x{self.entries}" if self.entries else "")
