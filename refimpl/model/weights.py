"""One layer's tensors by their released names, as stored, and the products that they take part in.

The stored type decides the numerics: an fp8 or fp4 weight quantises its activation to e4m3 per 128 inputs, a bf16 or
fp32 weight does not. wo_a is the exception: stored fp8, dequantised to bf16, its activation left alone.

Two numerics exist. `REFERENCE` rounds and quantises as published. `EXACT` is the same function in plain fp32: no
rounding, no fake quantisation, no FP4 step; it is what an implementation without these formats must agree with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..formats import E4M3_BLOCK, e4m3_fake_quantise
from ..linear import fp8_linear, row_tiled_product
from ..weights import PLAIN_DTYPES, IndexerWeights, dequantise_weight
from .config import ModelConfig

CACHE_BLOCK = 64
"""Values that share a scale in the e4m3 fake quantisation of the main attention's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """`rounded`: bf16 after every step and the fake quantisations, as published; else plain fp32."""

    name: str
    rounded: bool

    def round(self, x: Tensor) -> Tensor:
        """The step's result as it is kept: bf16, or fp32."""
        return x.bfloat16() if self.rounded else x.float()

    def quantise_key(self, key: Tensor, rope_dims: int) -> Tensor:
        """Main attention's key [n, head_dim]: all but its RoPE dims through e4m3 per 64 values, kept as `round` does.

        Raises InputError where those dims are no multiple of 64.
        """
        plain = key.shape[-1] - rope_dims
        if not self.rounded or not plain:
            return key
        if plain % CACHE_BLOCK:
            raise InputError(f"head_dim less its RoPE dims is {plain}, expected a multiple of {CACHE_BLOCK}")
        quantised = e4m3_fake_quantise(key[:, :plain], CACHE_BLOCK).bfloat16()
        return torch.cat((quantised, key[:, plain:]), dim=-1)


REFERENCE = Numerics(name="reference", rounded=True)
EXACT = Numerics(name="exact", rounded=False)


class LayerWeights:
    """The tensors of one layer (or of the top of the model) under their names inside it, e.g. attn.wq_a.weight.

    `where` names it in errors. Raises InputError for a tensor that is absent or of another shape when it is used.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig, where: str) -> None:
        self._tensors, self.config, self.where = tensors, config, where

    def to(self, device: torch.device | str) -> LayerWeights:
        """The same tensors on another device."""
        return LayerWeights({name: t.to(device) for name, t in self._tensors.items()}, self.config, self.where)

    def raw(self, name: str, *shape: int) -> Tensor:
        """A tensor as stored, which must have this shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise InputError(f"{self.where}: {name} is missing, expected shape {list(shape)}")
        if tuple(tensor.shape) != shape:
            raise InputError(f"{self.where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def fp32(self, name: str, *shape: int) -> Tensor:
        """A plain tensor widened to fp32."""
        tensor = self.raw(name, *shape)
        if tensor.dtype not in PLAIN_DTYPES:
            raise InputError(f"{self.where}: {name} has dtype {tensor.dtype}, expected bf16, fp16 or fp32")
        return tensor.float()

    def linear(self, name: str, out: int, inputs: int) -> Linear:
        """The linear layer `name` [out, inputs], dequantised."""
        stored = self._tensors.get(f"{name}.weight")
        packed = stored is not None and stored.dtype in (torch.int8, torch.uint8)
        stored = self.raw(f"{name}.weight", out, inputs // 2 if packed else inputs)
        quantised = stored.dtype not in PLAIN_DTYPES
        scale = None
        if quantised:
            if stored.dtype != torch.float8_e4m3fn and not packed:
                raise InputError(f"{self.where}: {name}.weight has dtype {stored.dtype}, expected e4m3 or packed e2m1")
            block = (1, 32) if packed else self.config.indexer.weight_block
            scale = self.raw(f"{name}.scale", -(-out // block[0]), -(-inputs // block[1]))
            if scale.dtype == torch.uint8:
                scale = scale.view(torch.float8_e8m0fnu)
        return Linear(dequantise_weight(stored, scale, self.config.indexer.weight_block), quantised=quantised)

    def indexer(self) -> IndexerWeights:
        """The indexer's own tensors."""
        c = self.config.indexer
        rows, two_d, prefix = c.index_n_heads * c.index_head_dim, 2 * c.index_head_dim, "attn.indexer."
        scale = self._tensors.get(prefix + "wq_b.scale")
        stored = self._tensors.get(prefix + "wq_b.weight")
        if stored is None:
            raise InputError(f"{self.where}: {prefix}wq_b.weight is missing, expected shape {[rows, c.q_lora_rank]}")
        weights = IndexerWeights(
            wq_b=stored,
            wq_b_scale=scale.view(torch.float8_e8m0fnu) if scale is not None and scale.dtype == torch.uint8 else scale,
            weights_proj=self.raw(prefix + "weights_proj.weight", c.index_n_heads, c.hidden_size),
            wkv=self.raw(prefix + "compressor.wkv.weight", two_d, c.hidden_size),
            wgate=self.raw(prefix + "compressor.wgate.weight", two_d, c.hidden_size),
            ape=self.raw(prefix + "compressor.ape", 4, two_d),
            norm=self.raw(prefix + "compressor.norm.weight", c.index_head_dim),
        )
        weights.check(c, where=f"{self.where}: {prefix.rstrip('.')}")
        return weights


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight fp32 [out, in], and whether it was stored quantised, so that its activation is quantised too."""

    weight: Tensor
    quantised: bool

    def __call__(self, x: Tensor, numerics: Numerics) -> Tensor:
        """x [n, in] -> [n, out], rounded once."""
        if self.quantised and numerics.rounded:
            if x.shape[1] % E4M3_BLOCK:
                raise InputError(f"{x.shape[1]} inputs of a quantised weight, expected a multiple of {E4M3_BLOCK}")
            return fp8_linear(x, self.weight)
        return numerics.round(row_tiled_product(x, self.weight))
