"""The bytes of a page, one by one, and the plain torch reader and writer."""

import struct

import pytest
import torch

from diffcheck.kernels import PAGE_FORMATS, allocate_pages, dequantise, read_entries, write_entries

SIZES = {"e4m3": (132, 8448), "bf16": (256, 16384), "e2m1": (68, 4352)}


def random_entries(fmt, count):
    if fmt == "bf16":
        return torch.randn(count, 128).bfloat16(), None
    if fmt == "e4m3":
        return torch.randn(count, 128).to(torch.float8_e4m3fn), torch.rand(count)
    return torch.randint(256, (count, 64), dtype=torch.uint8), torch.randint(100, 150, (count, 4), dtype=torch.uint8)


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_sizes(fmt):
    form = PAGE_FORMATS[fmt]
    assert (form.bytes_per_entry, form.page_bytes) == SIZES[fmt]
    assert list(allocate_pages(fmt, 3).shape) == [3, form.page_bytes]


def test_e4m3_bytes():
    pages = allocate_pages("e4m3", 2)
    codes = torch.arange(128, dtype=torch.uint8)[None]
    write_entries(pages, "e4m3", torch.tensor([64 + 5]), codes, torch.tensor([0.75]))
    page = bytearray(8448)
    page[5 * 128 : 6 * 128] = bytes(range(128))
    page[64 * 128 + 5 * 4 : 64 * 128 + 6 * 4] = struct.pack("<f", 0.75)
    assert bytes(pages[1].tolist()) == bytes(page)
    assert not pages[0].any()


def test_e2m1_bytes():
    pages = allocate_pages("e2m1", 1)
    values = torch.tensor([[1.0, -6.0] + [0.0] * 30 + [0.5] * 96])  # codes 2, 15, 0 .., 1 ..
    codes = torch.tensor([[2 | 15 << 4] + [0] * 15 + [0x11] * 48], dtype=torch.uint8)
    scales = torch.tensor([[127, 128, 126, 127]], dtype=torch.uint8)
    write_entries(pages, "e2m1", torch.tensor([63]), codes, scales)
    page = bytearray(4352)
    page[63 * 64 : 64 * 64] = bytes([0xF2] + [0] * 15 + [0x11] * 48)
    page[64 * 64 + 63 * 4 :] = bytes([127, 128, 126, 127])
    assert bytes(pages[0].tolist()) == bytes(page)
    per_block = torch.tensor([1.0, 2.0, 0.5, 1.0]).repeat_interleave(32)
    assert torch.equal(dequantise(codes, scales, "e2m1"), values * per_block)


def test_bf16_bytes():
    pages = allocate_pages("bf16", 1)
    write_entries(pages, "bf16", torch.tensor([1]), torch.full((1, 128), 1.5, dtype=torch.bfloat16))
    page = bytearray(16384)
    page[256:512] = struct.pack("<H", 0x3FC0) * 128
    assert bytes(pages[0].tolist()) == bytes(page)


@pytest.mark.parametrize("fmt", PAGE_FORMATS)
def test_round_trip_skips_minus_one(fmt, device):
    slots = torch.randperm(256)[:70]
    slots[[3, 50]] = -1
    codes, scales = random_entries(fmt, 70)
    pages = allocate_pages(fmt, 4, device)
    write_entries(pages, fmt, slots.to(device), codes.to(device), None if scales is None else scales.to(device))
    kept = slots >= 0
    got_codes, got_scales = read_entries(pages, fmt, slots[kept].to(device))
    assert torch.equal(got_codes.cpu().view(torch.uint8), codes[kept].view(torch.uint8))
    assert scales is None or torch.equal(got_scales.cpu(), scales[kept])
    unused = torch.tensor(sorted(set(range(256)) - set(slots.tolist())), device=device)
    assert not read_entries(pages, fmt, unused)[0].view(torch.uint8).any()


def test_dequantise_keeps_nan():
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    poisoned = dequantise(codes, torch.tensor([[127, 255, 127, 127]], dtype=torch.uint8), "e2m1")
    assert poisoned.isnan().flatten().tolist() == [32 <= d < 64 for d in range(128)]
    assert dequantise(torch.full((1, 128), 0x7F, dtype=torch.uint8), torch.ones(1), "e4m3").isnan().all()


def test_errors_name_what_was_found():
    pages = allocate_pages("e4m3", 1)
    codes, scales = random_entries("e4m3", 1)
    with pytest.raises(ValueError, match="expected one of e4m3, bf16, e2m1"):
        allocate_pages("fp8", 1)
    with pytest.raises(ValueError, match=r"slots run from 64 to 64, expected -1 or 0\.\.63"):
        write_entries(pages, "e4m3", torch.tensor([64]), codes, scales)
    with pytest.raises(ValueError, match="a slot to read is -1"):
        read_entries(pages, "e4m3", torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"expected torch.uint8 \[pages, 16384\]"):
        read_entries(pages, "bf16", torch.tensor([0]))
    with pytest.raises(ValueError, match="scales are None"):
        write_entries(pages, "e4m3", torch.tensor([0]), codes, None)
    with pytest.raises(ValueError, match="codes are"):
        write_entries(pages, "e4m3", torch.tensor([0]), codes[:, :64], scales)
