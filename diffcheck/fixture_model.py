"""Whole checkpoints in the released layout, made of random codes: every tensor of the first layers of a geometry.

For timing, memory and plumbing at real shapes, not for quality: nothing is learnt. Codes are drawn straight in the
stored types (e4m3, packed e2m1, bf16), so tens of GB take about as long as writing them: a random byte picks a quantile
of a Gaussian from a table of 256, and packed e2m1 needs no table. Scales give a matrix an RMS of about inputs^-0.5.

One shard a layer and one for the rest, each written tensor by tensor, so memory is one tensor. A shard that is there
already is kept, so interrupted writing goes on. A tensor's bytes depend on seed, layer and name only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from .checkpoint.names import expected_in_layer
from .fixture import GEOMETRIES, INDEX_NAME, Geometry
from .refimpl.errors import InputError
from .refimpl.model import ModelConfig

Say = Callable[[str], None]
E4M3_RMS = 32.0
"""RMS of the stored e4m3 numbers; a scale of 2^n brings them to the weight's."""
E2M1_RMS = (68.5 / 8) ** 0.5
"""RMS of the e2m1 values when all 16 codes are equally likely."""
_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to come: its name in the shard, safetensors' dtype, shape, and how its bytes are drawn."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    draw: Callable[[np.random.Generator, Planned], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * {"I64": 8, "F32": 4, "BF16": 2}.get(self.dtype, 1)


