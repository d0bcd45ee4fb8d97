"""Every spelling of a checkpoint gives the same weights, and a layer costs what a layer needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from diffcheck.checkpoint import Checkpoint, load_layer
from diffcheck.checkpoint.names import canonical_name, group_of, split_layer
from diffcheck.refimpl import IndexerWeights, InputError, dequantise_weight

from .conftest import (
    FIELDS,
    HIDDEN,
    indexer_tensors,
    released_config,
    released_tensors,
    write_config,
    write_shards,
)

MODULE_NAMES = {
    "wq_b": "q_b_proj.weight",
    "wq_b_scale": "q_b_proj.weight_scale_inv",
    "weights_proj": "scorer.weights_proj.weight",
    "wkv": "kv_proj.weight",
    "wgate": "gate_proj.weight",
    "ape": "position_bias",
    "norm": "kv_norm.weight",
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same(weights: IndexerWeights, layer: int) -> None:
    for field, tensor in indexer_tensors(layer).items():
        found = getattr(weights, field)
        assert found.dtype == tensor.dtype, field
        assert found.shape == tensor.shape, field
        assert torch.equal(bits(found), bits(tensor)), field


def test_shards_and_index(checkpoint: Path) -> None:
    opened = Checkpoint(checkpoint)
    assert opened.indexer_layers == (1, 2, 4)
    assert opened.present_layers == (1, 2, 4)
    assert opened.absent_layers == ()
    assert opened.select() == (1, 2, 4)
    assert opened.select([4, 1, 4]) == (1, 4)
    opened.verify()
    for layer in opened.select():
        assert_same(opened.load(layer), layer)
    assert opened.bytes_needed(2) == sum(t.nbytes for t in indexer_tensors(2).values())
    config, weights = load_layer(str(checkpoint), 4)
    assert config == opened.config
    assert_same(weights, 4)


SCHEMES: dict[str, Callable[[str, str], str]] = {
    "released": lambda field, name: name,
    "model prefix": lambda field, name: f"model.{name}",
    "scale inv": lambda field, name: name.replace("wq_b.scale", "wq_b.weight_scale_inv"),
    "self_attn": lambda field, name: f"model.{name.replace('.attn.', '.self_attn.')}",
    "transformers modules": lambda field, name: f"model.layers.2.self_attn.compressor.indexer.{MODULE_NAMES[field]}",
    "modules, no prefix": lambda field, name: f"layers.2.attn.compressor.indexer.{MODULE_NAMES[field]}",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_name_schemes_give_equal_weights(tmp_path: Path, scheme: str) -> None:
    tensors = {
        SCHEMES[scheme](field, f"layers.2.{FIELDS[field]}"): tensor for field, tensor in indexer_tensors(2).items()
    }
    # draft modules have indexer names of their own and must not be taken for a layer
    tensors["mtp.0.attn.indexer.wq_b.weight"] = torch.zeros(1)
    write_config(tmp_path, released_config())
    write_shards(tmp_path, {"model.safetensors": tensors})
    opened = Checkpoint(tmp_path)
    assert opened.present_layers == (2,)
    assert opened.absent_layers == (1, 4)
    assert_same(opened.load(2), 2)


@pytest.mark.parametrize(
    ("stored", "canonical", "group"),
    [
        ("model.layers.3.self_attn.q_b_proj.weight", "layers.3.attn.wq_b.weight", "attention"),
        ("model.layers.3.self_attn.kv_norm.weight", "layers.3.attn.kv_norm.weight", "attention"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight", "attention"),
        ("model.layers.3.self_attn.sinks", "layers.3.attn.attn_sink", "attention"),
        ("layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight", "attention"),
        ("layers.3.self_attn.compressor.position_bias", "layers.3.attn.compressor.ape", "attention"),
        ("layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.norm.weight", "attention"),
        ("layers.3.input_layernorm.weight", "layers.3.attn_norm.weight", "attention"),
        ("layers.3.attn_hc.fn", "layers.3.hc_attn_fn", "hyper"),
        ("layers.3.ffn_hc.scale", "layers.3.hc_ffn_scale", "hyper"),
        ("layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias", "ffn"),
        ("layers.3.mlp.shared_experts.down_proj.weight", "layers.3.ffn.shared_experts.w2.weight", "ffn"),
        ("layers.3.mlp.experts.7.w3.weight_scale_inv", "layers.3.ffn.experts.7.w3.scale", "ffn"),
        ("layers.3.mlp.experts.gate_up_proj", "layers.3.ffn.experts.gate_up_proj", "ffn"),
        ("layers.3.attn.indexer.wk.weight", "layers.3.attn.indexer.wk.weight", None),
    ],
)
def test_canonical_names(stored: str, canonical: str, group: str | None) -> None:
    assert canonical_name(stored) == canonical
    inside = split_layer(canonical)
    assert inside is not None
    assert inside[0] == 3
    assert group_of(inside[1]) == group
    assert canonical_name(canonical) == canonical  # idempotent


def test_names_outside_layers() -> None:
    assert canonical_name("model.embed_tokens.weight") == "embed.weight"
    assert canonical_name("model.hc_head.hc_fn") == "hc_head_fn"
    assert canonical_name("lm_head.weight") == "head.weight"
    assert canonical_name("mtp.0.norm.weight") is None
    assert canonical_name("model.mtp.0.norm.weight") is None


@pytest.mark.parametrize("scale", ["e8m0", "bytes", "fp32"])
def test_scale_spellings(edit: Callable[..., Path], scale: str) -> None:
    stored = indexer_tensors(2)["wq_b_scale"]
    as_written = {"e8m0": stored, "bytes": stored.view(torch.uint8), "fp32": stored.float()}[scale]
    _, weights = load_layer(edit(wq_b_scale=as_written), 2)
    assert weights.wq_b_scale is not None
    assert torch.equal(weights.wq_b_scale.float(), stored.float())
    assert weights.wq_b_scale.dtype == (torch.float32 if scale == "fp32" else torch.float8_e8m0fnu)


def e4m3_by_definition(codes: np.ndarray) -> np.ndarray:
    """Values of e4m3fn bytes from sign, exponent and mantissa fields, in fp64."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = ((codes >> 3) & 15).astype(int), (codes & 7).astype(float)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("block", [(128, 128), (96, 160)])
