"""Checkpoints in the released layout, written from a seed: any geometry, real shapes included, no download.

What is written is what the indexer needs and nothing else: config.json with the released keys, and for each
chosen layer the seven `attn.indexer.*` tensors plus the norm and projection that make x and qr (`attn_norm`,
`attn.wq_a`, `attn.q_norm`), spread over safetensors shards with an index. wq_b and wq_a are F8_E4M3 with one
F8_E8M0 scale per weight block, ape is F32, the rest BF16.

The tensors come from `diffcheck.inputs.weights`: unfriendly as trained ones are, of the magnitudes of a
trained model, and reading the same latent directions as the synthetic hidden states. The same arguments give
the same bytes for one torch build, and a layer's tensors do not depend on which other layers are written.

Files appear under temporary names and are renamed once all are complete, the index last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .inputs.weights import WeightMaker
from .refimpl.config import IndexerConfig
from .refimpl.errors import InputError
from .refimpl.formats import E4M3_BLOCK

INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What config.json says; names are its keys. The defaults are what V4-Flash and V4-Pro share.

    compress_ratios lists the layers of the stack; `config_json` appends one 0 per draft (MTP) module, as
    released.
    """

    hidden_size: int
    q_lora_rank: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int = 64
    index_head_dim: int = 128
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2048
    num_hash_layers: int = 3
    num_nextn_predict_layers: int = 1
    compress_rope_theta: float = 160000
    vocab_size: int = 129280
    routed_scaling_factor: float = 1.5
    weight_block_size: tuple[int, int] = (128, 128)

    def config_json(self) -> dict[str, Any]:
        """The object that config.json holds, in the released spelling."""
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": len(self.compress_ratios),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "q_lora_rank": self.q_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora_rank,
            "index_n_heads": self.index_n_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "sliding_window": self.sliding_window,
            "n_routed_experts": self.n_routed_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_hash_layers": self.num_hash_layers,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "compress_rope_theta": self.compress_rope_theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "max_position_embeddings": 1048576,
            "vocab_size": self.vocab_size,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": self.routed_scaling_factor,
            "swiglu_limit": 10.0,
            "torch_dtype": "bfloat16",
            "expert_dtype": "fp4",
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "weight_block_size": list(self.weight_block_size),
            },
            "compress_ratios": [*self.compress_ratios, *[0] * self.num_nextn_predict_layers],
        }


GEOMETRIES: dict[str, Geometry] = {
    "v4-flash": Geometry(hidden_size=4096, q_lora_rank=1024, index_topk=512, compress_ratios=(0, 0, *(4, 128) * 20, 4)),
    "v4-pro": Geometry(
        hidden_size=7168,
        q_lora_rank=1536,
        index_topk=1024,
        compress_ratios=(128, 128, *(4, 128) * 29, 4),
        num_attention_heads=128,
        o_groups=16,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
    ),
    "mini": Geometry(
        hidden_size=256,
        q_lora_rank=128,
        index_topk=64,
        compress_ratios=(0, 0, 4, 128, 4),
        index_n_heads=32,
        num_attention_heads=8,
        head_dim=128,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        num_hash_layers=2,
        num_nextn_predict_layers=0,
        vocab_size=512,
    ),
}
"""Geometries by name: the two released models, and a miniature of the same architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was written: directory, its config as a reader sees it, layers, file names, tensor count and
    bytes."""

    directory: Path
    config: IndexerConfig
    layers: tuple[int, ...]
    files: tuple[str, ...]
    tensors: int
    total_size: int

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.layers))
        return (
            f"{self.directory}: indexers of layers {layers}; {self.tensors} tensors, "
            f"{self.total_size / 1e6:.1f} MB in {', '.join(self.files)}"
        )


def write_checkpoint(
    directory: str | Path,
    *,
    like: str | Geometry = "v4-flash",
    layers: Sequence[int] | None = None,
    seed: int = 0,
    shards: int = 2,
    overwrite: bool = False,
    hidden_size: int | None = None,
    q_lora_rank: int | None = None,
    index_n_heads: int | None = None,
    index_head_dim: int | None = None,
    index_topk: int | None = None,
) -> Summary:
    """Write a seeded checkpoint of the indexers of `layers` (all that the geometry has by default).

    like: a name of GEOMETRIES or a Geometry, of which the last five arguments replace fields. shards: number
    of safetensors files. overwrite: write into a directory that is not empty; its config.json, index and
    model-*-of-* shards are replaced, other files stay.

    Raises InputError for a geometry that cannot be, a layer without indexer, a shard count below 1 or above
    the number of tensors, a directory that is not empty or cannot be written.
    """
    given = {
        "hidden_size": hidden_size,
        "q_lora_rank": q_lora_rank,
        "index_n_heads": index_n_heads,
        "index_head_dim": index_head_dim,
        "index_topk": index_topk,
    }
    geometry = _geometry(like, {name: value for name, value in given.items() if value is not None})
    config = IndexerConfig.from_dict(geometry.config_json(), where="fixture")
    chosen = _layers(config, layers)
    plan = list(_plan(config, chosen))
    if not 1 <= shards <= len(plan):
        raise InputError(f"shards is {shards}, expected 1 to {len(plan)} (the number of tensors)")
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory}: exists and is not a directory, expected a directory to write to")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise InputError(f"{directory}: is not empty, expected a new directory (or say overwrite)")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files, total = _write(directory, geometry, config, plan, seed, shards)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None
    return Summary(directory=directory, config=config, layers=chosen, files=files, tensors=len(plan), total_size=total)


