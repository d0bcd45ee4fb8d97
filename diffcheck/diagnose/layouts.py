"""Cache pages in every layout that public readers and writers have used or confused.

A page holds 64 entries of 128 dims. *planar* is what the kernels here read (`diffcheck.kernels.layout`): the values of
all entries, then the scales of all entries. *token-interleaved*: each entry's values and scales together. *tiled*: the
64 x W bytes (or bf16 elements) of the values as 16 x 16 tiles, tile after tile, scales as in planar; `by column` has
the tiles of a column of the page one after another. Sizes are the same, so nothing but the numbers can tell.

Letters: P pages, E entries, W value bytes an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.layout import ENTRIES_PER_PAGE, HEAD_DIM, PAGE_FORMATS, PageFormat, dequantise

PLANAR = "planar"
_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A format and the order of its bytes; `name` is e.g. "e4m3 token-interleaved"."""

    format: str
    order: str
    split: Callable[[Tensor, PageFormat], tuple[Tensor, Tensor]]
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """Format and order."""
        return f"{self.format} {self.order}"


def _planar(pages: Tensor, form: PageFormat) -> tuple[Tensor, Tensor]:
    values, scales = pages[:, : form.scales_offset], pages[:, form.scales_offset :]
    shape = (len(pages), ENTRIES_PER_PAGE, -1)
    return values.reshape(shape), scales.reshape(len(pages), ENTRIES_PER_PAGE, form.scale_bytes)


def _interleaved(pages: Tensor, form: PageFormat) -> tuple[Tensor, Tensor]:
    rows = pages.reshape(len(pages), ENTRIES_PER_PAGE, form.bytes_per_entry)
    return rows[..., : form.value_bytes], rows[..., form.value_bytes :]


def _tiled(by_column: bool, transposed: bool = False) -> Callable[[Tensor, PageFormat], tuple[Tensor, Tensor]]:
    def split(pages: Tensor, form: PageFormat) -> tuple[Tensor, Tensor]:
        values, scales = _planar(pages, form)
        size = 2 if form.name == "bf16" else 1
        across = form.value_bytes // size // _TILE
        down = ENTRIES_PER_PAGE // _TILE
        if by_column:
            tiles = values.reshape(-1, across, down, _TILE, _TILE, size).transpose(1, 2)
        else:
            tiles = values.reshape(-1, down, across, _TILE, _TILE, size)
        if transposed:
            tiles = tiles.transpose(3, 4)
        # [P, down, across, row, column, bytes] -> rows of a page
        return tiles.permute(0, 1, 3, 2, 4, 5).reshape(len(pages), ENTRIES_PER_PAGE, form.value_bytes), scales

    return split


def _layouts() -> tuple[Layout, ...]:
    found = []
    for name, form in PAGE_FORMATS.items():
        found.append(Layout(format=name, order=PLANAR, split=_planar))
        if form.scale_bytes:
            found.append(Layout(format=name, order="token-interleaved", split=_interleaved))
        found.append(Layout(format=name, order="16x16 tiled", split=_tiled(by_column=False)))
        found.append(Layout(format=name, order="16x16 tiled by column", split=_tiled(by_column=True)))
        found.append(Layout(format=name, order="16x16 tiled, tiles transposed", split=_tiled(False, True)))
    found.append(Layout(format="fp16", order=PLANAR, split=_planar, dtype=torch.float16))
    return tuple(found)


LAYOUTS = _layouts()
"""All known layouts; planar ones first within a format."""


def layouts_of(page_bytes: int) -> list[Layout]:
    """Layouts whose pages have this many bytes; InputError where there is none."""
    found = [layout for layout in LAYOUTS if _form(layout).page_bytes == page_bytes]
    if not found:
        sizes = ", ".join(f"{form.page_bytes} ({form.name})" for form in PAGE_FORMATS.values())
        raise InputError(f"pages of {page_bytes} bytes, expected {sizes}: 64 entries of {HEAD_DIM} dims")
    return found


def _form(layout: Layout) -> PageFormat:
    return PAGE_FORMATS["bf16" if layout.format == "fp16" else layout.format]


def decode(pages: Tensor, slots: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """(keys fp32 [E, 128], scales fp32 [E, n] or None) of the entries in `slots` int64 [E], none of them negative."""
    form = _form(layout)
    page, row = slots // ENTRIES_PER_PAGE, slots % ENTRIES_PER_PAGE
    used, place = page.unique(return_inverse=True)
    values, scales = layout.split(pages[used].contiguous(), form)
    codes = values[place, row].contiguous()
    if form.name == "bf16":
        return codes.view(layout.dtype or torch.bfloat16).float(), None
    raw = scales[place, row].contiguous()
    if form.name == "e4m3":
        scale = raw.view(torch.float32).reshape(-1)
        return dequantise(codes.view(torch.float8_e4m3fn), scale, form), scale[:, None]
    return dequantise(codes, raw, form), torch.exp2(raw.float() - 127)
