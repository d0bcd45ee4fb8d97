"""inspect: layer map, config with sources, coverage both ways, and the faults that a directory can show."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from diffcheck.checkpoint import Checkpoint, Inspection, inspect_checkpoint, render
from diffcheck.checkpoint.names import expected_in_layer
from diffcheck.refimpl import InputError
from diffcheck.refimpl.config import CONFIG_FIELDS

from .conftest import HIDDEN, indexer_tensors, released_config, released_tensors, write_config, write_shards

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
MINI = Path(__file__).parents[3] / "fixtures" / "mini-v4"


def text_of(inspection: Inspection, width: int = 120) -> str:
    out = io.StringIO()
    render(inspection, Console(file=out, width=width))
    return out.getvalue()


def finding(inspection: Inspection, part: str, severity: str, fault: int | None = 20) -> None:
    hits = [f for f in inspection.findings if part in f.message]
    assert hits, f"{part!r} not in {[f.message for f in inspection.findings]}"
    assert (hits[0].severity, hits[0].fault) == (severity, fault)
    assert "\n" not in hits[0].message
    assert part in text_of(inspection, 400)


def test_fixture_is_complete() -> None:
    inspection = inspect_checkpoint(MINI)
    assert inspection.findings == ()
    assert inspection.unmapped == ()
    assert [layer.indexer for layer in inspection.layers] == ["none", "none", "complete", "none", "complete"]
    assert [layer.ratio for layer in inspection.layers] == [0, 0, 4, 128, 4]
    for layer in inspection.layers:
        assert all(have == expected for have, expected in layer.groups.values())
    assert inspection.layers[2].groups["ffn"] == (30, 30)
    assert sum(shard.tensors or 0 for shard in inspection.shards) == 417
    assert inspection.layers[4].bytes_needed == Checkpoint(MINI).bytes_needed(4)


def test_render_shows_map_config_sources_and_traps() -> None:
    text = text_of(inspect_checkpoint(MINI), 160)
    assert "rope_theta 10000 is for layers without compression" in text
    assert "index_topk is 16" in text
    assert "no attention_factor" in text
    assert "checkpoint: quantization_config.weight_block_size" in text
    lines = text.splitlines()
    for layer, ratio, state in ((1, 0, "-"), (2, 4, "complete 6/6"), (3, 128, "-"), (4, 4, "complete 6/6")):
        row = next(line for line in lines if line.split()[:2] == [str(layer), str(ratio)])
        assert state in row
    for name in CONFIG_FIELDS:
        assert name in text


def test_json_has_plain_types_and_every_value() -> None:
    record = inspect_checkpoint(MINI).to_json()
    assert json.loads(json.dumps(record)) == record
    assert [value["name"] for value in record["config"]] == list(CONFIG_FIELDS)
    assert record["config"][8]["value"]["factor"] == 16
    assert record["layers"][2]["groups"]["indexer"] == [6, 6]


def test_a_slice_of_a_checkpoint_has_warnings_only(checkpoint: Path) -> None:
    inspection = inspect_checkpoint(checkpoint)
    assert inspection.errors == ()
    finding(inspection, "hyper: layers 0-4 lack all tensors", "warning")


def test_absent_and_partial_indexers(edit: Callable[..., Path]) -> None:
    inspection = inspect_checkpoint(edit(ape=None))
    assert [layer.indexer for layer in inspection.layers] == ["none", "absent", "partial", "none", "absent"]
    finding(inspection, "layers.2.attn.indexer.compressor.ape is missing", "error")
    finding(inspection, "indexer: layers 1, 4 lack all tensors", "warning")
    assert "partial 5/6" in text_of(inspection)


@pytest.mark.parametrize("file", [FIRST, SECOND])
def test_shard_absent(checkpoint: Path, file: str) -> None:
    (checkpoint / file).unlink()
    inspection = inspect_checkpoint(checkpoint)
    finding(inspection, f"{file}: cannot be read (No such file", "error")
    assert {shard.file: shard.tensors is None for shard in inspection.shards}[file]


def test_shard_absent_that_holds_no_indexer_is_a_warning(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    index["weight_map"]["embed.weight"] = "model-00003.safetensors"
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    inspection = inspect_checkpoint(checkpoint)
    finding(inspection, "model-00003.safetensors: cannot be read", "warning")
    assert inspection.errors == ()


def test_truncated_shard(checkpoint: Path) -> None:
    raw = (checkpoint / SECOND).read_bytes()
    (checkpoint / SECOND).write_bytes(raw[:-10])
    finding(inspect_checkpoint(checkpoint), f"{SECOND}: truncated", "error")


def test_index_against_shards_both_ways(checkpoint: Path) -> None:
    moved = released_tensors(4)
    name = "layers.4.attn.indexer.compressor.ape"
    del moved[name]
    moved["layers.4.attn.wkv.weight"] = torch.zeros(1)
    moved["norm.weight"] = torch.ones(HIDDEN)
    save_file(moved, checkpoint / SECOND)
    save_file({"x": torch.zeros(1)}, checkpoint / "model-old.safetensors")
    inspection = inspect_checkpoint(checkpoint)
    finding(inspection, f"{SECOND} does not hold what model.safetensors.index.json places there: {name}", "error")
    finding(
        inspection,
        f"{SECOND} holds what model.safetensors.index.json does not list: layers.4.attn.wkv",
        "warning",
    )
    finding(
        inspection,
        f"{SECOND} holds what model.safetensors.index.json places in another shard: norm",
        "warning",
    )
    finding(inspection, "not named in model.safetensors.index.json: model-old.safetensors", "warning")


def test_indexer_tensor_in_two_shards_is_an_error(checkpoint: Path) -> None:
    name = "layers.2.attn.indexer.compressor.ape"
    save_file(released_tensors(4) | {name: torch.zeros(4, 256)}, checkpoint / SECOND)
    finding(inspect_checkpoint(checkpoint), f"places in another shard: {name}", "error")


def test_unmapped_and_draft_tensors(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    extra = {"layers.2.attn.indexer.wk.weight": torch.zeros(1), "mtp.0.norm.weight": torch.zeros(1)}
    write_shards(tmp_path, {"model.safetensors": released_tensors(2) | extra})
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.unmapped == ("layers.2.attn.indexer.wk.weight",)
    assert inspection.ignored == 1
    finding(inspection, "unmapped, no known tensor has this name: layers.2.attn.indexer.wk.weight", "error")


def test_indexer_where_the_config_has_none_and_layers_beyond(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    write_shards(tmp_path, {"model.safetensors": {**released_tensors(2), **released_tensors(3), **released_tensors(9)}})
    inspection = inspect_checkpoint(tmp_path)
    finding(inspection, "layer 3 has indexer tensors, but its compress ratio is 128", "warning")
    finding(inspection, "layers 9 are beyond the 5 layers of the config", "warning")


def test_one_missing_expert_of_a_whole_layer(tmp_path: Path) -> None:
    write_config(tmp_path, released_config())
    names = [name for group in expected_in_layer(4, 2).values() for name in group]
    tensors = {f"layers.2.{name}": torch.zeros(1) for name in names} | released_tensors(2)
    del tensors["layers.2.ffn.experts.1.w2.weight"]
    tensors["layers.2.ffn.experts.0.w1.weight"] = torch.zeros(1, dtype=torch.int8)
    tensors["layers.2.attn.wkv.scale"] = torch.zeros(1)
    del tensors["layers.2.attn.wkv.weight"]
    write_shards(tmp_path, {"model.safetensors": tensors})
    inspection = inspect_checkpoint(tmp_path)
    finding(inspection, "ffn: layers 2 lack ffn.experts.1.w2.weight", "warning")
    finding(inspection, "quantised weight without a scale: layers.2.ffn.experts.0.w1.weight", "warning")
    finding(inspection, "scale without a weight: layers.2.attn.wkv.scale", "warning")
    assert inspection.layers[2].groups["ffn"] == (11, 12)


@pytest.mark.parametrize("stored", ["fp32", "e8m0"])
def test_fault_18_scale_bytes_taken_as_numbers(edit: Callable[..., Path], stored: str) -> None:
    number = indexer_tensors(2)["wq_b_scale"].view(torch.uint8).float()  # 2^-14 becomes 113.0
    scale = number if stored == "fp32" else number.to(torch.float8_e8m0fnu)
    inspection = inspect_checkpoint(edit(wq_b_scale=scale))
    finding(inspection, "layer 2 attn.indexer.wq_b: dequantised RMS is", "error", 18)
    if stored == "fp32":
        finding(inspection, "are e8m0 bytes taken as numbers (byte 11", "error", 18)


def test_right_fp32_scales_are_no_fault(edit: Callable[..., Path]) -> None:
    inspection = inspect_checkpoint(edit(wq_b_scale=indexer_tensors(2)["wq_b_scale"].float()))
    assert inspection.errors == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"index_topk": 512}},
            "text_config.index_topk 512 contradicts index_topk 16 and is ignored",
        ),
    ],
)
def test_fault_19_another_topk(checkpoint: Path, changes: dict[str, object], message: str) -> None:
    write_config(checkpoint, released_config(**changes))
    finding(inspect_checkpoint(checkpoint), message, "warning", 19)


def test_fault_19_published_geometry(tmp_path: Path) -> None:
    ratios = [128, 128, *[4, 128] * 29, 4, 0]
    config = released_config(
        hidden_size=7168,
        num_hidden_layers=61,
        q_lora_rank=1536,
        index_n_heads=64,
        compress_ratios=ratios,
        index_topk=512,
    )
    write_config(tmp_path, config)
    write_shards(tmp_path, {"model.safetensors": {"norm.weight": torch.ones(7168)}})
    inspection = inspect_checkpoint(tmp_path)
    finding(inspection, "index_topk is 512, but the published V4-Pro has 1024", "warning", 19)
    finding(inspection, "no tensors of any indexer layer", "error")


def test_no_indexer_layer_is_an_error(checkpoint: Path) -> None:
    write_config(checkpoint, released_config(compress_ratios=[0] * 5))
    finding(inspect_checkpoint(checkpoint), "no indexer layer, compress ratios are [0]", "error")


def test_unusable_paths_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        inspect_checkpoint(tmp_path / "absent")


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    directory = tmp_path / "a[red]b"
    write_config(directory, released_config())
    write_shards(directory, {"model.safetensors": released_tensors(2)})
    assert "a[red]b" in text_of(inspect_checkpoint(directory), 400)