def test_dequantisation_against_numpy(checkpoint: Path, block: tuple[int, int]) -> None:
    raw = indexer_tensors(2)
    rows, columns = raw["wq_b"].shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    scale = (torch.arange(blocks[0] * blocks[1]) % 30 + 100).to(torch.uint8).reshape(blocks)
    tensors = released_tensors(2) | {"layers.2.attn.indexer.wq_b.scale": scale.view(torch.float8_e8m0fnu)}
    write_shards(checkpoint, {"model.safetensors": tensors})
    write_config(checkpoint, released_config(quantization_config={"weight_block_size": list(block)}))
    config, weights = load_layer(checkpoint, 2)
    found = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block).numpy()
    expected = e4m3_by_definition(raw["wq_b"].view(torch.uint8).numpy())
    for row in range(rows):
        for first in range(0, columns, block[1]):
            power = int(scale[row // block[0], first // block[1]]) - 127
            expected[row, first : first + block[1]] *= 2.0**power
    assert np.array_equal(found, expected)  # a power of two times e4m3 is exact in fp32


def test_fp4_weights_load(edit: Callable[..., Path]) -> None:
    packed = torch.randint(-128, 128, (512, 128), dtype=torch.int8)
    scale = torch.full((512, 8), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    config, weights = load_layer(edit(wq_b=packed, wq_b_scale=scale), 2)
    assert weights.quantised
    values = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = packed.numpy().view(np.uint8)
    assert np.array_equal(values[:, 0::2].numpy(), table[codes & 15] / 128)
    assert np.array_equal(values[:, 1::2].numpy(), table[codes >> 4] / 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_already_dequantised_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = indexer_tensors(2)
    wide = dequantise_weight(raw["wq_b"], raw["wq_b_scale"], (128, 128))
    assert torch.equal(wide.bfloat16().float(), wide)  # so that nothing is lost by the test itself
    plain = {FIELDS[f]: t.to(dtype) for f, t in (raw | {"wq_b": wide}).items() if f != "wq_b_scale"}
    write_config(tmp_path, released_config(quantization_config=None))
    write_shards(tmp_path, {"model.safetensors": {f"layers.2.{name}": t for name, t in plain.items()}}, index=False)
    config, weights = load_layer(tmp_path, 2)
    assert not weights.quantised
    assert torch.equal(dequantise_weight(weights.wq_b, None, config.weight_block), wide)


def test_index_rebuilt_from_headers(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").unlink()
    # a trace beside the shards has layers.N.* names too and is no part of the weights
    save_file(
        {"layers.2.x": torch.zeros(1)},
        checkpoint / "trace.safetensors",
        metadata={"schema": "diffcheck-trace-1"},
    )
    opened = Checkpoint(checkpoint)
    assert opened.index.source == "headers"
    for layer in (1, 2, 4):
        assert_same(opened.load(layer), layer)


def test_other_files_beside_the_model_are_not_its_shards(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").unlink()
    save_file(released_tensors(4), checkpoint / "consolidated.safetensors")
    opened = Checkpoint(checkpoint)
    assert opened.index.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_any_file_names_without_an_index(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    write_shards(tmp_path, {"weights.safetensors": released_tensors(2)}, index=False)
    trace = tmp_path / "trace.safetensors"
    save_file({"layers.4.x": torch.zeros(1)}, trace, metadata={"schema": "diffcheck-trace-1"})
    opened = Checkpoint(tmp_path)
    assert opened.index.files == ("weights.safetensors",)
    assert_same(opened.load(2), 2)


def test_one_safetensors_file_beside_a_config(checkpoint: Path) -> None:
    opened = Checkpoint(checkpoint / "model-00002-of-00002.safetensors")
    assert opened.present_layers == (4,)
    assert_same(opened.load(4), 4)


def hub_cache(checkpoint: Path, root: Path, commit: str = "abc123") -> Path:
    """The checkpoint as Hugging Face's cache lays it out: files are links into ../../blobs."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        blob = repository / "blobs" / f"{commit}{number:04x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))
    return repository


def test_hub_snapshot_of_links(checkpoint: Path, tmp_path: Path) -> None:
    repository = hub_cache(checkpoint, tmp_path / "hub")
    for path in (repository / "snapshots" / "abc123", repository):
        assert_same(load_layer(path, 4)[1], 4)
    second = repository / "snapshots" / "def456"
    second.mkdir()
    with pytest.raises(InputError, match=r"has 2 snapshots and no refs/main, expected the path of one"):
        Checkpoint(repository)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123\n")
    assert Checkpoint(repository).directory.name == "abc123"
    (repository / "refs" / "main").write_text("000000")
    with pytest.raises(InputError, match="refs/main names 000000, which is not in snapshots"):
        Checkpoint(repository)


SHARDED = ("wq_b", "wq_b_scale", "weights_proj")


def write_ranks(directory: Path, world: int, fields: dict[str, Tensor]) -> None:
    for rank in range(world):
        tensors = {}
        for field, tensor in fields.items():
            if field in SHARDED:
                tensor = bits(tensor).chunk(world)[rank].contiguous().view(tensor.dtype)
            tensors[f"layers.2.{FIELDS[field]}"] = tensor
        save_file(tensors, directory / f"model{rank}-mp{world}.safetensors")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_converter_rank_files(tmp_path: Path, world: int) -> None:
    write_config(tmp_path, released_config())
    write_ranks(tmp_path, world, indexer_tensors(2))
    opened = Checkpoint(tmp_path)
    assert opened.index.source == "ranks"
    assert_same(opened.load(2), 2)
    assert opened.bytes_needed(2) == sum(t.nbytes for t in indexer_tensors(2).values())


def test_twelve_ranks_are_joined_in_rank_order(tmp_path: Path) -> None:
    # by name, model10 and model11 would come before model2
    world, heads = 12, 24
    raw = indexer_tensors(2) | {
        "wq_b": torch.randn(heads * 128, 256).to(torch.float8_e4m3fn),
        "wq_b_scale": (torch.arange(48) + 100).to(torch.uint8).reshape(24, 2).view(torch.float8_e8m0fnu),
        "weights_proj": torch.randn(heads, HIDDEN).bfloat16(),
    }
    write_config(tmp_path, released_config(index_n_heads=heads))
    write_ranks(tmp_path, world, raw)
    weights = load_layer(tmp_path, 2)[1]
    for field in SHARDED:
        assert torch.equal(bits(getattr(weights, field)), bits(raw[field])), field


def test_rank_file_errors(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    write_ranks(tmp_path, 4, indexer_tensors(2))
    (tmp_path / "model2-mp4.safetensors").rename(tmp_path / "away")
    with pytest.raises(InputError, match=r"model2-mp4.safetensors is absent, expected all 4 ranks"):
        Checkpoint(tmp_path)
    (tmp_path / "away").rename(tmp_path / "model2-mp4.safetensors")
    save_file(released_tensors(1), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"has both model0-mp4.safetensors and model.safetensors, expected one set"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file(released_tensors(2), tmp_path / "model1-mp4.safetensors")
    with pytest.raises(InputError, match=r"model1-mp4.*shape \[512, 256\], expected \[128, 256\], one of 4 shares"):
        load_layer(tmp_path, 2)


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=128,
        q_lora_rank=128,
        num_experts_per_tok=2,
        n_routed_experts=4,
        o_groups=1,
        o_lora_rank=32,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=16,
        hc_mult=2,
        compress_ratios=[0, 4, 128, 4],
        num_hash_layers=1,
        qk_rope_head_dim=64,
        rope_scaling={
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    directory = tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory)
    return directory, model


def test_transformers_save_pretrained(transformers_model: tuple[Path, object]) -> None:
    directory, model = transformers_model
    opened = Checkpoint(directory)
    config = opened.config
    assert config.compress_ratios == (0, 4, 128, 4)
    assert (config.rope_head_dim, config.index_topk, config.compress_rope_theta) == (64, 16, 160000)
    assert config.yarn is not None
    assert config.yarn.factor == 16
    for layer in opened.select():
        weights = opened.load(layer)
        assert not weights.quantised
        module = model.model.layers[layer].self_attn.compressor.indexer  # type: ignore[attr-defined]
        assert torch.equal(weights.wq_b, module.q_b_proj.weight)
        assert torch.equal(weights.weights_proj, module.scorer.weights_proj.weight)
        assert torch.equal(weights.wkv, module.kv_proj.weight)
        assert torch.equal(weights.wgate, module.gate_proj.weight)
        assert torch.equal(weights.ape, module.position_bias)
        assert torch.equal(weights.norm, module.kv_norm.weight)


def test_transformers_module_names(transformers_model: tuple[Path, object], tmp_path: Path) -> None:
    directory, model = transformers_model
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # type: ignore[attr-defined]
    save_file(state, tmp_path / "model.safetensors")
    by_modules, saved = Checkpoint(tmp_path), Checkpoint(directory)
    assert by_modules.index.locations.keys() >= {n for n in saved.index.locations if ".experts." not in n}
    for layer in saved.select():
        for field in ("wq_b", "weights_proj", "wkv", "wgate", "ape", "norm"):
            assert torch.equal(getattr(by_modules.load(layer), field), getattr(saved.load(layer), field))


MEASURE = """
import re, sys
from diffcheck.checkpoint import Checkpoint
def peak():  # not ru_maxrss, which a child inherits from the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
tiny = Checkpoint(sys.argv[1]).load(2)  # the libraries' own first-use memory
before = peak()
opened = Checkpoint(sys.argv[2])
weights = opened.load(2)
print(peak() - before, opened.bytes_needed(2) / 2**20)
"""


def write_with_padding(path: Path, tensors: dict[str, Tensor], *, padding: int) -> None:
    """A sparse shard of `tensors` with other tensors of `padding` bytes in all between them."""
    header: dict[str, object] = {}
    places, end = [], 0
    for number, (name, tensor) in enumerate(tensors.items()):
        header[f"padding.{number}"] = {
            "dtype": "U8",
            "shape": [padding // len(tensors)],
            "data_offsets": [end, end + padding // len(tensors)],
        }
        end += padding // len(tensors)
        names = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.bfloat16: "BF16"}
        dtype = names.get(tensor.dtype, "F32")
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        places.append((end, tensor))
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for place, tensor in places:
            file.seek(8 + len(text) + place)
            file.write(bits(tensor).numpy().tobytes())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak RSS from /proc")
def test_memory_grows_by_a_layer_and_not_by_a_shard(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "wide"
    write_config(directory, released_config(q_lora_rank=1024, index_n_heads=64))
    big = released_tensors(2) | {
        "layers.2.attn.indexer.wq_b.weight": torch.randn(64 * 128, 1024).to(torch.float8_e4m3fn),
        "layers.2.attn.indexer.wq_b.scale": torch.full((64, 8), 2.0**-9).to(torch.float8_e8m0fnu),
        "layers.2.attn.indexer.weights_proj.weight": torch.randn(64, HIDDEN).bfloat16(),
    }
    write_with_padding(directory / "model.safetensors", big, padding=300 * 2**20)
    command = [sys.executable, "-c", MEASURE, str(checkpoint), str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, needed = map(float, run.stdout.split())
    print(f"peak RSS grew by {grown:.1f} MiB for {needed:.2f} MiB needed, shard 300 MiB")
    assert grown < 4 * needed


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the memory maps from /proc")
def test_weights_do_not_hold_the_shard(checkpoint: Path) -> None:
    weights = Checkpoint(checkpoint).load(2)
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()
    for field in FIELDS:
        tensor = getattr(weights, field)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, field


def test_opening_reads_no_shard(checkpoint: Path) -> None:
    for shard in checkpoint.glob("model-*.safetensors"):
        shard.write_bytes(b"no header at all")
    assert Checkpoint(checkpoint).present_layers == (1, 2, 4)


def test_only_the_shards_of_the_layer_are_opened(checkpoint: Path) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    assert_same(Checkpoint(checkpoint).load(4), 4)
