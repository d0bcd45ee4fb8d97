"""Each way a checkpoint can be wrong gives one line that names the tensor or file and what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffcheck.checkpoint import Checkpoint, load_layer
from diffcheck.refimpl import InputError

from .conftest import (
    FIELDS,
    HIDDEN,
    indexer_tensors,
    released_config,
    released_tensors,
    write_config,
    write_shards,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def refuses(action: Callable[[], object], *parts: str) -> None:
    """`action` raises an InputError of one line that holds all parts."""
    with pytest.raises(InputError) as raised:
        action()
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"


def edit_index(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
    path.write_text(json.dumps(index))


# --- paths


def test_paths(tmp_path: Path, checkpoint: Path) -> None:
    absent = tmp_path / "absent"
    refuses(lambda: Checkpoint(absent), str(absent), "no such directory, expected a checkpoint directory")
    config = checkpoint / "config.json"
    refuses(lambda: Checkpoint(config), str(config), "is a file, expected a directory with config.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(lambda: Checkpoint(empty), str(empty), "is empty, expected config.json and safetensors shards")
    refuses(lambda: Checkpoint("a\0b"), "expected a checkpoint directory")


def test_a_lone_safetensors_file_is_no_checkpoint(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    refuses(lambda: Checkpoint(tmp_path / "x.safetensors"), "is a file, expected a directory with config.json")


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refuses(lambda: Checkpoint(checkpoint), str(checkpoint), "no config.json, expected a checkpoint directory")


def test_broken_config(checkpoint: Path) -> None:
    write_config(checkpoint, "{")
    refuses(lambda: Checkpoint(checkpoint), "config.json: not readable as JSON")


def test_config_is_a_directory(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").mkdir()
    refuses(lambda: Checkpoint(checkpoint), "config.json: not readable as JSON")


@pytest.mark.parametrize(
    ("kind", "name"),
    [("deepseek_v32", "DeepSeek V3.2"), ("glm_moe_dsa", "GLM-5"), ("deepseek_v41", "DeepSeek V4.1")],
)
def test_relatives_are_refused_by_name(checkpoint: Path, kind: str, name: str) -> None:
    write_config(checkpoint, released_config(model_type=kind))
    refuses(lambda: Checkpoint(checkpoint), f"({name}) is not supported yet, expected 'deepseek_v4'")


def test_another_model(checkpoint: Path) -> None:
    write_config(checkpoint, released_config(model_type="qwen3"))
    refuses(lambda: Checkpoint(checkpoint), "model_type is 'qwen3', expected 'deepseek_v4'")


def test_no_weights(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    refuses(lambda: Checkpoint(tmp_path), f"no weights, expected {INDEX} or *.safetensors files")
    save_file({"x": torch.zeros(1)}, tmp_path / "t.safetensors", metadata={"schema": "diffcheck-trace-1"})
    refuses(lambda: Checkpoint(tmp_path), "no weights in t.safetensors")


# --- layers


def test_no_indexer_layer_in_the_config(checkpoint: Path) -> None:
    write_config(checkpoint, released_config(compress_ratios=[0, 0, 128, 128, 128]))
    opened = Checkpoint(checkpoint)
    refuses(opened.select, "no indexer layer, compress ratios are [0, 128], expected one of 4")
    refuses(lambda: opened.load(2), "no indexer layer")


def test_no_indexer_tensors_at_all(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    write_shards(tmp_path, {"model.safetensors": {"norm.weight": torch.ones(HIDDEN)}})
    opened = Checkpoint(tmp_path)
    assert opened.absent_layers == (1, 2, 4)
    refuses(
        opened.select,
        "no tensors of any indexer layer, expected names like layers.1.attn.indexer.wq_b.weight",
    )
    refuses(lambda: opened.load(2), "layer 2 has no tensors here", "present are none")


def test_layers_without_an_indexer(checkpoint: Path) -> None:
    opened = Checkpoint(checkpoint)
    for layer, ratio in ((0, 0), (3, 128)):
        text = f"layer {layer} has no indexer, its compress ratio is {ratio}; expected one of ratio 4: 1, 2, 4"
        refuses(lambda layer=layer: opened.load(layer), text)  # type: ignore[misc]
        refuses(lambda layer=layer: opened.select([1, layer]), text)  # type: ignore[misc]
    # 5 is the draft module's entry in compress_ratios, not a layer
    for layer in (5, -1):
        refuses(lambda layer=layer: opened.load(layer), f"no layer {layer}, expected 0 to 4")  # type: ignore[misc]


def test_a_layer_that_is_absent(edit: Callable[..., Path]) -> None:
    opened = Checkpoint(edit())
    assert opened.present_layers == (2,)
    refuses(
        lambda: opened.load(4),
        "layer 4 has no tensors here, expected layers.4.attn.indexer.wq_b.weight",
        "are 2",
    )


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "wq_b_scale"])
def test_missing_tensor(edit: Callable[..., Path], field: str) -> None:
    opened = Checkpoint(edit(**{field: None}))
    assert opened.present_layers == (2,)  # "some but not all" is not absent
    refuses(lambda: opened.load(2), f"layers.2.{FIELDS[field]} is missing", "expected all or none")


# --- shards and index


def test_shard_absent(checkpoint: Path) -> None:
    (checkpoint / SECOND).unlink()
    opened = Checkpoint(checkpoint)
    opened.load(2)
    refuses(lambda: opened.load(4), f"{SECOND}: absent or a broken link, expected 7 tensors there by {INDEX}")


def test_shard_is_a_broken_link(checkpoint: Path) -> None:
    (checkpoint / SECOND).unlink()
    (checkpoint / SECOND).symlink_to("../../blobs/gone")
    refuses(lambda: load_layer(checkpoint, 4), f"{SECOND}: absent or a broken link")
    (checkpoint / INDEX).unlink()
    refuses(lambda: load_layer(checkpoint, 4), f"{SECOND}: is a broken link", "expected a safetensors file")


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -5000])
@pytest.mark.parametrize("index", [True, False])
def test_truncated_shard(checkpoint: Path, keep: int, index: bool) -> None:
    path = checkpoint / SECOND
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    if not index:
        (checkpoint / INDEX).unlink()
    refuses(lambda: load_layer(checkpoint, 4), f"{SECOND}: truncated, the file", "expected")
    if keep < 0:
        refuses(lambda: load_layer(checkpoint, 4), f"has {len(whole) + keep} bytes, expected {len(whole)}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a safetensors file, just text", "not a safetensors file (header of"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer, expected the file itself",
        ),
        ((4).to_bytes(8, "little") + b"{}}}", "(header): not readable as JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header is no JSON object"),
        (
            (8).to_bytes(8, "little") + b'{"a": 1}',
            "header entry of a is broken, expected dtype, shape and data_offsets",
        ),
    ],
)
def test_not_a_safetensors_file(checkpoint: Path, content: bytes, message: str) -> None:
    (checkpoint / SECOND).write_bytes(content)
    refuses(lambda: load_layer(checkpoint, 4), SECOND, message)


def test_header_whose_bytes_do_not_fit_the_shape(checkpoint: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (checkpoint / SECOND).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refuses(lambda: load_layer(checkpoint, 4), f"{SECOND}: a occupies 8 bytes, expected 12 for F32 [3]")


def test_overlapping_tensors_are_left_to_safetensors(checkpoint: Path) -> None:
    path = checkpoint / SECOND
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["layers.4.attn.indexer.compressor.wgate.weight"]["data_offsets"] = header[
        "layers.4.attn.indexer.compressor.wkv.weight"
    ]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    refuses(lambda: load_layer(checkpoint, 4), f"{SECOND}: not readable as safetensors")


def test_tensor_is_not_where_the_index_says(checkpoint: Path) -> None:
    tensors = released_tensors(4)
    del tensors["layers.4.attn.indexer.compressor.ape"]
    save_file(tensors, checkpoint / SECOND)
    refuses(
        lambda: load_layer(checkpoint, 4),
        f"{SECOND}: does not hold layers.4.attn.indexer.compressor.ape, expected there by {INDEX}",
    )


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "", "..\\x", 7, None])
def test_index_path_leaving_the_directory(checkpoint: Path, file: object) -> None:
    index = {"weight_map": {"layers.4.attn.indexer.compressor.ape": file}}
    (checkpoint / INDEX).write_text(json.dumps(index))
    refuses(
        lambda: Checkpoint(checkpoint),
        f"{INDEX}: layers.4.attn.indexer.compressor.ape is in {file!r}, expected a file inside the directory",
    )


def test_shards_in_a_subdirectory_are_inside(checkpoint: Path) -> None:
    (checkpoint / "sub").mkdir()
    (checkpoint / SECOND).rename(checkpoint / "sub" / SECOND)
    edit_index(checkpoint, **dict.fromkeys(released_tensors(4), f"sub/{SECOND}"))
    load_layer(checkpoint, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map, expected an object of tensor names and shard files"),
    ],
)
def test_broken_index(checkpoint: Path, text: str, message: str) -> None:
    (checkpoint / INDEX).write_text(text)
    refuses(lambda: Checkpoint(checkpoint), f"{INDEX}: {message}")


def test_one_tensor_in_two_shards_by_the_index(checkpoint: Path) -> None:
    name = "layers.4.attn.indexer.compressor.ape"
    (checkpoint / INDEX).write_text(f'{{"weight_map": {{"{name}": "{FIRST}", "{name}": "{SECOND}"}}}}')
    refuses(lambda: Checkpoint(checkpoint), f"{name} is listed in {FIRST} and {SECOND}, expected one place")


def test_one_tensor_under_two_names(checkpoint: Path) -> None:
    name = "layers.4.attn.indexer.compressor.ape"
    edit_index(checkpoint, **{f"model.{name}": FIRST})
    refuses(lambda: Checkpoint(checkpoint), f"model.{name} (also called {name}) is in two shards", FIRST, SECOND)


def test_one_tensor_in_two_shards_by_the_headers(checkpoint: Path) -> None:
    name = "layers.2.attn.indexer.compressor.ape"
    save_file(released_tensors(4) | {name: torch.zeros(4, 256)}, checkpoint / SECOND)
    text = f"{name} is in two shards, {FIRST} (by {INDEX}) and {SECOND}, expected one"
    opened = Checkpoint(checkpoint)
    refuses(lambda: opened.load(2), text)  # though this layer does not need the second shard
    refuses(lambda: opened.load(4), text)
    refuses(Checkpoint(checkpoint).verify, text)
    (checkpoint / INDEX).unlink()
    refuses(lambda: Checkpoint(checkpoint), f"{name} is in two shards, {FIRST} and {SECOND}, expected one")


def test_a_broken_shard_that_the_layer_does_not_need(checkpoint: Path) -> None:
    (checkpoint / SECOND).write_bytes(b"broken")
    Checkpoint(checkpoint).load(2)


def test_gap_in_the_numbering_without_an_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink()
    (checkpoint / FIRST).unlink()
    refuses(lambda: Checkpoint(checkpoint), f"shard {FIRST} is absent and so is {INDEX}, expected all 2 shards")


# --- tensors


def test_fp8_without_scale(edit: Callable[..., Path]) -> None:
    refuses(
        lambda: load_layer(edit(wq_b_scale=None), 2),
        "layers.2.attn.indexer.wq_b.weight is F8_E4M3 without a scale",
        "expected layers.2.attn.indexer.wq_b.scale [4, 2]",
        FIRST,
    )


def test_plain_weight_with_scale(edit: Callable[..., Path]) -> None:
    plain = indexer_tensors(2)["wq_b"].bfloat16()
    refuses(
        lambda: load_layer(edit(wq_b=plain), 2),
        "layers.2.attn.indexer.wq_b.scale is the scale of a BF16 weight, expected an fp8 weight or no scale",
    )


@pytest.mark.parametrize("field", list(FIELDS))
def test_wrong_shape(edit: Callable[..., Path], field: str) -> None:
    right = indexer_tensors(2)[field]
    wrong = right.view(torch.uint8)
    wrong = wrong[: len(wrong) - right.dtype.itemsize].contiguous().view(right.dtype)
    refuses(
        lambda: load_layer(edit(**{field: wrong}), 2),
        f"{FIRST}: layers.2.{FIELDS[field]} has shape {list(wrong.shape)}, expected {list(right.shape)}",
    )


def test_transposed_weight(edit: Callable[..., Path]) -> None:
    wrong = indexer_tensors(2)["wkv"].T.contiguous()
    refuses(lambda: load_layer(edit(wkv=wrong), 2), "has shape [96, 256], expected [256, 96]")


@pytest.mark.parametrize("field", list(FIELDS))
def test_wrong_dtype(edit: Callable[..., Path], field: str) -> None:
    wrong = torch.zeros(indexer_tensors(2)[field].shape, dtype=torch.int32)
    expected = {"wq_b": "F8_E4M3 or I8 or U8 or BF16", "wq_b_scale": "F8_E8M0 or U8 or F32"}.get(field, "BF16 or F32")
    refuses(
        lambda: load_layer(edit(**{field: wrong}), 2),
        f"{FIRST}: layers.2.{FIELDS[field]} has dtype I32, expected {expected}",
    )


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "wq_b_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_inf_weights(edit: Callable[..., Path], field: str, value: float) -> None:
    tensor = indexer_tensors(2)[field]
    last = tensor.view(-1)
    if field == "wq_b":
        last.view(torch.uint8)[-1] = 0x7F if value != value else 0xFF  # e4m3fn's two NaNs; it has no inf
    else:
        last[-1] = value
    place = [n - 1 for n in tensor.shape]
    refuses(
        lambda: load_layer(edit(**{field: tensor}), 2),
        f"{FIRST}: layers.2.{FIELDS[field]} holds 1 NaN or inf values, first at {place}",
        "expected finite weights",
    )


@pytest.mark.parametrize(("byte", "text"), [(255, "byte 255 (nan)"), (192, "byte 192")])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_scale_bytes_out_of_range(edit: Callable[..., Path], byte: int, text: str, as_bytes: bool) -> None:
    scale = indexer_tensors(2)["wq_b_scale"].view(torch.uint8)
    scale[3, 1] = byte
    stored = scale if as_bytes else scale.view(torch.float8_e8m0fnu)
    refuses(
        lambda: load_layer(edit(wq_b_scale=stored), 2),
        f"layers.2.attn.indexer.wq_b.scale holds 1 scales out of range, first {text}",
        "at [3, 1], expected above 0 and at most 2^64",
    )


@pytest.mark.parametrize("byte", [0, 191])
def test_scale_bytes_at_the_bound(edit: Callable[..., Path], byte: int) -> None:
    scale = indexer_tensors(2)["wq_b_scale"].view(torch.uint8)
    scale[3, 1] = byte
    load_layer(edit(wq_b_scale=scale.view(torch.float8_e8m0fnu)), 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e30])
def test_fp32_scales_out_of_range(edit: Callable[..., Path], value: float) -> None:
    scale = indexer_tensors(2)["wq_b_scale"].float()
    scale[0, 0] = value
    refuses(
        lambda: load_layer(edit(wq_b_scale=scale), 2), f"first {value:g} at [0, 0], expected above 0 and at most 2^64"
    )


def test_q_lora_rank_that_fp8_activations_cannot_have(tmp_path: Path) -> None:
    write_config(tmp_path, released_config(q_lora_rank=192))
    tensors = released_tensors(2)
    tensors["layers.2.attn.indexer.wq_b.weight"] = torch.zeros(512, 192).to(torch.float8_e4m3fn)
    write_shards(tmp_path, {"model.safetensors": tensors})
    refuses(lambda: load_layer(tmp_path, 2), "q_lora_rank is 192, expected a multiple of 128 for a F8_E4M3 wq_b")