def _geometry(like: str | Geometry, overrides: dict[str, Any]) -> Geometry:
    if isinstance(like, str):
        if like not in GEOMETRIES:
            raise InputError(f"like is {like!r}, expected one of {', '.join(GEOMETRIES)}")
        like = GEOMETRIES[like]
    geometry = replace(like, **overrides)
    if geometry.q_lora_rank % E4M3_BLOCK or geometry.q_lora_rank < 1:
        raise InputError(
            f"q_lora_rank is {geometry.q_lora_rank}, expected a positive multiple of {E4M3_BLOCK} "
            "(the activation blocks of the fp8 product)"
        )
    return geometry


def _layers(config: IndexerConfig, layers: Sequence[int] | None) -> tuple[int, ...]:
    have = config.indexer_layers
    wanted = have if layers is None else tuple(sorted(set(layers)))
    wrong = [layer for layer in wanted if layer not in have]
    if wrong or not wanted:
        listed = ", ".join(map(str, have))
        raise InputError(f"layers {wrong or 'are none'}: expected layers with an indexer (compress ratio 4): {listed}")
    return wanted


@dataclass(frozen=True, slots=True)
class _Planned:
    """One tensor to come; `kind` is its name within the layer, a scale is made with its weight."""

    layer: int
    kind: str
    size: int

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.kind}"


def _plan(config: IndexerConfig, layers: Iterable[int]) -> Iterator[_Planned]:
    """Every tensor with its size in bytes, in the order in which they fill the shards."""
    hidden, lora, two_d = config.hidden_size, config.q_lora_rank, 2 * config.index_head_dim
    heads = config.index_n_heads
    out = heads * config.index_head_dim
    block_out, block_in = config.weight_block
    sizes = {
        "attn_norm.weight": 2 * hidden,
        "attn.wq_a.weight": lora * hidden,
        "attn.wq_a.scale": -(-lora // block_out) * -(-hidden // block_in),
        "attn.q_norm.weight": 2 * lora,
        "attn.indexer.wq_b.weight": out * lora,
        "attn.indexer.wq_b.scale": -(-out // block_out) * -(-lora // block_in),
        "attn.indexer.weights_proj.weight": 2 * heads * hidden,
        "attn.indexer.compressor.wkv.weight": 2 * two_d * hidden,
        "attn.indexer.compressor.wgate.weight": 2 * two_d * hidden,
        "attn.indexer.compressor.ape": 4 * 4 * two_d,
        "attn.indexer.compressor.norm.weight": two_d,
    }
    for layer in layers:
        for kind, size in sizes.items():
            yield _Planned(layer, kind, size)


def _write(
    directory: Path, geometry: Geometry, config: IndexerConfig, plan: list[_Planned], seed: int, shards: int
) -> tuple[tuple[str, ...], int]:
    from safetensors.torch import save_file

    shard_of, total = _assign(plan, shards), sum(tensor.size for tensor in plan)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    temporary = {name: directory / f".{name}.{os.getpid()}.partial" for name in (*names, "config.json", INDEX_NAME)}
    maker = WeightMaker(config, seed)
    try:
        for number, name in enumerate(names):
            tensors = {
                t.name: maker.tensor(t.layer, t.kind) for t, s in zip(plan, shard_of, strict=True) if s == number
            }
            save_file(tensors, str(temporary[name]), metadata={"format": "pt"})
        weight_map = {t.name: names[s] for t, s in zip(plan, shard_of, strict=True)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        temporary["config.json"].write_text(json.dumps(geometry.config_json(), indent=2) + "\n", encoding="utf-8")
        temporary[INDEX_NAME].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        # without its index the old checkpoint is gone before a shard of it changes, so a crash leaves no
        # mixture
        (directory / INDEX_NAME).unlink(missing_ok=True)
        for old in directory.iterdir():
            if _SHARD_NAME.fullmatch(old.name) and old.name not in names:
                old.unlink()
        for name in (*names, "config.json", INDEX_NAME):
            temporary[name].replace(directory / name)
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return (*names, "config.json", INDEX_NAME), total


def _assign(plan: list[_Planned], shards: int) -> list[int]:
    """Shard number of each tensor: about equal bytes, in order, none empty."""
    total = sum(tensor.size for tensor in plan)
    numbers: list[int] = []
    before = 0
    for i, tensor in enumerate(plan):
        ideal = (before + tensor.size // 2) * shards // total
        last = numbers[-1] if numbers else -1
        # at most one step at a time, and never so few tensors left that a later shard would be empty
        numbers.append(min(max(ideal, last, 0, shards - (len(plan) - i)), last + 1))
        before += tensor.size
    return numbers
