"""Read a config.json into an `IndexerConfig`.

Three spellings of the same configuration exist in the wild and all are read:

- *released*: the Hugging Face config.json (`hidden_size`, `compress_ratios`, `rope_scaling`, …);
- *transformers*: what transformers' `save_pretrained` writes (`layer_types`, `compress_rates`,
  `rope_parameters.{main,compress}`);
- *inference*: the config of DeepSeek's own inference code (`dim`, `n_layers`, `norm_eps`, `rope_factor`, …).

A value that silently comes from a default is how deployments went wrong before (a default theta of 40000, a
generic `rope_theta` that wins, a default index_topk of 512 on a checkpoint that says 1024). So `sources`
names for each value the key it was read from, and `traps` lists what a careless reader of this very config
would get wrong. Where two keys contradict each other, the released spelling wins and the other one is a trap.
index_topk has no default here: without it there is no telling what the checkpoint was made for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from .config import CONFIG_FIELDS, INDEXER_RATIO, V4_FLASH, V4_PRO, IndexerConfig, Yarn
from .errors import InputError

RATIOS = (0, INDEXER_RATIO, 128)
"""All compress ratios of V4: window only, window and selected entries, window and all entries."""
PUBLISHED_THETA = 160000.0
CODE_DEFAULT_TOPK = 512
"""index_topk of code that does not find the key; right for V4-Flash, half of V4-Pro's."""

_NOT_YET = {
    "deepseek_v32": "DeepSeek V3.2",
    "glm_moe_dsa": "GLM-5",
    "glm5_next": "GLM-5",
    "deepseek_v41": "DeepSeek V4.1",
    "deepseek_v4_1": "DeepSeek V4.1",
}
_V41_KEYS = ("kv_source_layers", "index_source_layers", "candidate_source_layer")
"""V4.1's inference config has V4's spelling and no model_type; these keys tell it apart."""


def load_json(path: Path, expected: str, unreadable: str = "") -> Any:
    """What a JSON file holds. InputError for a missing file, which says what was `expected`, and for one not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected {expected}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}){unreadable}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file that must hold one JSON object; anything else is an InputError."""
    raw = load_json(path, "the checkpoint's config.json")
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def read_config(raw: Mapping[str, Any], where: str) -> IndexerConfig:
    """Make an IndexerConfig of a parsed config.json; `where` names it in errors."""
    reader = ConfigReader(raw, where)
    reader.check_model_type()
    theta = reader.theta()
    config = IndexerConfig(
        hidden_size=reader.integer("hidden_size", "hidden_size", "dim"),
        q_lora_rank=reader.integer("q_lora_rank", "q_lora_rank"),
        index_n_heads=reader.integer("index_n_heads", "index_n_heads"),
        index_head_dim=reader.integer("index_head_dim", "index_head_dim", default=128),
        rope_head_dim=reader.rope_dims(),
        index_topk=reader.topk(),
        compress_ratios=reader.ratios(),
        compress_rope_theta=theta,
        yarn=reader.yarn(),
        rms_norm_eps=float(reader.number("rms_norm_eps", "rms_norm_eps", "norm_eps", default=1e-6)),
        weight_block=reader.weight_block(),
    )
    traps = (*reader.traps, *_unlike_published(config))
    return replace(config, sources={name: reader.sources[name] for name in CONFIG_FIELDS}, traps=traps)


