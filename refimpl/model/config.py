"""Which model: what the whole stack needs beyond the indexer's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import IndexerConfig, Yarn
from ..config_json import ConfigReader, read_json
from ..errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry and constants of a V4 stack; `indexer` holds what the indexer shares with it.

    num_attention_heads query heads of head_dim share one key-value head; sliding_window tokens are always read. The
    first num_hash_layers layers route by token id. hc_mult streams are mixed with hc_sinkhorn_iters rounds of
    normalisation. swiglu_limit clamps pre-activations, 0 for no clamp. Raises InputError for values that make no sense.
    """

    indexer: IndexerConfig
    vocab_size: int
    num_attention_heads: int
    head_dim: int
    rope_theta: float
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    routed_scaling_factor: float
    swiglu_limit: float

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "num_attention_heads", "head_dim", "o_groups", "o_lora_rank", "sliding_window",
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult", "hc_sinkhorn_iters",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"config: {name} is {getattr(self, name)}, expected a positive integer")
        if self.num_attention_heads % self.o_groups:
            raise InputError(
                f"config: o_groups is {self.o_groups}, expected a divisor of the {self.num_attention_heads} heads"
            )
        if self.head_dim < self.indexer.rope_head_dim:
            raise InputError(f"config: head_dim is {self.head_dim}, expected at least the RoPE dims")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise InputError(f"config: {self.num_experts_per_tok} experts a token of {self.n_routed_experts}")

    @property
    def layers(self) -> int:
        """Number of layers of the stack."""
        return len(self.indexer.compress_ratios)

    def ratio(self, layer: int) -> int:
        """Compress ratio of a layer: 0, 4 or 128."""
        return self.indexer.compress_ratios[layer]

    def rope(self, layer: int) -> tuple[float, Yarn | None]:
        """Theta and YaRN of everything in a layer: compressed layers have their own."""
        if self.ratio(layer):
            return self.indexer.compress_rope_theta, self.indexer.yarn
        return self.rope_theta, None

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read a config.json in the released, transformers' or the inference spelling; InputError if it cannot be."""
        return cls.from_dict(read_json(Path(path)), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "config") -> ModelConfig:
        """Like `from_json` on an already parsed object; `where` names it in errors."""
        indexer = IndexerConfig.from_dict(raw, where=where)
        reader = ConfigReader(raw, where)
        _check_fixed(raw, where)
        return cls(
            indexer=indexer,
            vocab_size=reader.integer(None, "vocab_size"),
            num_attention_heads=reader.integer(None, "num_attention_heads", "n_heads"),
            head_dim=reader.integer(None, "head_dim"),
            rope_theta=float(reader.number(None, "rope_theta", "rope_parameters.main.rope_theta", default=10000.0)),
            o_groups=reader.integer(None, "o_groups"),
            o_lora_rank=reader.integer(None, "o_lora_rank"),
            sliding_window=reader.integer(None, "sliding_window", "window_size"),
            n_routed_experts=reader.integer(None, "n_routed_experts", "num_local_experts"),
            num_experts_per_tok=reader.integer(None, "num_experts_per_tok", "n_activated_experts"),
            moe_intermediate_size=reader.integer(None, "moe_intermediate_size", "moe_inter_dim"),
            num_hash_layers=_hash_layers(raw, reader, where),
            hc_mult=reader.integer(None, "hc_mult", default=4),
            hc_sinkhorn_iters=reader.integer(None, "hc_sinkhorn_iters", default=20),
            hc_eps=float(reader.number(None, "hc_eps", default=1e-6)),
            routed_scaling_factor=float(reader.number(None, "routed_scaling_factor", "route_scale")),
            swiglu_limit=float(reader.number(None, "swiglu_limit", default=0)),
        )


_FIXED = {
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "score_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Values that the published code has no other branch for."""


def _check_fixed(raw: Mapping[str, Any], where: str) -> None:
    for key, only in _FIXED.items():
        if raw.get(key) is not None and raw[key] != only:
            raise InputError(f"{where}: {key} is {raw[key]!r:.80}, expected {only!r}, the only one V4 has")


def _hash_layers(raw: Mapping[str, Any], reader: ConfigReader, where: str) -> int:
    kinds = raw.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return reader.integer(None, "num_hash_layers", "n_hash_layers")
    count: int = kinds.count("hash_moe")
    if kinds != ["hash_moe"] * count + ["moe"] * (len(kinds) - count):
        raise InputError(f"{where}: mlp_layer_types is {kinds!r:.120}, expected hash_moe layers and then moe layers")
    return count
