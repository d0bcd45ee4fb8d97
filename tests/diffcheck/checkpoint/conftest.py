"""Tiny checkpoints, written tensor by tensor so that a test can break exactly one thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, LORA, HEADS, DIM = 96, 256, 4, 128
FIELDS = {
    "wq_b": "attn.indexer.wq_b.weight",
    "wq_b_scale": "attn.indexer.wq_b.scale",
    "weights_proj": "attn.indexer.weights_proj.weight",
    "wkv": "attn.indexer.compressor.wkv.weight",
    "wgate": "attn.indexer.compressor.wgate.weight",
    "ape": "attn.indexer.compressor.ape",
    "norm": "attn.indexer.compressor.norm.weight",
}


def released_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 5,
        "q_lora_rank": LORA,
        "qk_rope_head_dim": 64,
        "index_n_heads": HEADS,
        "index_head_dim": DIM,
        "index_topk": 16,
        "n_routed_experts": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "quantization_config": {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        "compress_ratios": [0, 4, 4, 128, 4, 0],
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def indexer_tensors(layer: int) -> dict[str, Tensor]:
    """Fields of IndexerWeights; fp8 wq_b with exponents that differ by block."""
    random = torch.Generator().manual_seed(layer)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    scale = 2.0 ** torch.randint(-14, -9, (HEADS * DIM // 128, LORA // 128), generator=random)
    return {
        "wq_b": (normal(HEADS * DIM, LORA) * 60).clamp(-448, 448).to(torch.float8_e4m3fn),
        "wq_b_scale": scale.to(torch.float8_e8m0fnu),
        "weights_proj": normal(HEADS, HIDDEN).bfloat16(),
        "wkv": normal(2 * DIM, HIDDEN).bfloat16(),
        "wgate": normal(2 * DIM, HIDDEN).bfloat16(),
        "ape": normal(4, 2 * DIM),
        "norm": normal(DIM).bfloat16(),
    }


def released_tensors(layer: int) -> dict[str, Tensor]:
    return {f"layers.{layer}.{FIELDS[field]}": tensor for field, tensor in indexer_tensors(layer).items()}


def write_config(directory: Path, config: Mapping[str, Any] | str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text, encoding="utf-8")


def write_shards(directory: Path, shards: Mapping[str, Mapping[str, Tensor]], *, index: bool = True) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(dict(tensors), directory / file, metadata={"format": "pt"})
    if index:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Layers 1 and 2 in one shard, layer 4 in the other; indexer tensors only."""
    directory = tmp_path / "model"
    write_config(directory, released_config())
    first = released_tensors(1) | released_tensors(2) | {"norm.weight": torch.ones(HIDDEN)}
    shards = {
        "model-00001-of-00002.safetensors": first,
        "model-00002-of-00002.safetensors": released_tensors(4),
    }
    write_shards(directory, shards)
    return directory


@pytest.fixture
def edit(checkpoint: Path) -> Callable[..., Path]:
    """Rewrite the first shard as layer 2 alone, some fields of its indexer replaced, or dropped (None)."""

    def rewrite(**changes: Tensor | None) -> Path:
        tensors = released_tensors(2)
        for field, tensor in changes.items():
            name = f"layers.2.{FIELDS[field]}"
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        write_shards(checkpoint, {"model-00001-of-00002.safetensors": tensors})
        return checkpoint

    return rewrite
