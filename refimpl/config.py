"""Which indexer: the numbers of config.json that decide it, each with the place it came from.

Three spellings of the same configuration exist in the wild and all are read:

- *released*: the Hugging Face config.json (`hidden_size`, `compress_ratios`, `rope_scaling`, …);
- *transformers*: what transformers' `save_pretrained` writes (`layer_types`, `compress_rates`,
  `rope_parameters.{main,compress}`);
- *inference*: the config of DeepSeek's own inference code (`dim`, `n_layers`, `norm_eps`, `rope_factor`, …).

A value that silently comes from a default is how deployments went wrong before (a default theta of 40000, a generic
`rope_theta` that wins, a default index_topk of 512 on a checkpoint that says 1024). So `sources` names for each value
the key it was read from, and `traps` lists what a careless reader of this very config would get wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError

INDEXER_RATIO = 4
"""Only layers whose compress ratio is 4 have an indexer."""

_NOT_YET = {
    "deepseek_v32": "DeepSeek V3.2",
    "glm_moe_dsa": "GLM-5",
    "deepseek_v41": "DeepSeek V4.1",
    "deepseek_v4_1": "DeepSeek V4.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's frequency interpolation (no mscale in V4: rotation only).

    `factor` divides the low frequencies; `beta_fast` and `beta_slow` are rotations over the original context of
    `original_max_position_embeddings` tokens between which the ramp runs.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Geometry and constants of a checkpoint's indexer.

    hidden_size and q_lora_rank are the widths of its inputs x and qr; index_n_heads x index_head_dim its queries, of
    which the last rope_head_dim dims are rotated; index_topk entries are kept; compress_ratios holds one ratio per
    layer of the stack (layers of other draft modules are cut off); compress_rope_theta and yarn are the RoPE of the
    compressed layers; weight_block is the fp8 scale block [out, in] of the weights. `sources` says for each field
    where it came from; `traps` is for people.
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
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path}: no such file, expected the checkpoint's config.json") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{path}: not readable as JSON ({error})") from None
        if not isinstance(raw, dict):
            raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "config") -> IndexerConfig:
        """Like `from_json` on an already parsed object; `where` names it in errors."""
        reader = _Reader(raw, where)
        reader.check_model_type()
        theta, yarn = reader.rope()
        block = reader.weight_block()
        return cls(
            hidden_size=reader.integer("hidden_size", "hidden_size", "dim"),
            q_lora_rank=reader.integer("q_lora_rank", "q_lora_rank"),
            index_n_heads=reader.integer("index_n_heads", "index_n_heads"),
            index_head_dim=reader.integer("index_head_dim", "index_head_dim", default=128),
            rope_head_dim=reader.rope_dims(),
            index_topk=reader.integer("index_topk", "index_topk"),
            compress_ratios=reader.ratios(),
            compress_rope_theta=theta,
            yarn=yarn,
            rms_norm_eps=reader.number("rms_norm_eps", "rms_norm_eps", "norm_eps", default=1e-6),
            weight_block=block,
            sources=reader.sources,
            traps=tuple(reader.traps),
        )


class _Reader:
    """Looks values up under their several names and remembers where each was found."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.sources: dict[str, str] = {}
        self.traps: list[str] = []

    def check_model_type(self) -> None:
        kind = self.raw.get("model_type")
        if kind is None and "dim" in self.raw and "compress_ratios" in self.raw:
            return  # DeepSeek's own inference config does not name itself
        if kind == "deepseek_v4":
            return
        if kind in _NOT_YET:
            raise InputError(
                f"{self.where}: model_type {kind!r} ({_NOT_YET[kind]}) is not supported yet, expected 'deepseek_v4'"
            )
        raise InputError(f"{self.where}: model_type is {kind!r}, expected 'deepseek_v4'")

    def number(self, field_name: str, *keys: str, default: float | None = None) -> float:
        for key in keys:
            value: Any = self.raw
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"{self.where}: {key} is {value!r}, expected a number")
            self.sources[field_name] = f"checkpoint: {key}"
            return value
        if default is None:
            raise InputError(f"{self.where}: no {' or '.join(keys)}, expected a number")
        self.sources[field_name] = "code default"
        return default

    def integer(self, field_name: str, *keys: str, default: int | None = None) -> int:
        value = self.number(field_name, *keys, default=default)
        if value != int(value):
            raise InputError(f"{self.where}: {' or '.join(keys)} is {value}, expected an integer")
        return int(value)

    def rope_dims(self) -> int:
        nested = "rope_parameters.compress.partial_rotary_factor"
        if any(key in self.raw for key in ("qk_rope_head_dim", "rope_head_dim")):
            return self.integer("rope_head_dim", "qk_rope_head_dim", "rope_head_dim")
        factor_keys = ("partial_rotary_factor", nested)
        factor = self.number("rope_head_dim", *factor_keys, default=0.0)
        if factor:
            # transformers expresses the rotated dims as a share of the main attention's head_dim
            return round(factor * self.number("head_dim", "head_dim"))
        return self.integer("rope_head_dim", "qk_rope_head_dim", default=64)

    def ratios(self) -> tuple[int, ...]:
        layers = self.integer("num_hidden_layers", "num_hidden_layers", "n_layers")
        listed, types = self.raw.get("compress_ratios"), self.raw.get("layer_types")
        if isinstance(listed, list):
            if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in listed):
                raise InputError(f"{self.where}: compress_ratios holds something other than integers >= 0")
            if len(listed) < layers:
                raise InputError(
                    f"{self.where}: compress_ratios has {len(listed)} values for {layers} layers, expected one each"
                )
            self.sources["compress_ratios"] = "checkpoint: compress_ratios"
            if len(listed) > layers:
                self.traps.append(
                    f"compress_ratios has {len(listed)} values for {layers} layers; the rest belong to draft "
                    "(MTP) modules, which are not layers of the stack"
                )
            return tuple(listed[:layers])
        if isinstance(types, list) and len(types) == layers:
            rates = self.raw.get("compress_rates") or {}
            by_type = {
                "sliding_attention": 0,
                "compressed_sparse_attention": int(rates.get("compressed_sparse_attention", 4)),
                "heavily_compressed_attention": int(rates.get("heavily_compressed_attention", 128)),
            }
            unknown = sorted({str(t) for t in types} - by_type.keys())
            if unknown:
                raise InputError(f"{self.where}: layer_types holds {unknown[0]!r}, expected {sorted(by_type)}")
            self.sources["compress_ratios"] = "checkpoint: layer_types and compress_rates"
            return tuple(by_type[t] for t in types)
        raise InputError(f"{self.where}: no compress_ratios (or layer_types), expected one value a layer")

    def rope(self) -> tuple[float, Yarn | None]:
        theta = self.number(
            "compress_rope_theta",
            "compress_rope_theta",
            "rope_parameters.compress.rope_theta",
            default=160000.0,
        )
        source = self.sources["compress_rope_theta"]
        if source == "code default":
            self.traps.append("no compress_rope_theta in the config: the published models use 160000; some code has 40000")
        main = self.raw.get("rope_theta", _nested(self.raw, "rope_parameters", "main", "rope_theta"))
        if isinstance(main, int | float) and main != theta:
            self.traps.append(
                f"rope_theta {main:g} is for layers without compression; the indexer uses compress_rope_theta {theta:g}"
            )
        for place in ("rope_scaling", "rope_parameters"):
            injected = _nested(self.raw, place, "rope_theta")
            if isinstance(injected, int | float) and injected != theta:
                self.traps.append(f"{place}.rope_theta {injected:g} contradicts compress_rope_theta {theta:g} and is ignored")
        return float(theta), self.yarn()

    def yarn(self) -> Yarn | None:
        for place in ("rope_scaling", "rope_parameters.compress"):
            block: Any = self.raw
            for part in place.split("."):
                block = block.get(part) if isinstance(block, Mapping) else None
            if isinstance(block, Mapping) and ("factor" in block or block.get("type", block.get("rope_type")) == "yarn"):
                break
        else:
            if self.raw.get("original_seq_len") or self.raw.get("rope_factor"):
                return self._yarn_from(self.raw, "", "rope_factor", "original_seq_len")
            self.sources["yarn"] = "absent"
            self.traps.append("no YaRN (rope_scaling) in the config: the published models have factor 16 over 65536")
            return None
        kind = block.get("type", block.get("rope_type"))
        if kind != "yarn":
            raise InputError(f"{self.where}: {place} type is {kind!r}, expected 'yarn'")
        for key in ("mscale", "mscale_all_dim", "attention_factor"):
            if isinstance(block.get(key), int | float) and block[key] != 1:
                self.traps.append(f"{place}.{key} {block[key]:g} is not used: V4 only rotates")
        return self._yarn_from(block, place + ".", "factor", "original_max_position_embeddings")

    def _yarn_from(self, block: Mapping[str, Any], prefix: str, factor_key: str, length_key: str) -> Yarn:
        inner = _Reader(block, f"{self.where}: {prefix}" if prefix else self.where)
        yarn = Yarn(
            factor=float(inner.number("factor", factor_key)),
            beta_fast=float(inner.number("beta_fast", "beta_fast", default=32.0)),
            beta_slow=float(inner.number("beta_slow", "beta_slow", default=1.0)),
            original_max_position_embeddings=inner.integer("length", length_key),
        )
        if yarn.factor < 1 or yarn.original_max_position_embeddings < 1 or not yarn.beta_fast > yarn.beta_slow > 0:
            raise InputError(f"{self.where}: YaRN values {yarn} make no sense, expected factor >= 1 and beta_fast > beta_slow > 0")
        defaults = [name for name in ("beta_fast", "beta_slow") if inner.sources[name] == "code default"]
        self.sources["yarn"] = f"checkpoint: {prefix}{factor_key}" + (f" ({', '.join(defaults)}: code default)" if defaults else "")
        return yarn

    def weight_block(self) -> tuple[int, int]:
        block = _nested(self.raw, "quantization_config", "weight_block_size")
        if block is None:
            self.sources["weight_block"] = "code default"
            return (128, 128)
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
            raise InputError(f"{self.where}: weight_block_size is {block!r}, expected two positive integers")
        self.sources["weight_block"] = "checkpoint: quantization_config.weight_block_size"
        return (block[0], block[1])


def _nested(raw: Mapping[str, Any], *keys: str) -> Any:
    value: Any = raw
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


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
    sources={"*": "published V4-Flash config.json"},
    **_PUBLISHED_COMMON,
)
"""The released V4-Flash geometry: 43 layers, indexers in layers 2, 4, … 42."""
V4_PRO = IndexerConfig(
    hidden_size=7168,
    q_lora_rank=1536,
    index_topk=1024,
    compress_ratios=(128, 128, *(4, 128) * 29, 4),
    sources={"*": "published V4-Pro config.json"},
    **_PUBLISHED_COMMON,
)
"""The released V4-Pro geometry: 61 layers, indexers in layers 2, 4, … 60."""
