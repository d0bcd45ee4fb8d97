"""config.json: three spellings give one record, every value has a source, and every trap is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffcheck.refimpl import V4_FLASH, V4_PRO, IndexerConfig, InputError, Yarn
from diffcheck.refimpl.config import CONFIG_FIELDS

YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN,
    "max_position_embeddings": 1048576,
    "quantization_config": {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
TRANSFORMERS = {
    **{
        key: value
        for key, value in FLASH.items()
        if key not in ("rope_scaling", "compress_ratios", "qk_rope_head_dim", "compress_rope_theta")
    },
    "layer_types": [TYPES[ratio] for ratio in FLASH["compress_ratios"][:43]],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "partial_rotary_factor": 0.125,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {**YARN, "rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
    },
}
INFERENCE = {
    "dim": 4096,
    "n_layers": 43,
    "n_heads": 64,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "norm_eps": 1e-6,
    "window_size": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_factor": 16,
    "original_seq_len": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
    "compress_ratios": FLASH["compress_ratios"],
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def traps(config: dict[str, Any]) -> str:
    return "\n".join(IndexerConfig.from_dict(config).traps)


@pytest.mark.parametrize("spelling", [FLASH, TRANSFORMERS, INFERENCE], ids=["released", "transformers", "inference"])
def test_three_spellings_are_one_config(spelling: dict[str, Any]) -> None:
    config = IndexerConfig.from_dict(spelling)
    assert config == V4_FLASH
    assert set(config.sources) == set(CONFIG_FIELDS)
    assert len(config.indexer_layers) == 21
    assert config.indexer_layers[0] == 2
    assert config.indexer_layers[-1] == 42


def test_pro_and_its_layers() -> None:
    config = IndexerConfig.from_dict(PRO)
    assert config == V4_PRO
    assert config.indexer_layers == tuple(range(2, 61, 2))
    assert config.gate_scale == pytest.approx(128**-0.5 * 64**-0.5)


def test_published_records_have_a_source_per_field() -> None:
    for config in (V4_FLASH, V4_PRO):
        assert set(config.sources) == set(CONFIG_FIELDS)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (FLASH, {"hidden_size": "checkpoint: hidden_size", "rope_head_dim": "checkpoint: qk_rope_head_dim"}),
        (
            TRANSFORMERS,
            {
                "compress_ratios": "checkpoint: layer_types",
                "rope_head_dim": "checkpoint: partial_rotary_factor times head_dim",
                "compress_rope_theta": "checkpoint: rope_parameters.compress.rope_theta",
            },
        ),
        (INFERENCE, {"hidden_size": "checkpoint: dim", "rms_norm_eps": "checkpoint: norm_eps"}),
        (
            without(INFERENCE, "compress_rope_theta", "beta_fast", "norm_eps", "index_head_dim"),
            {
                "compress_rope_theta": "code default",
                "rms_norm_eps": "code default",
                "index_head_dim": "code default",
                "weight_block": "code default",
                "yarn": "checkpoint: rope_factor, original_seq_len (beta_fast: code default)",
            },
        ),
    ],
)
def test_sources_name_the_key(spelling: dict[str, Any], expected: dict[str, str]) -> None:
    sources = IndexerConfig.from_dict(spelling).sources
    assert {key: sources[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "trap"),
    [
        (FLASH, "rope_theta 10000 is for layers without compression"),
        (FLASH, "44 values for 43 layers"),
        (FLASH, "no attention_factor; generic YaRN code derives 1.2773"),
        (PRO, "index_topk is 1024; code that misses the key keeps its default of 512"),
        (PRO | {"index_topk": 512}, "index_topk is 512, but the published V4-Pro has 1024"),
        (
            FLASH | {"compress_rope_theta": 40000},
            "compress_rope_theta is 40000.0, but the published V4-Flash has 160000.0",
        ),
        (without(FLASH, "compress_rope_theta"), "no compress_rope_theta in the config"),
        (
            FLASH | {"rope_scaling": {**YARN, "rope_theta": 10000}},
            "rope_scaling.rope_theta 10000 contradicts",
        ),
        (FLASH | {"rope_parameters": {"rope_theta": 10000}}, "rope_parameters.rope_theta 10000 contradicts"),
        (
            FLASH | {"text_config": {"index_topk": 2048}},
            "text_config.index_topk 2048 contradicts index_topk 512",
        ),
        (FLASH | {"rope_scaling": None}, "no YaRN in the config"),
        (FLASH | {"rope_scaling": {**YARN, "mscale": 0.707}}, "rope_scaling.mscale 0.707 is not used"),
        (FLASH | {"rope_parameters": {**YARN, "factor": 40}}, "rope_parameters contradicts rope_scaling"),
        (FLASH | {"layer_types": [TYPES[4]] * 43}, "layer_types contradicts compress_ratios"),
        (FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor times head_dim is 256, not the 64"),
    ],
)
def test_traps(config: dict[str, Any], trap: str) -> None:
    assert trap in traps(config)


def test_default_theta_is_the_published_one() -> None:
    config = IndexerConfig.from_dict(without(INFERENCE, "compress_rope_theta"))
    assert config.compress_rope_theta == 160000


def test_attention_factor_of_one_is_no_trap() -> None:
    assert "attention_factor" not in traps(TRANSFORMERS)


def test_contradicted_values_keep_the_released_spelling() -> None:
    config = IndexerConfig.from_dict(
        FLASH | {"rope_parameters": {**YARN, "factor": 40, "rope_theta": 10000}, "layer_types": [TYPES[4]] * 43}
    )
    assert config == V4_FLASH


def test_flat_rope_parameters_hold_yarn() -> None:
    config = IndexerConfig.from_dict(without(FLASH, "rope_scaling") | {"rope_parameters": {**YARN, "factor": 8}})
    assert config.yarn == Yarn(factor=8.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)


def test_no_yarn_where_the_inference_config_switches_it_off() -> None:
    config = IndexerConfig.from_dict(INFERENCE | {"original_seq_len": 0})
    assert config.yarn is None
    assert config.sources["yarn"] == "checkpoint: original_seq_len"


def test_default_rope_type_is_no_yarn() -> None:
    raw = json.loads(json.dumps(TRANSFORMERS))
    raw["rope_parameters"]["compress"] = {"rope_type": "default", "rope_theta": 160000.0}
    assert IndexerConfig.from_dict(raw).yarn is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v32"}, "DeepSeek V3.2) is not supported yet"),
        ({"model_type": "glm_moe_dsa"}, "GLM-5) is not supported yet"),
        ({"model_type": "deepseek_v41"}, "DeepSeek V4.1) is not supported yet"),
        ({"kv_source_layers": [1, 3]}, "key of DeepSeek V4.1, which is not supported yet"),
        ({"model_type": "llama"}, "model_type is 'llama', expected 'deepseek_v4'"),
        ({"model_type": None}, "model_type is None, expected 'deepseek_v4'"),
        ({"model_type": ["deepseek_v4"]}, "expected 'deepseek_v4'"),
        ({"index_topk": None}, "no index_topk, expected a number"),
        ({"index_topk": "512"}, "index_topk is '512', expected a number"),
        ({"index_topk": True}, "index_topk is True, expected a number"),
        ({"index_topk": 512.5}, "index_topk is 512.5, expected an integer"),
        ({"index_topk": 10**400}, "expected a number"),
        ({"index_topk": 0}, "index_topk is 0, expected a positive integer"),
        ({"hidden_size": None}, "no hidden_size or dim, expected a number"),
        ({"index_head_dim": 96}, "index_head_dim is 96, expected a power of two"),
        ({"qk_rope_head_dim": 63}, "RoPE dims 63, expected an even number"),
        ({"qk_rope_head_dim": 256}, "RoPE dims 256, expected an even number up to index_head_dim 128"),
        ({"compress_rope_theta": 0}, "compress_rope_theta is 0.0, expected > 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0, expected > 0"),
        ({"compress_ratios": None}, "no compress_ratios (or layer_types), expected one value a layer"),
        ({"compress_ratios": [4] * 42}, "compress_ratios has 42 values for 43 layers, expected one each"),
        ({"compress_ratios": [2] * 43}, "compress_ratios holds 2, expected 0, 4 or 128"),
        ({"compress_ratios": ["4"] * 43}, "compress_ratios holds '4', expected 0, 4 or 128"),
        (
            {"compress_ratios": None, "layer_types": ["full_attention"] * 43},
            "layer_types holds 'full_attention'",
        ),
        (
            {"compress_ratios": None, "layer_types": [TYPES[4]] * 43, "compress_rate_csa": 8},
            "compress rate of compressed_sparse_attention is 8, expected 4",
        ),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling type is 'linear', expected 'yarn'"),
        ({"rope_scaling": without(YARN, "factor")}, "rope_scaling: no factor, expected a number"),
        ({"rope_scaling": {**YARN, "beta_slow": 64}}, "expected factor >= 1, beta_fast > beta_slow > 0"),
        ({"quantization_config": {"weight_block_size": [128]}}, "expected two positive integers"),
        ({"qk_rope_head_dim": None, "head_dim": None, "partial_rotary_factor": 0.5}, "without head_dim"),
    ],
)
def test_errors_are_one_line_with_what_was_expected(changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in (FLASH | changes).items() if value is not None}
    with pytest.raises(InputError) as raised:
        IndexerConfig.from_dict(config, where="here/config.json")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (INFERENCE | {"index_source_layers": [1]}, "key of DeepSeek V4.1"),
        (
            without(INFERENCE, "compress_ratios") | {"kv_lora_rank": 512},
            "DeepSeek V3.2, which is not supported yet",
        ),
        (without(INFERENCE, "original_seq_len"), "no original_seq_len, expected a number"),
    ],
)
def test_inference_spelling_errors(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        IndexerConfig.from_dict(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file, expected the checkpoint's config.json"),
        ("", "not readable as JSON"),
        ('{"model_type": ', "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("\ufeff{}", "not readable as JSON"),
        ("[1]", "expected a JSON object, found list"),
        (
            '{"model_type": "deepseek_v4", "compress_rope_theta": NaN}',
            "compress_rope_theta is nan, expected a number",
        ),
    ],
)
def test_broken_files(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as raised:
        IndexerConfig.from_json(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError, match="not readable as JSON"):
        IndexerConfig.from_json(path)
