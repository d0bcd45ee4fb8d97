"""The seven tensors of one layer's indexer, as the checkpoint stores them.

The stored type of wq_b matters: an fp8 (or fp4) weight makes the query projection quantise its activation, a bf16 or
fp32 weight does not. So the tensors stay as stored and are widened where they are used (`dequantise_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import IndexerConfig
from .errors import InputError
from .formats import E4M3_BLOCK, decode_e2m1, decode_e8m0

PLAIN_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """Weights of one indexer; shapes are [out, in], D = index_head_dim, H = index_n_heads.

    wq_b [H*D, q_lora] float8_e4m3fn (or int8 = two e2m1 codes a byte [H*D, q_lora/2], or bf16/fp32/fp16);
    wq_b_scale: float8_e8m0fnu (or fp32), one per weight block for fp8, one per row and 32 inputs for fp4, None for a
    plain wq_b; weights_proj [H, hidden]; wkv, wgate [2*D, hidden]; ape [4, 2*D] fp32; norm [D].
    """

    wq_b: Tensor
    wq_b_scale: Tensor | None
    weights_proj: Tensor
    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor

    @property
    def quantised(self) -> bool:
        """True when wq_b is stored as fp8 or fp4, so that its product quantises the activation too."""
        return self.wq_b.dtype not in PLAIN_DTYPES

    def to(self, device: torch.device | str) -> IndexerWeights:
        """The same weights on another device."""
        scale = None if self.wq_b_scale is None else self.wq_b_scale.to(device)
        plain = {n: getattr(self, n).to(device) for n in self.__dataclass_fields__ if n != "wq_b_scale"}
        return IndexerWeights(wq_b_scale=scale, **plain)

    def check(self, config: IndexerConfig, *, where: str = "weights") -> None:
        """Raise InputError unless every shape and dtype is what `config` implies."""
        out, lora = config.index_n_heads * config.index_head_dim, config.q_lora_rank
        two_d = 2 * config.index_head_dim
        packed = self.wq_b.dtype in (torch.int8, torch.uint8)
        shapes = {
            "wq_b": (out, lora // 2 if packed else lora),
            "weights_proj": (config.index_n_heads, config.hidden_size),
            "wkv": (two_d, config.hidden_size),
            "wgate": (two_d, config.hidden_size),
            "ape": (4, two_d),
            "norm": (config.index_head_dim,),
        }
        if packed:
            shapes["wq_b_scale"] = (out, -(-lora // 32))
        elif self.quantised:
            block_out, block_in = config.weight_block
            shapes["wq_b_scale"] = (-(-out // block_out), -(-lora // block_in))
        if self.quantised and lora % E4M3_BLOCK:
            raise InputError(
                f"{where}: q_lora_rank is {lora}, expected a multiple of {E4M3_BLOCK} for a quantised wq_b, whose "
                "product quantises the activation in blocks of that many inputs"
            )
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                raise InputError(
                    f"{where}: {name} is absent, expected a scale of shape {list(shape)} for the fp8 weight"
                )
            if tuple(tensor.shape) != shape:
                raise InputError(f"{where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        allowed_wq_b = (torch.float8_e4m3fn, torch.int8, torch.uint8, *PLAIN_DTYPES)
        for name in shapes:
            dtype = getattr(self, name).dtype
            allowed: tuple[torch.dtype, ...] = PLAIN_DTYPES
            if name == "wq_b":
                allowed = allowed_wq_b
            elif name == "wq_b_scale":
                allowed = (torch.float8_e8m0fnu, torch.float32)
            if dtype not in allowed:
                raise InputError(f"{where}: {name} has dtype {dtype}, expected one of {[str(d) for d in allowed]}")


def dequantise_weight(weight: Tensor, scale: Tensor | None, block: tuple[int, int]) -> Tensor:
    """A stored weight [out, in] as fp32, exact for every stored format.

    fp8: value times the scale of its block of `block` = (out, in) elements (the last blocks may be partial); int8 is
    two e2m1 codes a byte, low nibble first, one scale per row and 32 inputs; a plain weight is only widened.
    """
    if weight.dtype in PLAIN_DTYPES:
        return weight.float()
    assert scale is not None, "a quantised weight has a scale"
    scale32 = decode_e8m0(scale.view(torch.uint8)) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    if weight.dtype in (torch.int8, torch.uint8):
        # a table of both values of each byte: one look-up a byte, which for experts is most of the time
        byte = torch.arange(256, dtype=torch.uint8, device=weight.device)
        pairs = decode_e2m1(torch.stack((byte & 15, byte >> 4), dim=-1))
        values = torch.nn.functional.embedding(weight.view(torch.uint8).int(), pairs).flatten(-2)
        return values.mul_(scale32.repeat_interleave(32, dim=1)[:, : values.shape[1]])
    rows, cols = weight.shape
    spread = scale32.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :cols]
    return weight.float() * spread