class ConfigReader:
    """Looks values up under their several names and remembers where each was found."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.sources: dict[str, str] = {}
        self.traps: list[str] = []

    def check_model_type(self) -> None:
        """Refuse a config of another architecture."""
        kind = self.raw.get("model_type")
        v41 = next((key for key in _V41_KEYS if self.raw.get(key) is not None), None)
        if v41 and kind in ("deepseek_v4", None):
            self._refuse(f"{v41} is a key of DeepSeek V4.1, which")
        if kind is None and "dim" in self.raw and "compress_ratios" in self.raw:
            return  # DeepSeek's own inference config does not name itself
        if kind is None and "dim" in self.raw and "kv_lora_rank" in self.raw:
            self._refuse("kv_lora_rank without compress_ratios is DeepSeek V3.2, which")
        if kind == "deepseek_v4":
            return
        if isinstance(kind, str) and kind in _NOT_YET:
            self._refuse(f"model_type {kind!r} ({_NOT_YET[kind]})")
        raise InputError(f"{self.where}: model_type is {kind!r:.80}, expected 'deepseek_v4'")

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(f"{self.where}: {what} is not supported yet, expected 'deepseek_v4'")

    def number(self, field_name: str | None, *keys: str, default: float | None = None) -> float:
        """Value of the first of `keys` (dots descend) that is present; its key becomes the field's source."""
        source = "code default"
        value: Any = default
        for key in keys:
            found = _nested(self.raw, *key.split("."))
            if found is not None:
                if not _is_number(found):
                    raise InputError(f"{self.where}: {key} is {found!r:.80}, expected a number")
                value, source = found, f"checkpoint: {key}"
                break
        if value is None:
            raise InputError(f"{self.where}: no {' or '.join(keys)}, expected a number")
        if field_name:
            self.sources[field_name] = source
        return value  # type: ignore[no-any-return]

    def integer(self, field_name: str | None, *keys: str, default: int | None = None) -> int:
        """Like `number`, for a value that must be whole."""
        value = self.number(field_name, *keys, default=default)
        if value != int(value):
            raise InputError(f"{self.where}: {' or '.join(keys)} is {value}, expected an integer")
        return int(value)

    def topk(self) -> int:
        """index_topk, which has no default."""
        k = self.integer("index_topk", "index_topk")
        if k != CODE_DEFAULT_TOPK:
            self.traps.append(f"index_topk is {k}; code that misses the key keeps its default of {CODE_DEFAULT_TOPK}")
        self._trap_other_values("index_topk", k)
        return k

    def _trap_other_values(self, key: str, value: float) -> None:
        """Note every nested object that repeats `key` with another value: some readers look there first."""
        for place, block in _objects(self.raw):
            other = block.get(key)
            if place and other is not None and other != value:
                self.traps.append(f"{place}.{key} {other} contradicts {key} {value:g} and is ignored")

    def rope_dims(self) -> int:
        """RoPE dims of one head; transformers gives them as a share of the *main* attention's head_dim."""
        keys = ("qk_rope_head_dim", "rope_head_dim")
        factor_keys = ("partial_rotary_factor", "rope_parameters.compress.partial_rotary_factor")
        shared: int | None = None
        if any(_nested(self.raw, *key.split(".")) is not None for key in factor_keys):
            if self.raw.get("head_dim") is not None:
                factor = self.number("rope_head_dim", *factor_keys)
                shared = round(factor * self.number(None, "head_dim"))
                self.sources["rope_head_dim"] += " times head_dim"
            elif all(self.raw.get(key) is None for key in keys):
                raise InputError(f"{self.where}: partial_rotary_factor without head_dim, expected both")
        if shared is None or any(self.raw.get(key) is not None for key in keys):
            dims = self.integer("rope_head_dim", *keys, default=64)
            if shared not in (None, dims):
                self.traps.append(f"partial_rotary_factor times head_dim is {shared}, not the {dims} RoPE dims stated")
            return dims
        return shared

    def ratios(self) -> tuple[int, ...]:
        """One compress ratio a layer of the stack."""
        layers = self.integer(None, "num_hidden_layers", "n_layers")
        listed, types = self.raw.get("compress_ratios"), self.raw.get("layer_types")
        by_type = self._ratios_by_type(types) if isinstance(types, list) else None
        if isinstance(listed, list):
            if any(type(ratio) is not int or ratio not in RATIOS for ratio in listed):
                odd = next(ratio for ratio in listed if type(ratio) is not int or ratio not in RATIOS)
                raise InputError(f"{self.where}: compress_ratios holds {odd!r:.80}, expected 0, 4 or 128")
            self.sources["compress_ratios"] = "checkpoint: compress_ratios"
            ratios = tuple(listed)
            if by_type is not None and by_type[:layers] != ratios[:layers]:
                self.traps.append("layer_types contradicts compress_ratios and is ignored")
        elif by_type is not None:
            self.sources["compress_ratios"] = "checkpoint: layer_types"
            ratios = by_type
        else:
            raise InputError(f"{self.where}: no compress_ratios (or layer_types), expected one value a layer")
        if layers < 1 or len(ratios) < layers:
            key = self.sources["compress_ratios"].removeprefix("checkpoint: ")
            raise InputError(f"{self.where}: {key} has {len(ratios)} values for {layers} layers, expected one each")
        if len(ratios) > layers:
            self.traps.append(
                f"compress_ratios has {len(ratios)} values for {layers} layers; the rest belong to draft "
                "(MTP) modules, which are not layers of the stack"
            )
        return ratios[:layers]

    def _ratios_by_type(self, types: list[Any]) -> tuple[int, ...]:
        by_type = {
            "sliding_attention": 0,
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        }
        for name, old, ratio in (
            ("compressed_sparse_attention", "compress_rate_csa", 4),
            ("heavily_compressed_attention", "compress_rate_hca", 128),
        ):
            stated = self.number(None, f"compress_rates.{name}", old, default=ratio)
            if stated != ratio:
                raise InputError(f"{self.where}: compress rate of {name} is {stated:g}, expected {ratio}")
        unknown = sorted({str(name) for name in types} - by_type.keys())
        if unknown:
            raise InputError(f"{self.where}: layer_types holds {unknown[0]!r:.80}, expected {', '.join(by_type)}")
        return tuple(by_type[name] for name in types)

    def theta(self) -> float:
        """RoPE theta of the compressed layers."""
        key = "compress_rope_theta"
        theta = self.number(key, key, "rope_parameters.compress.rope_theta", default=PUBLISHED_THETA)
        if self.sources[key] == "code default":
            self.traps.append(
                f"no {key} in the config, the published {PUBLISHED_THETA:g} is assumed; some code has 40000"
            )
        self._trap_other_values(key, theta)
        for place in ("", "rope_parameters.main"):
            main = _nested(self.raw, *place.split("."), "rope_theta") if place else self.raw.get("rope_theta")
            if _is_number(main) and main != theta:
                self.traps.append(
                    f"rope_theta {main:g} is for layers without compression; the indexer uses {key} {theta:g}"
                )
                break
        for place in ("rope_scaling", "rope_parameters", "rope_parameters.compress"):
            injected = _nested(self.raw, *place.split("."), "rope_theta")
            if _is_number(injected) and injected != theta:
                self.traps.append(f"{place}.rope_theta {injected:g} contradicts {key} {theta:g} and is ignored")
        return float(theta)

    def yarn(self) -> Yarn | None:
        """YaRN of the compressed layers, None where the config has none."""
        # rope_parameters itself holds the values where a tool has renamed rope_scaling without nesting it
        blocks = [(place, _nested(self.raw, *place.split("."))) for place in _YARN_PLACES]
        found = [
            (place, block)
            for place, block in blocks
            if isinstance(block, Mapping) and (_rope_type(block) == "yarn" or "factor" in block)
        ]
        if not found and (self.raw.get("original_seq_len") or self.raw.get("rope_factor")):
            if self.raw.get("original_seq_len") != 0:
                return self._yarn_from(self.raw, "", "rope_factor", "original_seq_len")
        elif found:
            place, block = found[0]
            if _rope_type(block) != "yarn":
                raise InputError(f"{self.where}: {place} type is {_rope_type(block)!r:.80}, expected 'yarn'")
            yarn = self._yarn_from(block, place + ".", "factor", "original_max_position_embeddings")
            for other, repeated in found[1:]:
                if any(repeated.get(key, value) != value for key, value in asdict(yarn).items()):
                    self.traps.append(f"{other} contradicts {place} and is ignored")
            self._trap_attention_factor(place, block, yarn)
            return yarn
        self.sources["yarn"] = "checkpoint: original_seq_len" if "original_seq_len" in self.raw else "absent"
        self.traps.append("no YaRN in the config: the published models have factor 16 over 65536 positions")
        return None

    def _trap_attention_factor(self, place: str, block: Mapping[str, Any], yarn: Yarn) -> None:
        stated = {
            key: block[key] for key in ("mscale", "mscale_all_dim", "attention_factor") if _is_number(block.get(key))
        }
        for key, value in stated.items():
            if value != 1:
                self.traps.append(f"{place}.{key} {value:g} is not used: V4 only rotates")
        if "attention_factor" not in stated and yarn.factor > 1:
            derived = 0.1 * math.log(yarn.factor) + 1
            self.traps.append(
                f"{place} has no attention_factor; generic YaRN code derives {derived:.4f}, V4 only rotates"
            )

    def _yarn_from(self, block: Mapping[str, Any], prefix: str, factor_key: str, length_key: str) -> Yarn:
        inner = ConfigReader(block, f"{self.where}: {prefix.rstrip('.')}" if prefix else self.where)
        yarn = Yarn(
            factor=float(inner.number("factor", factor_key)),
            beta_fast=float(inner.number("beta_fast", "beta_fast", default=32.0)),
            beta_slow=float(inner.number("beta_slow", "beta_slow", default=1.0)),
            original_max_position_embeddings=inner.integer("length", length_key),
        )
        if yarn.factor < 1 or yarn.original_max_position_embeddings < 1 or not yarn.beta_fast > yarn.beta_slow > 0:
            raise InputError(
                f"{inner.where}: YaRN has factor {yarn.factor:g}, beta_fast {yarn.beta_fast:g}, beta_slow "
                f"{yarn.beta_slow:g}, {length_key} {yarn.original_max_position_embeddings}, "
                "expected factor >= 1, beta_fast > beta_slow > 0 and a length >= 1"
            )
        defaults = [name for name in ("beta_fast", "beta_slow") if inner.sources[name] == "code default"]
        note = f" ({', '.join(defaults)}: code default)" if defaults else ""
        self.sources["yarn"] = f"checkpoint: {prefix}{factor_key}, {prefix}{length_key}{note}"
        return yarn

    def weight_block(self) -> tuple[int, int]:
        """Block [out, in] of the fp8 weight scales."""
        block = _nested(self.raw, "quantization_config", "weight_block_size")
        if block is None:
            self.sources["weight_block"] = "code default"
            return (128, 128)
        if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
            raise InputError(f"{self.where}: weight_block_size is {block!r:.80}, expected two positive integers")
        self.sources["weight_block"] = "checkpoint: quantization_config.weight_block_size"
        return (block[0], block[1])


_YARN_PLACES = ("rope_scaling", "rope_parameters.compress", "rope_parameters")


def _rope_type(block: Mapping[str, Any]) -> Any:
    return block.get("type", block.get("rope_type"))


def _is_number(value: Any) -> bool:
    """True for a finite JSON number that fits a float."""
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _nested(raw: Mapping[str, Any], *keys: str) -> Any:
    value: Any = raw
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _objects(raw: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every JSON object in `raw`, itself first, with its dotted place."""
    yield place, raw
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _objects(value, f"{place}.{key}" if place else str(key))


def _unlike_published(config: IndexerConfig) -> list[str]:
    """Traps for a config with the geometry of a published model and another value than that model's."""
    for name, published in (("V4-Flash", V4_FLASH), ("V4-Pro", V4_PRO)):
        geometry = ("hidden_size", "q_lora_rank", "compress_ratios", "index_n_heads", "index_head_dim")
        if all(getattr(config, key) == getattr(published, key) for key in geometry):
            return [
                f"{key} is {getattr(config, key)}, but the published {name} has {getattr(published, key)}"
                for key in ("rope_head_dim", "index_topk", "compress_rope_theta", "yarn", "rms_norm_eps")
                if getattr(config, key) != getattr(published, key)
            ]
    return []
