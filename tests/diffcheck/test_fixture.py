"""Seeded checkpoints: the layout byte by byte, determinism, and weights that behave like trained ones."""

import json
import struct
import time
from pathlib import Path

import pytest
import torch

from diffcheck.fixture import GEOMETRIES, INDEX_NAME, Geometry, write_checkpoint
from diffcheck.inputs.hidden import synthetic_hidden
from diffcheck.inputs.weights import fit_rows, quantise_weight
from diffcheck.refimpl import (
    V4_FLASH,
    V4_PRO,
    IndexerConfig,
    IndexerWeights,
    InputError,
    dequantise_weight,
    run_indexer,
)
from diffcheck.refimpl.compressor import rms_norm, window_slots
from diffcheck.refimpl.linear import fp8_linear

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
ODD = Geometry(
    hidden_size=192, q_lora_rank=128, index_topk=16, compress_ratios=(4, 0, 4), index_n_heads=3, index_head_dim=64,
    qk_rope_head_dim=32, num_nextn_predict_layers=0,
)  # fmt: skip


def read_shard(path):
    """A safetensors file by hand: 8 bytes of header length, JSON, then the data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = torch.frombuffer(bytearray(data[8 + length + first : 8 + length + last]), dtype=torch.uint8)
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    assert 8 + length + max(e["data_offsets"][1] for e in header.values()) == len(data)
    return tensors, metadata


def read_checkpoint(directory):
    index = json.loads((directory / INDEX_NAME).read_text())
    tensors = {}
    assert {path.name for path in directory.glob("model-*")} == set(index["weight_map"].values())
    for shard in sorted(set(index["weight_map"].values())):
        held, metadata = read_shard(directory / shard)
        assert metadata == {"format": "pt"}
        assert held, f"{shard} is empty"
        assert all(index["weight_map"][name] == shard for name in held)
        tensors |= held
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return IndexerConfig.from_json(directory / "config.json"), tensors


def layer_weights(tensors, layer):
    prefix = f"layers.{layer}.attn.indexer."
    return IndexerWeights(
        wq_b=tensors[prefix + "wq_b.weight"],
        wq_b_scale=tensors[prefix + "wq_b.scale"],
        weights_proj=tensors[prefix + "weights_proj.weight"],
        wkv=tensors[prefix + "compressor.wkv.weight"],
        wgate=tensors[prefix + "compressor.wgate.weight"],
        ape=tensors[prefix + "compressor.ape"],
        norm=tensors[prefix + "compressor.norm.weight"],
    )


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def mini_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mini") / "checkpoint"
    summary = write_checkpoint(directory, like="mini", seed=3)
    return summary, *read_checkpoint(directory)


@pytest.fixture(scope="module")
def flash_layer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("flash")
    began = time.perf_counter()
    write_checkpoint(directory, like="v4-flash", layers=[4])
    seconds = time.perf_counter() - began
    return seconds, *read_checkpoint(directory)


def test_released_geometries():
    for name, published, ratios in (("v4-flash", V4_FLASH, 44), ("v4-pro", V4_PRO, 62)):
        raw = GEOMETRIES[name].config_json()
        assert IndexerConfig.from_dict(raw) == published
        assert len(raw["compress_ratios"]) == ratios
        assert raw["compress_ratios"][-1] == 0
        assert raw["num_hidden_layers"] == ratios - 1


def test_config_has_the_keys_of_the_trained_checkpoint(mini):
    ours, theirs = GEOMETRIES["mini"].config_json(), json.loads((mini / "config.json").read_text())
    assert ours == theirs


def test_same_tensors_as_the_trained_checkpoint(mini, mini_checkpoint):
    _, _, tensors = mini_checkpoint
    trained = {}
    for path in mini.glob("model-*.safetensors"):
        trained |= read_header(path)
    assert len(tensors) == 22
    for name, tensor in tensors.items():
        assert (tensor.dtype, list(tensor.shape)) == trained[name], name


def read_header(path):
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    return {name: (DTYPES.get(e["dtype"]), e["shape"]) for name, e in header.items()}


def test_summary(mini_checkpoint):
    summary, config, tensors = mini_checkpoint
    assert summary.config == config
    assert summary.layers == (2, 4) == config.indexer_layers
    assert summary.tensors == len(tensors) == 22
    assert sorted(summary.files) == sorted(path.name for path in summary.directory.iterdir())
    assert "layers 2, 4" in str(summary)
    assert "\n" not in str(summary)


def test_flash_layer(flash_layer):
    seconds, config, tensors = flash_layer
    assert seconds < 10
    assert config == V4_FLASH
    layer_weights(tensors, 4).check(config)
    shapes = {name.removeprefix("layers.4.attn."): (t.dtype, list(t.shape)) for name, t in tensors.items()}
    assert shapes["indexer.wq_b.weight"] == (torch.float8_e4m3fn, [8192, 1024])
    assert shapes["indexer.wq_b.scale"] == (torch.float8_e8m0fnu, [64, 8])
    assert shapes["indexer.weights_proj.weight"] == (torch.bfloat16, [64, 4096])
    assert shapes["indexer.compressor.wkv.weight"] == (torch.bfloat16, [256, 4096])
    assert shapes["indexer.compressor.wgate.weight"] == (torch.bfloat16, [256, 4096])
    assert shapes["indexer.compressor.ape"] == (torch.float32, [4, 256])
    assert shapes["indexer.compressor.norm.weight"] == (torch.bfloat16, [128])
    assert shapes["wq_a.weight"] == (torch.float8_e4m3fn, [1024, 4096])
    assert shapes["wq_a.scale"] == (torch.float8_e8m0fnu, [8, 32])
    assert shapes["q_norm.weight"] == (torch.bfloat16, [1024])
    assert shapes["layers.4.attn_norm.weight"] == (torch.bfloat16, [4096])


def test_scales_cover_partial_blocks_on_both_axes(tmp_path):
    write_checkpoint(tmp_path, like=ODD, layers=[2])
    config, tensors = read_checkpoint(tmp_path)
    assert list(tensors["layers.2.attn.indexer.wq_b.weight"].shape) == [192, 128]
    assert list(tensors["layers.2.attn.indexer.wq_b.scale"].shape) == [2, 1]
    assert list(tensors["layers.2.attn.wq_a.weight"].shape) == [128, 192]
    assert list(tensors["layers.2.attn.wq_a.scale"].shape) == [1, 2]
    x, qr = synthetic_hidden(config, length=100, seed=0)
    assert run_indexer(config, layer_weights(tensors, 2), x, qr)["scores"].shape == (100, 25)


def test_same_arguments_same_bytes(tmp_path):
    for name, threads in (("a", 1), ("b", 2)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            write_checkpoint(tmp_path / name, like="mini", hidden_size=512, q_lora_rank=256, seed=5, shards=3)
        finally:
            torch.set_num_threads(before)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    write_checkpoint(tmp_path / "c", like="mini", hidden_size=512, q_lora_rank=256, seed=6, shards=3)
    a, c = read_checkpoint(tmp_path / "a")[1], read_checkpoint(tmp_path / "c")[1]
    same = {name for name in a if torch.equal(a[name].view(torch.uint8), c[name].view(torch.uint8))}
    # what belongs to the imaginary model does not depend on the seed; a scale may agree by chance
    assert {name.split(".", 2)[2] for name in same if "scale" not in name} == {"attn_norm.weight", "attn.q_norm.weight"}


def test_a_layer_does_not_depend_on_the_others(tmp_path, mini_checkpoint):
    _, _, both = mini_checkpoint
    write_checkpoint(tmp_path, like="mini", layers=[4], seed=3, shards=1)
    _, alone = read_checkpoint(tmp_path)
    assert {name for name in both if name.startswith("layers.4.")} == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor.view(torch.uint8), both[name].view(torch.uint8)), name
    two, four = (both[f"layers.{n}.attn.indexer.compressor.wkv.weight"] for n in (2, 4))
    assert not torch.equal(two, four)


def test_shards(tmp_path):
    written = {}
    for shards in (1, 2, 7, 11):
        summary = write_checkpoint(tmp_path / str(shards), like="mini", layers=[2], shards=shards)
        _, tensors = read_checkpoint(tmp_path / str(shards))
        assert summary.files[:-2] == tuple(f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1))
        written[shards] = {name: t.view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}
    assert all(tensors == written[1] for tensors in written.values())
    sizes = [path.stat().st_size for path in (tmp_path / "2").glob("model-*")]
    assert max(sizes) < 2 * min(sizes)


def test_overrides(tmp_path):
    summary = write_checkpoint(
        tmp_path, like="mini", layers=[2], hidden_size=128, index_n_heads=4, index_head_dim=64, index_topk=8
    )
    config, _ = read_checkpoint(tmp_path)
    assert config == summary.config
    assert (config.hidden_size, config.index_n_heads, config.index_head_dim, config.index_topk) == (128, 4, 64, 8)


def test_overwrite_replaces_the_checkpoint_only(tmp_path):
    write_checkpoint(tmp_path, like="mini", layers=[2], shards=3)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty, expected"):
        write_checkpoint(tmp_path, like="mini", layers=[4])
    write_checkpoint(tmp_path, like="mini", layers=[4], shards=1, overwrite=True)
    _, tensors = read_checkpoint(tmp_path)
    assert {name.split(".")[1] for name in tensors} == {"4"}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", INDEX_NAME, "model-00001-of-00001.safetensors", "notes.txt"}


def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "old", like="mini", layers=[2])
    before = contents(tmp_path / "old")
    import safetensors.torch

    real, calls = safetensors.torch.save_file, []

    def fail_on_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) % 2 == 0:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", fail_on_the_second)
    for directory in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(InputError, match=r"cannot be written \(No space left"):
            write_checkpoint(directory, like="mini", layers=[4], overwrite=True)
    assert contents(tmp_path / "old") == before
    assert contents(tmp_path / "new") == {}


def test_a_crash_between_renames_leaves_no_mixture(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, like="mini", layers=[2])
    real, calls = Path.replace, []

    def fail_on_the_second(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_the_second)
    with pytest.raises(InputError, match="cannot be written"):
        write_checkpoint(tmp_path, like="mini", layers=[2], seed=1, overwrite=True)
    # old and new shards have the same names: without an index nobody can take them for one checkpoint
    assert not (tmp_path / INDEX_NAME).exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"like": "v5"}, "like is 'v5', expected one of v4-flash, v4-pro, mini"),
        ({"layers": [3]}, r"layers \[3\]: expected layers with an indexer .*: 2, 4"),
        ({"layers": []}, "layers are none"),
        ({"shards": 0}, "shards is 0, expected 1 to 22"),
        ({"shards": 23}, "shards is 23, expected 1 to 22"),
        ({"q_lora_rank": 100}, "q_lora_rank is 100, expected a positive multiple of 128"),
        ({"index_head_dim": 48}, "index_head_dim is 48"),
        ({"index_topk": 0}, "index_topk is 0"),
    ],
)
def test_errors(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        write_checkpoint(tmp_path / "new", **({"like": "mini"} | arguments))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a directory"):
        write_checkpoint(tmp_path / "file", like="mini")
    with pytest.raises(InputError, match="cannot be written"):
        write_checkpoint(tmp_path / "file" / "below", like="mini")


def test_quantised_weights_are_near_and_on_the_grid():
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.logspace(-3, 2, 300)
    codes, scale = quantise_weight(weight, (128, 128))
    assert scale.shape == (2, 3)
    assert codes.is_contiguous()
    back = dequantise_weight(codes, scale, (128, 128))
    for i in range(2):
        for j in range(3):
            part = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            step = float(scale.float()[i, j])
            largest = float(weight[part].abs().max())
            assert 224 < largest / step <= 448
            # half a step of e4m3 (3 mantissa bits; 2^-9 below its normals)
            bound = torch.maximum(weight[part].abs() * 2**-4, torch.tensor(step * 2.0**-10))
            assert ((back[part] - weight[part]).abs() <= bound).all()
    zero_codes, zero_scale = quantise_weight(torch.zeros(4, 4), (128, 128))
    assert zero_codes.float().eq(0).all()
    assert zero_scale.float().isfinite().all()


def test_fit_rows_sets_mean_and_spread():
    torch.manual_seed(0)
    probe = torch.randn(500, 40, dtype=torch.float64) + 1
    offset = torch.linspace(-1, 1, 8)
    outputs = probe @ fit_rows(torch.randn(8, 40, dtype=torch.float64), probe, std=2.0, offset=offset).T
    torch.testing.assert_close(outputs.mean(0), offset.double())
    assert 1.8 < float((outputs - outputs.mean(0)).square().mean().sqrt()) < 2.2


def spectrum_share(weight):
    """Energy in the leading tenth of the singular values; a tenth or so of them would be white noise."""
    rows = weight.double() if weight.shape[0] <= weight.shape[1] else weight.double().T
    energy = torch.linalg.eigvalsh(rows @ rows.T).flip(0)
    return float(energy[: len(energy) // 10].sum() / energy.sum())


@pytest.mark.parametrize("which", ["mini", "flash"])
def test_weights_are_unfriendly_and_plausible(which, request, mini_checkpoint, flash_layer):
    _, config, tensors = mini_checkpoint if which == "mini" else flash_layer
    weights = layer_weights(tensors, 4)
    wq_b = dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block)
    for name, weight in (("wkv", weights.wkv), ("wgate", weights.wgate), ("wq_b", wq_b[:256])):
        white = spectrum_share(torch.randn(weight.shape))
        share = spectrum_share(weight)
        columns = weight.float().norm(dim=0)
        loud = float(columns.max() / columns.median())
        print(f"{which} {name}: leading tenth holds {share:.2f} (white noise {white:.2f}), loudest input {loud:.1f}x")
        assert share > 2 * white
        assert loud > 3

    x, qr = synthetic_hidden(config, length=1024, seed=9)
    trace = run_indexer(config, weights, x, qr, queries=torch.arange(960, 1024))
    q, k, gate = (trace[name].float() for name in ("q", "k_norm", "gate"))
    assert 0.7 < q.square().mean().sqrt() < 2.5
    assert 0.5 < k.square().mean().sqrt() < 2
    shared = k.mean(0).square().sum() / k.square().sum(1).mean()
    assert 0.1 < shared < 0.9
    assert gate.mean() > 0
    assert 0.02 < (gate < 0).float().mean() < 0.48
    projected = x.float() @ weights.wgate.float().T + weights.ape[torch.arange(1024) % 4]
    share = window_slots(projected.view(256, 4, -1)).softmax(1)
    effective = (-(share * share.log()).sum(1)).exp().mean()
    assert 2.5 < effective < 7
    print(f"{which}: q rms {q.square().mean().sqrt():.2f}, gate mean {gate.mean():.4f}, {effective:.1f} slots of 8")


@pytest.mark.parametrize("which", ["mini", "flash"])
def test_wq_a_makes_the_synthetic_query(which, mini_checkpoint, flash_layer):
    _, config, tensors = mini_checkpoint if which == "mini" else flash_layer
    prefix = "layers.4.attn."
    x, qr = synthetic_hidden(config, length=128, seed=9)
    if config.hidden_size % 128:
        pytest.skip("fp8 products need a multiple of 128")
    wq_a = dequantise_weight(tensors[prefix + "wq_a.weight"], tensors[prefix + "wq_a.scale"], config.weight_block)
    made = rms_norm(fp8_linear(x, wq_a), tensors[prefix + "q_norm.weight"], config.rms_norm_eps)
    cosine = torch.nn.functional.cosine_similarity(made, qr.float(), dim=1)
    print(f"{which}: cosine of qr made by wq_a and synthetic qr {cosine.mean():.3f}, worst {cosine.min():.3f}")
    assert cosine.mean() > 0.9