def write_model(
    directory: str | Path, *, like: str | Geometry = "v4-flash", layers: int, seed: int = 0, say: Say = lambda _: None
) -> Path:
    """Write the first `layers` layers, embedding, head and tokenizer.json; returns the directory.

    The config says so many layers, so the checkpoint is whole. Raises InputError for an unknown geometry, a number of
    layers that it does not have, a directory that holds another checkpoint or cannot be written.
    """
    if isinstance(like, str):
        if like not in GEOMETRIES:
            raise InputError(f"like is {like!r}, expected one of {', '.join(GEOMETRIES)}")
        like = GEOMETRIES[like]
    if not 1 <= layers <= len(like.compress_ratios):
        raise InputError(f"layers is {layers}, expected 1 to {len(like.compress_ratios)}")
    geometry = replace(like, compress_ratios=like.compress_ratios[:layers], num_nextn_predict_layers=0)
    config = ModelConfig.from_dict(geometry.config_json(), where="fixture")
    plans = {f"model-{n + 1:05d}-of-{layers + 1:05d}.safetensors": p for n, p in enumerate(_plans(geometry, config))}
    directory = Path(directory)
    text = json.dumps({**geometry.config_json(), "diffcheck_seed": seed}, indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = directory / "config.json"
        if any(directory.iterdir()) and (not found.is_file() or found.read_text(encoding="utf-8") != text):
            raise InputError(f"{directory}: holds something else, expected a new directory or this very checkpoint")
        found.write_text(text, encoding="utf-8")
        for number, (file, plan) in enumerate(plans.items()):
            if not (directory / file).exists():
                _write_shard(directory / file, plan, seed)
            say(f"shard {number + 1} of {len(plans)}: {sum(t.nbytes for t in plan) / 1e9:.2f} GB")
        weight_map = {tensor.name: file for file, plan in plans.items() for tensor in plan}
        total = sum(tensor.nbytes for plan in plans.values() for tensor in plan)
        (directory / "tokenizer.json").write_text(json.dumps(byte_tokeniser()), encoding="utf-8")
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None
    return directory


def layer_bytes(like: str, layer: int) -> int:
    """Bytes of one layer of a named geometry, 0 onwards; for choosing how many fit a disk."""
    geometry = GEOMETRIES[like]
    config = ModelConfig.from_dict(geometry.config_json(), where="fixture")
    return sum(tensor.nbytes for tensor in _layer_plan(geometry, config, layer))


def _write_shard(path: Path, plan: list[Planned], seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        place = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor in plan:
            key = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
            generator = np.random.Generator(np.random.SFC64(list(key)))
            data = np.ascontiguousarray(tensor.draw(generator, tensor))
            assert data.nbytes == tensor.nbytes, f"{tensor.name} has the size that its header says"
            out.write(data.data)
    partial.replace(path)


def _plans(geometry: Geometry, config: ModelConfig) -> Iterator[list[Planned]]:
    """Tensors of each shard: the layers', then the rest."""
    for layer in range(config.layers):
        yield _layer_plan(geometry, config, layer)
    hidden, streams = config.indexer.hidden_size, config.hc_mult
    yield [
        Planned("embed.weight", "BF16", (config.vocab_size, hidden), _bf16(1.0)),
        Planned("head.weight", "BF16", (config.vocab_size, hidden), _bf16(hidden**-0.5)),
        Planned("norm.weight", "BF16", (hidden,), _norm),
        Planned("hc_head_fn", "F32", (streams, streams * hidden), _fp32((streams * hidden) ** -0.5)),
        Planned("hc_head_base", "F32", (streams,), _fp32(0.5)),
        Planned("hc_head_scale", "F32", (1,), _fp32(0.5)),
    ]


def _layer_plan(geometry: Geometry, config: ModelConfig, layer: int) -> list[Planned]:
    """All tensors of one layer, those that `inspect` expects of it, in its order; scales follow their weights."""
    c, ratio = config.indexer, config.ratio(layer)
    hidden, lora, heads, dim = c.hidden_size, c.q_lora_rank, config.num_attention_heads, config.head_dim
    grouped, index_rows = config.o_groups * config.o_lora_rank, c.index_n_heads * c.index_head_dim
    columns, two_d = dim * (2 if ratio == 4 else 1), 2 * c.index_head_dim
    mixes, flat, inner = (2 + config.hc_mult) * config.hc_mult, config.hc_mult * hidden, config.moe_intermediate_size
    fp8 = {
        "attn.wq_a": (lora, hidden),
        "attn.wq_b": (heads * dim, lora),
        "attn.wkv": (dim, hidden),
        "attn.wo_a": (grouped, heads // config.o_groups * dim),
        "attn.wo_b": (hidden, grouped),
        "attn.indexer.wq_b": (index_rows, lora),
    }
    plain = {
        "attn.compressor.wkv.weight": (columns, hidden),
        "attn.compressor.wgate.weight": (columns, hidden),
        "attn.indexer.compressor.wkv.weight": (two_d, hidden),
        "attn.indexer.compressor.wgate.weight": (two_d, hidden),
        "attn.indexer.weights_proj.weight": (c.index_n_heads, hidden),
        "ffn.gate.weight": (config.n_routed_experts, hidden),
    }
    norms = {
        "attn_norm": hidden, "ffn_norm": hidden, "attn.q_norm": lora, "attn.kv_norm": dim,
        "attn.compressor.norm": dim, "attn.indexer.compressor.norm": c.index_head_dim,
    }  # fmt: skip
    full = {
        "attn.attn_sink": ((heads,), 1.0),
        "attn.compressor.ape": ((ratio, columns), 0.5),
        "attn.indexer.compressor.ape": ((4, two_d), 0.5),
        **{f"hc_{block}_fn": ((mixes, flat), flat**-0.5) for block in ("attn", "ffn")},
        **{f"hc_{block}_base": ((mixes,), 0.5) for block in ("attn", "ffn")},
        **{f"hc_{block}_scale": ((3,), 0.5) for block in ("attn", "ffn")},
        "ffn.gate.bias": ((config.n_routed_experts,), 0.01),
    }
    plan: list[Planned] = []
    for name in (n for group in expected_in_layer(ratio, config.n_routed_experts).values() for n in group):
        stem, place = name.removesuffix(".weight"), f"layers.{layer}.{name}"
        if name == "ffn.gate.bias" and layer < config.num_hash_layers:
            shape: tuple[int, ...] = (config.vocab_size, config.num_experts_per_tok)
            table = _expert_table(config.n_routed_experts)
            plan.append(Planned(place.replace("bias", "tid2eid"), "I64", shape, table))
        elif name in full:
            shape, size = full[name]
            plan.append(Planned(place, "F32", shape, _fp32(size)))
        elif name in plain:
            plan.append(Planned(place, "BF16", plain[name], _bf16(hidden**-0.5)))
        elif stem in norms:
            plan.append(Planned(place, "BF16", (norms[stem],), _norm))
        elif stem in fp8 or ".shared_experts." in stem:
            rows, inputs = fp8.get(stem) or ((hidden, inner) if stem.endswith("w2") else (inner, hidden))
            block = geometry.weight_block_size
            plan.append(Planned(place, "F8_E4M3", (rows, inputs), _e4m3))
            shape = (-(-rows // block[0]), -(-inputs // block[1]))
            plan.append(Planned(f"layers.{layer}.{stem}.scale", "F8_E8M0", shape, _e8m0(inputs, E4M3_RMS)))
        else:
            rows, inputs = (hidden, inner) if stem.endswith("w2") else (inner, hidden)
            plan.append(Planned(place, "I8", (rows, inputs // 2), _bytes))
            shape = (rows, -(-inputs // 32))
            plan.append(Planned(f"layers.{layer}.{stem}.scale", "F8_E8M0", shape, _e8m0(inputs, E2M1_RMS)))
    return plan


def _bytes(generator: np.random.Generator, tensor: Planned) -> np.ndarray:
    count = math.prod(tensor.shape)
    words: np.ndarray = generator.bit_generator.random_raw(-(-count // 8))
    return words.view(np.uint8)[:count]


def _lookup(generator: np.random.Generator, tensor: Planned, values: np.ndarray) -> np.ndarray:
    chosen: np.ndarray = values[_bytes(generator, tensor)]
    return chosen


def _e4m3(generator: np.random.Generator, tensor: Planned) -> np.ndarray:
    codes = torch.from_numpy(_QUANTILES * E4M3_RMS).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _lookup(generator, tensor, codes)


def _bf16(size: float) -> Callable[[np.random.Generator, Planned], np.ndarray]:
    bits = torch.from_numpy(_QUANTILES * size).bfloat16().view(torch.int16).numpy()
    return lambda generator, tensor: _lookup(generator, tensor, bits)


def _norm(generator: np.random.Generator, tensor: Planned) -> np.ndarray:
    bits: np.ndarray = torch.from_numpy(1 + 0.1 * _QUANTILES).bfloat16().view(torch.int16).numpy()
    return _lookup(generator, tensor, bits)


def _fp32(size: float) -> Callable[[np.random.Generator, Planned], np.ndarray]:
    return lambda generator, tensor: _lookup(generator, tensor, _QUANTILES * np.float32(size))


def _e8m0(inputs: int, stored_rms: float) -> Callable[[np.random.Generator, Planned], np.ndarray]:
    """Scales around inputs^-0.5 / stored_rms, one power of two up or down."""
    middle = 127 + round(math.log2(inputs**-0.5 / stored_rms))
    exponents = np.array([middle - 1, middle, middle, middle + 1], dtype=np.uint8)
    return lambda generator, tensor: exponents[_bytes(generator, tensor) & 3]


def _expert_table(experts: int) -> Callable[[np.random.Generator, Planned], np.ndarray]:
    """Rows of different experts: a random start and a random stride that has no factor in common with their number."""
    strides = np.array([s for s in range(1, max(experts, 2)) if math.gcd(s, experts) == 1])

    def draw(generator: np.random.Generator, tensor: Planned) -> np.ndarray:
        rows, width = tensor.shape
        start = generator.integers(experts, size=(rows, 1))
        stride = strides[generator.integers(len(strides), size=(rows, 1))]
        return ((start + stride * np.arange(width)) % experts).astype(np.int64)

    return draw


def byte_tokeniser() -> dict[str, object]:
    """A tokenizer.json with one token a byte, ids 0 to 255: byte-level BPE without a merge."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    character = {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
