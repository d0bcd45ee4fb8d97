"""The bytes of a key-cache page, in plain torch: the layout every kernel here must agree with.

Letters: P pages, N entries, D = 128 dims of an index key. An entry is one compressed key (four tokens).

A page holds 64 entries. Slot s lives in page s // 64 at row s % 64; slot -1 means "do not store". Pages are
uint8 [P, page_bytes] and *planar*: first the values of all 64 entries, then the scales of all 64 entries.

=======  ===========  ==================================================  =============================
format   page bytes   values                                              scales
=======  ===========  ==================================================  =============================
e4m3     8448         64 x 128 bytes                                      64 x 1 fp32 (little endian)
bf16     16384        64 x 128 x 2 bytes                                  none
e2m1     4352         64 x 64 bytes, low nibble = the even dim            64 x 4 ue8m0, one per 32 dims
=======  ===========  ==================================================  =============================

This is the layout DeepGEMM's `fp8_paged_mqa_logits` reads (its cache argument [P, 64, 1, 132] names the size
of an entry, not the place of its scale). Two layouts with the same sizes are *not* this one:
token-interleaved (128 value bytes followed by 4 scale bytes) and 16 x 16 pre-shuffled tiles.

Codes travel as float8_e4m3fn, bfloat16 or packed uint8 (e2m1), so a tensor's dtype names its format; scales
travel as fp32 [...], None and uint8 [..., 4].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcheck.refimpl.formats import E2M1_BLOCK, decode_e2m1, decode_e8m0

HEAD_DIM = 128
"""Dims of an index query or key; fixed in every V4 checkpoint and in these kernels."""

ENTRIES_PER_PAGE = 64
"""Entries of one cache page, all formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """Sizes of one cache format, in bytes.

    value_bytes and scale_bytes are per entry; codes_dtype and codes_width describe the codes of one entry as
    a torch row.
    """

    name: str
    value_bytes: int
    scale_bytes: int
    codes_dtype: torch.dtype
    codes_width: int

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one entry: values and scales."""
        return self.value_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of 64 entries."""
        return ENTRIES_PER_PAGE * self.bytes_per_entry

    @property
    def scales_offset(self) -> int:
        """Byte of a page where its scales begin."""
        return ENTRIES_PER_PAGE * self.value_bytes


PAGE_FORMATS = {
    "e4m3": PageFormat(name="e4m3", value_bytes=128, scale_bytes=4, codes_dtype=torch.float8_e4m3fn, codes_width=128),
    "bf16": PageFormat(name="bf16", value_bytes=256, scale_bytes=0, codes_dtype=torch.bfloat16, codes_width=128),
    "e2m1": PageFormat(name="e2m1", value_bytes=64, scale_bytes=4, codes_dtype=torch.uint8, codes_width=64),
}


def page_format(fmt: str | PageFormat) -> PageFormat:
    """The PageFormat named `fmt`. Raises ValueError for an unknown name."""
    if isinstance(fmt, PageFormat):
        return fmt
    if fmt not in PAGE_FORMATS:
        raise ValueError(f"page format is {fmt!r}, expected one of {', '.join(PAGE_FORMATS)}")
    return PAGE_FORMATS[fmt]


def allocate_pages(fmt: str | PageFormat, pages: int, device: torch.device | str = "cpu") -> Tensor:
    """Zeroed pages, uint8 [pages, page_bytes], on `device`."""
    return torch.zeros(pages, page_format(fmt).page_bytes, dtype=torch.uint8, device=device)


def check_pages(pages: Tensor, fmt: PageFormat) -> None:
    """Raise ValueError unless `pages` is a pool of this format that the kernels can address."""
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != fmt.page_bytes:
        raise ValueError(
            f"{fmt.name} pages are {pages.dtype} {list(pages.shape)}, expected torch.uint8 [pages, {fmt.page_bytes}]"
        )
    if pages.stride(1) != 1 or pages.stride(0) % 4 or pages.storage_offset() % 4:
        raise ValueError(f"{fmt.name} pages have strides {pages.stride()}, expected bytes in order, aligned to 4")


