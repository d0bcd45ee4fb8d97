"""One name for each tensor, whichever tool wrote it.

Canonical names are those of the released checkpoints: `layers.N.` and then, for one layer,

    attn.indexer.wq_b.weight, attn.indexer.wq_b.scale, attn.indexer.weights_proj.weight,
    attn.indexer.compressor.{wkv,wgate}.weight, attn.indexer.compressor.ape,
    attn.indexer.compressor.norm.weight

for the indexer. Other spellings met in the wild and accepted:

- a `model.` prefix; `self_attn` for `attn` and `mlp` for `ffn`; `.weight_scale_inv` for `.scale`;
- transformers' `save_pretrained`: released names with `model.`, and `attn.norm` for `attn.kv_norm`;
- transformers' modules: `self_attn.compressor.indexer.{kv_proj,gate_proj,position_bias,kv_norm,q_b_proj,…}`.

`mtp.*` (draft modules) is ignored. Everything else that no rule knows is *unmapped*: it is kept under its own
name and reported by `inspect`, because a tensor that a loader silently skips is how a server answers with
garbage.
"""

from __future__ import annotations

import re
from functools import cache

INDEXER_TENSORS = {
    "wq_b": "attn.indexer.wq_b.weight",
    "wq_b_scale": "attn.indexer.wq_b.scale",
    "weights_proj": "attn.indexer.weights_proj.weight",
    "wkv": "attn.indexer.compressor.wkv.weight",
    "wgate": "attn.indexer.compressor.wgate.weight",
    "ape": "attn.indexer.compressor.ape",
    "norm": "attn.indexer.compressor.norm.weight",
}
"""Field of IndexerWeights -> canonical name inside its layer."""
SHARDED_BY_HEAD = ("wq_b", "wq_b_scale", "weights_proj")
"""Fields that tensor-parallel files split on dim 0; every rank holds the others whole."""
GROUPS = ("indexer", "attention", "hyper", "ffn")

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TOP = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
_TOP_NAMES = frozenset({"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"})
_COMPRESSOR = {"kv_proj": "wkv", "gate_proj": "wgate", "position_bias": "ape", "kv_norm": "norm"}
_PREFIXES: tuple[tuple[str, str, dict[str, str]], ...] = (
    # prefix, canonical prefix, names directly below it; the first prefix that matches is the only one applied
    (
        "attn.compressor.indexer.",
        "attn.indexer.",
        {
            **{old: f"compressor.{new}" for old, new in _COMPRESSOR.items()},
            "q_b_proj": "wq_b",
            "scorer.weights_proj": "weights_proj",
        },
    ),
    ("attn.compressor.", "attn.compressor.", _COMPRESSOR),
    (
        "attn.",
        "attn.",
        {
            "q_a_proj": "wq_a",
            "q_b_proj": "wq_b",
            "kv_proj": "wkv",
            "o_a_proj": "wo_a",
            "o_b_proj": "wo_b",
            "q_a_norm": "q_norm",
            "norm": "kv_norm",
            "sinks": "attn_sink",
        },
    ),
    ("ffn.gate.", "ffn.gate.", {"e_score_correction_bias": "bias"}),
    ("ffn.shared_experts.", "ffn.shared_experts.", {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}),
    ("", "", {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}),
    ("attn_hc.", "hc_attn_", {}),
    ("ffn_hc.", "hc_ffn_", {}),
)
_KNOWN = {
    "indexer": re.compile("|".join(map(re.escape, INDEXER_TENSORS.values()))),
    "attention": re.compile(
        r"attn_norm\.weight|attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.(weight|scale)|attn\.(q_norm|kv_norm)\.weight|attn\.attn_sink"
        r"|attn\.compressor\.((wkv|wgate|norm)\.weight|ape)"
    ),
    "hyper": re.compile(r"hc_(attn|ffn)_(fn|base|scale)"),
    "ffn": re.compile(
        r"ffn_norm\.weight|ffn\.gate\.(weight|bias|tid2eid)"
        r"|ffn\.(shared_experts|experts\.\d+)\.w[123]\.(weight|scale)|ffn\.experts\.(gate_up_proj|down_proj)"
    ),
}


def canonical_name(stored: str) -> str | None:
    """The released name of a stored tensor; its own where no rule applies; None for draft modules (mtp.*)."""
    name = stored.removeprefix("model.")
    if name.startswith("mtp."):
        return None
    match = _LAYER.fullmatch(name)
    if match:
        return f"layers.{match[1]}.{_inside_layer(match[2])}"
    return _TOP.get(name, name)


@cache
def _inside_layer(rest: str) -> str:
    # cached: the 43 or 61 layers of a model share their some 1,600 inner names
    for old, new in (("self_attn.", "attn."), ("mlp.", "ffn.")):
        if rest.startswith(old):
            rest = new + rest.removeprefix(old)
    if rest.endswith(".weight_scale_inv"):
        rest = rest.removesuffix(".weight_scale_inv") + ".scale"
    for prefix, canonical, below in _PREFIXES:
        if not rest.startswith(prefix):
            continue
        inner = rest.removeprefix(prefix)
        for old, new in below.items():
            if inner == old or inner.startswith(old + "."):
                return canonical + new + inner.removeprefix(old)
        if prefix:
            return canonical + inner
    return rest


def split_layer(name: str) -> tuple[int, str] | None:
    """(layer, name inside the layer) of a canonical name; None for tensors outside the layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def layer_name(layer: int, field: str) -> str:
    """Canonical name of an indexer tensor by its field of IndexerWeights."""
    return f"layers.{layer}.{INDEXER_TENSORS[field]}"


@cache
def group_of(rest: str) -> str | None:
    """Group (one of GROUPS) of a canonical name inside a layer; None when it is unmapped."""
    for group, known in _KNOWN.items():
        if known.fullmatch(rest):
            return group
    return None


def is_mapped(name: str) -> bool:
    """True when a canonical name is one this project knows, in a layer or outside."""
    inside = split_layer(name)
    return group_of(inside[1]) is not None if inside else name in _TOP_NAMES


def expected_in_layer(ratio: int, routed_experts: int) -> dict[str, tuple[str, ...]]:
    """Canonical weight names (scales left out) that a complete layer of this compress ratio has, by group.

    ffn.gate.bias stands for itself or gate.tid2eid: hash-routed layers have the table instead of the bias.
    """
    linears = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")
    attention = ["attn_norm.weight", *(f"attn.{name}.weight" for name in linears), "attn.attn_sink"]
    if ratio:
        attention += [f"attn.compressor.{name}" for name in ("wkv.weight", "wgate.weight", "ape", "norm.weight")]
    experts = ["shared_experts", *(f"experts.{number}" for number in range(routed_experts))]
    return {
        "indexer": tuple(n for f, n in INDEXER_TENSORS.items() if f != "wq_b_scale") if ratio == 4 else (),
        "attention": tuple(attention),
        "hyper": tuple(f"hc_{block}_{name}" for block in ("attn", "ffn") for name in ("fn", "base", "scale")),
        "ffn": (
            "ffn_norm.weight",
            "ffn.gate.weight",
            "ffn.gate.bias",
            *(f"ffn.{expert}.w{number}.weight" for expert in experts for number in (1, 2, 3)),
        ),
    }
