"""Which indexer: the numbers of config.json that decide it, each with the place it came from.

`config_json` reads them, in any of their spellings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import InputError

INDEXER_RATIO = 4
"""Only layers whose compress ratio is 4 have an indexer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's frequency interpolation (no mscale in V4: rotation only).

    `factor` divides the low frequencies; `beta_fast` and `beta_slow` are rotations over the original context
    of `original_max_position_embeddings` tokens between which the ramp runs.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Geometry and constants of a checkpoint's indexer.

    hidden_size and q_lora_rank are the widths of its inputs x and qr; index_n_heads x index_head_dim its
    queries, of which the last rope_head_dim dims are rotated; index_topk entries are kept; compress_ratios
    holds one ratio per layer of the stack (layers of other draft modules are cut off); compress_rope_theta
    and yarn are the RoPE of the compressed layers; weight_block is the fp8 scale block [out, in] of the
    weights. `sources` has one entry for each of these fields, saying where it came from; `traps` is for
    people. Raises InputError for values that make no sense.
    """

    hidden_size: int
    q_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    rope_head_dim: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    yarn: Yarn | None
    rms_norm_eps: float
    weight_block: tuple[int, int] = (128, 128)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    traps: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk"):
            if getattr(self, name) < 1:
                raise InputError(f"config: {name} is {getattr(self, name)}, expected a positive integer")
        if self.index_head_dim & (self.index_head_dim - 1) or self.index_head_dim < 32:
            raise InputError(
                f"config: index_head_dim is {self.index_head_dim}, expected a power of two of at least 32 "
                "(the Hadamard rotation and the blocks of 32 need it)"
            )
        if self.rope_head_dim % 2 or not 0 < self.rope_head_dim <= self.index_head_dim:
            raise InputError(
                f"config: RoPE dims {self.rope_head_dim}, expected an even number up to index_head_dim "
                f"{self.index_head_dim}"
            )
        if not (math.isfinite(self.compress_rope_theta) and self.compress_rope_theta > 0):
            raise InputError(f"config: compress_rope_theta is {self.compress_rope_theta}, expected > 0")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise InputError(f"config: rms_norm_eps is {self.rms_norm_eps}, expected > 0")

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have an indexer (compress ratio 4), ascending."""
        return tuple(i for i, ratio in enumerate(self.compress_ratios) if ratio == INDEXER_RATIO)

    @property
    def gate_scale(self) -> float:
        """The constant in front of the head gates, index_head_dim^-0.5 * index_n_heads^-0.5."""
        return float(self.index_head_dim**-0.5 * self.index_n_heads**-0.5)

    @classmethod
    def from_json(cls, path: str | Path) -> IndexerConfig:
        """Read a config.json in any of the three spellings.

        Raises InputError when the file is absent, not JSON, of another model type, or lacks a value.
        """
        from .config_json import read_json  # which imports this module

        path = Path(path)
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "config") -> IndexerConfig:
        """Like `from_json` on an already parsed object; `where` names it in errors."""
        from .config_json import read_config

        return read_config(raw, where)


CONFIG_FIELDS = tuple(f.name for f in fields(IndexerConfig) if f.compare)
"""Names of the values of an IndexerConfig, which are the keys of `sources`."""
_PUBLISHED_YARN = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
_PUBLISHED_COMMON: dict[str, Any] = {
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_head_dim": 64,
    "compress_rope_theta": 160000.0,
    "yarn": _PUBLISHED_YARN,
    "rms_norm_eps": 1e-6,
}
V4_FLASH = IndexerConfig(
    hidden_size=4096,
    q_lora_rank=1024,
    index_topk=512,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    sources=dict.fromkeys(CONFIG_FIELDS, "published V4-Flash config.json"),
    **_PUBLISHED_COMMON,
)
"""The released V4-Flash geometry: 43 layers, indexers in layers 2, 4, … 42."""
V4_PRO = IndexerConfig(
    hidden_size=7168,
    q_lora_rank=1536,
    index_topk=1024,
    compress_ratios=(128, 128, *(4, 128) * 29, 4),
    sources=dict.fromkeys(CONFIG_FIELDS, "published V4-Pro config.json"),
    **_PUBLISHED_COMMON,
)
"""The released V4-Pro geometry: 61 layers, indexers in layers 2, 4, … 60."""