def write_entries(
    pages: Tensor, fmt: str | PageFormat, slots: Tensor, codes: Tensor, scales: Tensor | None = None
) -> None:
    """Write entries to their slots, in place.

    pages uint8 [P, page_bytes]; slots integer [N], -1 is skipped; codes [N, codes_width] in the format's
    dtype (uint8 is taken as the bytes of an e4m3 row); scales fp32 [N] (e4m3), uint8 [N, 4] (e2m1) or None
    (bf16). Raises ValueError on other shapes and on a slot outside the pool.
    """
    form = page_format(fmt)
    check_pages(pages, form)
    slots = _checked_slots(pages, slots)
    values = _as_bytes(codes, form, len(slots))
    kept = slots >= 0
    page, row = slots[kept] // ENTRIES_PER_PAGE, slots[kept] % ENTRIES_PER_PAGE
    value_plane, scale_plane = _planes(pages, form)
    value_plane[page, row] = values[kept]
    if not form.scale_bytes:
        if scales is not None:
            raise ValueError(f"{form.name} entries have no scales, expected scales=None")
        return
    scale_dtype, scale_shape = (torch.float32, [len(slots)]) if form.name == "e4m3" else (torch.uint8, [len(slots), 4])
    if scales is None or scales.dtype != scale_dtype or list(scales.shape) != scale_shape:
        found = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ValueError(f"{form.name} scales are {found}, expected {scale_dtype} {scale_shape}")
    scale_plane[page, row] = scales.contiguous().view(torch.uint8).reshape(len(slots), form.scale_bytes)[kept]


def read_entries(pages: Tensor, fmt: str | PageFormat, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of the given slots, as `write_entries` takes them (e4m3 codes as float8_e4m3fn).

    pages uint8 [P, page_bytes]; slots integer of any shape [...]. A slot of -1 has nothing to read:
    ValueError.
    """
    form = page_format(fmt)
    check_pages(pages, form)
    shape = slots.shape
    flat = _checked_slots(pages, slots.reshape(-1))
    if bool((flat < 0).any()):
        raise ValueError("a slot to read is -1, expected slots that were stored")
    page, row = flat // ENTRIES_PER_PAGE, flat % ENTRIES_PER_PAGE
    value_plane, scale_plane = _planes(pages, form)
    codes = value_plane[page, row].view(form.codes_dtype).reshape(*shape, form.codes_width)
    if not form.scale_bytes:
        return codes, None
    raw = scale_plane[page, row]
    if form.name == "e4m3":
        return codes, raw.view(torch.float32).reshape(shape)
    return codes, raw.reshape(*shape, 4)


def dequantise(codes: Tensor, scales: Tensor | None, fmt: str | PageFormat) -> Tensor:
    """The numbers that codes and scales stand for: fp32 [..., 128].

    codes [..., codes_width] (uint8 is accepted for e4m3 bytes); scales fp32 [...] (e4m3; None means 1, for a
    query whose scale is folded into its gate), uint8 [..., 4] (e2m1), None (bf16). ue8m0 byte b is 2^(b-127),
    255 is NaN (OCP Microscaling Formats 1.0).
    """
    form = page_format(fmt)
    if form.name == "bf16":
        return codes.float()
    if form.name == "e4m3":
        values = codes.view(torch.float8_e4m3fn).float()
        return values if scales is None else values * scales[..., None]
    if scales is None:
        raise ValueError("e2m1 codes come without scales, expected uint8 [..., 4]")
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return decode_e2m1(nibbles) * decode_e8m0(scales).repeat_interleave(E2M1_BLOCK, dim=-1)


def _planes(pages: Tensor, form: PageFormat) -> tuple[Tensor, Tensor]:
    """Views of a pool by entry: values uint8 [P, 64, value_bytes], scales uint8 [P, 64, scale_bytes]."""
    shape = (pages.shape[0], ENTRIES_PER_PAGE)
    values, scales = pages[:, : form.scales_offset], pages[:, form.scales_offset :]
    return values.view(*shape, form.value_bytes), scales.view(*shape, form.scale_bytes)


def _checked_slots(pages: Tensor, slots: Tensor) -> Tensor:
    if slots.dtype not in (torch.int32, torch.int64) or slots.ndim != 1:
        raise ValueError(f"slots are {slots.dtype} {list(slots.shape)}, expected int64 [entries]")
    capacity = pages.shape[0] * ENTRIES_PER_PAGE
    if slots.numel() and (int(slots.max()) >= capacity or int(slots.min()) < -1):
        raise ValueError(f"slots run from {int(slots.min())} to {int(slots.max())}, expected -1 or 0..{capacity - 1}")
    return slots.long()


def _as_bytes(codes: Tensor, form: PageFormat, entries: int) -> Tensor:
    dtypes = (form.codes_dtype, torch.uint8) if form.name == "e4m3" else (form.codes_dtype,)
    if codes.dtype not in dtypes or list(codes.shape) != [entries, form.codes_width]:
        raise ValueError(
            f"{form.name} codes are {codes.dtype} {list(codes.shape)}, expected "
            f"{form.codes_dtype} {[entries, form.codes_width]}"
        )
    return codes.contiguous().view(torch.uint8)
