"""Number formats in general: element x block x scale, each constant once with its derivation.

A block format stores `block` consecutive values of the last dim as element codes and one scale:

    amax  = max(|x| of the block), at least `amax_floor`
    raw   = amax / max(element)
    scale = raw rounded to the scale's type: fp32 as it is; ue8m0 to a power of two by `rule` (ceil, floor, nearest);
            e4m3 in two levels, below
    code  = x / scale, clamped to +-max(element), rounded to the element's grid (`ties` even or down = toward zero)
    value = code * scale

An e4m3 scale alone spans 2^-9 to 448, so it comes with a second one, fp32, of the whole vector (the last dim: one
cached entry, or one head's query), as NVFP4 has it for a whole tensor. A cache is written entry by entry, so there is
no tensor whose amax could be known; per vector nothing needs calibrating, at 4 bytes an entry.

    vector = max(|x| of the vector), at least `amax_floor`, / (448 * max(element))
    scale  = e4m3(amax / max(element) / vector) * vector, the e4m3 value at least 2^-9; the block with the vector's
             largest magnitude gets 448

Some kernels multiply by 1/scale instead of dividing (`reciprocal`); with an fp32 scale that moves a few codes by one.
For power-of-two scales it makes no difference which of amax / max and amax * (1/max) is used: over all 2^23 mantissas
the resulting exponents are equal for e4m3 and e2m1.

A NaN or inf in a block makes the scale NaN and so the whole block, for every scale type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .refimpl.formats import E2M1_AMAX_FLOOR, E4M3_MAX, ceil_power_of_two

ScaleType = Literal["fp32", "ue8m0", "e4m3"]
ScaleRule = Literal["ceil", "floor", "nearest"]
Ties = Literal["even", "down"]


@dataclass(frozen=True, slots=True)
class Element:
    """A small number format: bits in storage, largest finite value, and its grid.

    For floats: `mantissa` bits and the exponent of the smallest normal value; below it the grid is that of the
    smallest binade. For integers (`mantissa` None) the grid is the integers.
    """

    name: str
    bits: int
    maximum: float
    mantissa: int | None
    min_exponent: int = 0


_ELEMENTS = (
    # e4m3fn: bias 7, S.1111.111 is NaN, so the largest is 1.75 * 2^8
    Element("e4m3", 8, 448.0, 3, -6),
    # e5m2: bias 15, exponent 31 is inf/NaN, so the largest is 1.75 * 2^15
    Element("e5m2", 8, 57344.0, 2, -14),
    # OCP FP6: no inf or NaN. e2m3: bias 1, 1.875 * 2^2; e3m2: bias 3, 1.75 * 2^4
    Element("e2m3", 6, 7.5, 3, 0),
    Element("e3m2", 6, 28.0, 2, -2),
    # OCP FP4: bias 1, 1.5 * 2^2
    Element("e2m1", 4, 6.0, 1, 0),
    # symmetric: -128 and -8 are not used
    Element("int8", 8, 127.0, None),
    Element("int4", 4, 7.0, None),
)
ELEMENTS = {element.name: element for element in _ELEMENTS}
"""Elements that take a scale. bf16, fp16 and fp32 are formats without one."""
PLAIN_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE_BYTES = {"fp32": 4, "ue8m0": 1, "e4m3": 1}
VECTOR_SCALE_BYTES = 4
_E4M3_SMALLEST = 2.0**-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A storage format for index queries or keys. See the module docstring for what the fields mean.

    `element` is a name of ELEMENTS, or one of PLAIN_BYTES, for which the other fields do not matter. `str` gives the
    short form that `diffcheck.grammar` reads.
    """

    element: str
    block: int = 128
    scale: ScaleType = "fp32"
    rule: ScaleRule = "ceil"
    amax_floor: float = 1e-4
    ties: Ties = "even"
    reciprocal: bool = False

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS and self.element not in PLAIN_BYTES:
            raise ValueError(f"element is {self.element!r}, expected one of {[*ELEMENTS, *PLAIN_BYTES]}")
        choices = {"scale": SCALE_BYTES, "rule": ("ceil", "floor", "nearest"), "ties": ("even", "down")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {list(allowed)}")
        if not self.plain and (self.block < 1 or not self.amax_floor >= 0):
            raise ValueError(f"block {self.block} and amax_floor {self.amax_floor}, expected >= 1 and >= 0")

    @property
    def plain(self) -> bool:
        """True for bf16, fp16 and fp32, which have no scale."""
        return self.element in PLAIN_BYTES

    def bytes_per_entry(self, dim: int) -> float:
        """Storage of one vector of `dim` values, scales included, in bytes."""
        if self.plain:
            return float(dim * PLAIN_BYTES[self.element])
        scales = -(-dim // self.block)
        values = dim * ELEMENTS[self.element].bits / 8
        if self.scale == "e4m3":
            return values + scales * SCALE_BYTES["e4m3"] + VECTOR_SCALE_BYTES
        # cache pages give the only scale of a vector four bytes, also a power of two; several are packed as bytes
        scale_bytes = 4 if scales == 1 else SCALE_BYTES[self.scale]
        return values + scales * scale_bytes

    def __str__(self) -> str:
        if self.plain:
            return self.element
        options: list[str] = [self.rule] if self.scale == "ue8m0" and self.rule != "ceil" else []
        options += [f"ties={self.ties}"] if self.ties != "even" else []
        options += [f"floor={self.amax_floor:.3g}"] if self.amax_floor != 1e-4 else []
        options += ["reciprocal"] if self.reciprocal else []
        return f"{self.element}/{self.block}/{self.scale}" + (":" + ",".join(options) if options else "")


def round_to_grid(x: Tensor, element: Element, ties: Ties = "even") -> Tensor:
    """fp32 x, |x| <= element.maximum, rounded to the element's grid, as fp32. NaN stays NaN.

    Rounding happens in units of the grid step at x, a power of two, so every step but the rounding is exact.
    "down" sends midpoints toward zero.
    """
    step = torch.ones_like(x)
    if element.mantissa is not None:
        exponent = ((x.view(torch.int32) >> 23) & 0xFF) - 127
        exponent = exponent.clamp(element.min_exponent, 126 + element.mantissa) - element.mantissa
        step = ((exponent + 127) << 23).view(torch.float32)
    units = x / step
    if ties == "even":
        return torch.round(units) * step
    return torch.ceil(units.abs() - 0.5).clamp_min(0).copysign(units) * step


def block_scales(amax: Tensor, fmt: Format) -> Tensor:
    """Scale of each block from its largest magnitude, fp32 [..., blocks of a vector].

    It is 0 only for amax 0 with no floor.
    """
    element = ELEMENTS[fmt.element]
    if fmt.scale == "e4m3":
        return _two_level_scales(amax, element, fmt.amax_floor)
    amax = amax.clamp_min(fmt.amax_floor)
    # by a tensor: on CUDA torch divides by a number as it multiplies by its reciprocal, an ulp off
    raw = amax / torch.full_like(amax, element.maximum)
    if fmt.scale == "fp32":
        return torch.where(amax.isfinite(), raw, torch.nan)
    smallest, largest = 2.0**-126, 2.0**127
    if fmt.rule == "ceil":
        scale = ceil_power_of_two(raw.clamp_min(smallest))
    elif fmt.rule == "floor":
        # the OCP microscaling rule: amax keeps its exponent, values above the element's largest saturate
        top = 2.0 ** (int(element.maximum).bit_length() - 1)
        scale = floor_power_of_two((amax / top).clamp_min(smallest))
    else:
        scale = floor_power_of_two((raw * 2**0.5).clamp_min(smallest))
    return scale.clamp(max=largest)


def _two_level_scales(amax: Tensor, element: Element, floor: float) -> Tensor:
    """e4m3 scales times the vector's fp32 one; a NaN or inf spoils its own block only."""
    finite = amax.isfinite()
    held = torch.where(finite, amax, 0.0)
    largest = held.amax(-1, keepdim=True).clamp_min(floor)
    vector = largest / torch.full_like(largest, E4M3_MAX * element.maximum)
    # a vector of zeros without a floor has no scale, and one of subnormals may have none in fp32
    safe = torch.where(vector == 0, 1.0, vector)
    raw = held / torch.full_like(held, element.maximum) / safe
    scale = raw.clamp(_E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn).float() * vector
    return torch.where(finite, scale, torch.nan)


def floor_power_of_two(x: Tensor) -> Tensor:
    """2^floor(log2(x)) for positive normal fp32 x, exact on the bits; NaN and inf give NaN."""
    return torch.where(x.isfinite(), (x.view(torch.int32) & 0x7F800000).view(torch.float32), torch.nan)


def quantise(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """(grid values fp32 [..., D], scales fp32 [..., D/block]) of x under a format with a scale.

    The grid values are what the codes stand for before the scale: codes * scale is the stored value. The last dim
    must be a multiple of the block.
    """
    assert not fmt.plain, f"{fmt.element} has no scale"
    if x.shape[-1] % fmt.block:
        raise ValueError(f"last dim {x.shape[-1]} is not a multiple of the block {fmt.block}")
    element = ELEMENTS[fmt.element]
    blocks = x.float().unflatten(-1, (-1, fmt.block))
    scale = block_scales(blocks.abs().amax(-1), fmt)
    safe = scale.masked_fill(scale == 0, 1.0).unsqueeze(-1)
    ratio = blocks * (1.0 / safe) if fmt.reciprocal else blocks / safe
    grid = round_to_grid(ratio.clamp(-element.maximum, element.maximum), element, fmt.ties)
    return grid.flatten(-2), scale


def fake_quantise(x: Tensor, fmt: Format) -> Tensor:
    """What a reader gets back after x was stored in `fmt`: fp32, same shape as x."""
    if fmt.plain:
        return x.to(PLAIN_DTYPES[fmt.element]).float()
    grid, scale = quantise(x, fmt)
    values: Tensor = (grid.unflatten(-1, (-1, fmt.block)) * scale.unsqueeze(-1)).flatten(-2)
    return values


BF16 = Format(element="bf16")
FP16 = Format(element="fp16")
E2M1_REFERENCE = Format(element="e2m1", block=32, scale="ue8m0", amax_floor=E2M1_AMAX_FLOOR)
"""The block format of the reference's own FP4 step."""
