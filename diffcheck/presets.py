"""What engines compute instead of the reference, one recipe each.

Read from the engines' sources as of late 2026; re-check before relying on one for another version. Hadamard on both
sides or on neither gives the same exact scores; only the quantisation that follows sees the difference. Where an
engine's handling of a step is not known, the reference's is kept: so all but llama.cpp run wq_b as the fp8 product.
"""

from __future__ import annotations

from typing import Any

from .formats import BF16, E2M1_REFERENCE, FP16, Format
from .grammar import parse_precision
from .recipe import Recipe
from .refimpl import IndexerConfig

_E4M3_FP32 = Format(element="e4m3", block=128, scale="fp32", amax_floor=1e-4, reciprocal=True)
_E4M3_P = Format(element="e4m3", block=128, scale="ue8m0", amax_floor=1e-4)
_E2M1_DOWN = Format(element="e2m1", block=32, scale="ue8m0", amax_floor=1e-4, ties="down")
_FP32_SCORES: dict[str, Any] = {
    "round_gate": "none",
    "round_dot": "none",
    "round_product": "none",
    "round_score": "none",
}
_FP32_KEYS: dict[str, Any] = {
    "round_pool": "none",
    "round_k_norm": "none",
    "round_k_rope": "none",
    "round_k_hadamard": "none",
}
_FP32_QUERIES: dict[str, Any] = {"round_q_rope": "none", "round_q_hadamard": "none"}
_SGLANG_FP8 = _FP32_SCORES | _FP32_KEYS | _FP32_QUERIES | {"fp4": False, "q_format": _E4M3_FP32, "k_format": _E4M3_FP32}
_VLLM = _FP32_SCORES | {"hadamard": False, "fp4": False, "round_pool": "none", "round_k_norm": "none"}
_TRTLLM = _FP32_SCORES | {"fp4": False, "round_pool_gemm": "bf16", "round_pool_sum": "bf16"}

CHANGES: dict[str, dict[str, Any]] = {
    # fp32 from the pool's GEMM to the codes; gate and q scale folded in fp32
    "sglang-fp8": _SGLANG_FP8,
    # the q side is rounded to bf16 after RoPE and after Hadamard; midpoints of e2m1 go toward zero
    "sglang-fp4": _FP32_SCORES | _FP32_KEYS | {"fp4": False, "q_format": _E2M1_DOWN, "k_format": _E2M1_DOWN},
    # a local patch: stock SGLang refuses bf16 index keys for this head dim
    "sglang-bf16": _SGLANG_FP8 | {"k_format": BF16},
    # one rounding to bf16 before quantisation; no Hadamard, so round_*_hadamard never acts
    "vllm-fp8": _VLLM | {"q_format": _E4M3_P, "k_format": _E4M3_P, "round_q_rope": "bf16"},
    "vllm-mxfp4": _VLLM | {"q_format": E2M1_REFERENCE, "k_format": E2M1_REFERENCE},
    # Hadamard only where a package for it is importable; assumed present
    "trtllm-fp8": _TRTLLM
    | {"q_format": _E4M3_P, "k_format": Format(element="e4m3", block=128, scale="fp32", amax_floor=0.0)},
    "trtllm-fp4": _TRTLLM
    | {
        "q_format": Format(element="e2m1", block=32, scale="ue8m0", amax_floor=1e-12, ties="down"),
        "k_format": E2M1_REFERENCE,
    },
    "transformers": _FP32_SCORES
    | {
        "hadamard": False,
        "fp4": False,
        "round_pool_gemm": "bf16",
        "round_pool_sum": "bf16",
        "round_rope_table": "bf16",
    },
    "llama.cpp": _FP32_SCORES
    | _FP32_KEYS
    | _FP32_QUERIES
    | {
        "fp4": False,
        "activation_quant": False,
        "round_q": "none",
        "round_gate_gemm": "none",
        "q_format": None,
        "k_format": FP16,
    },
}
"""Replaced fields of the reference recipe, by preset."""

DESCRIPTIONS = {
    "sglang-fp8": "SGLang's default: e4m3 keys with an fp32 scale, 132 B an entry",
    "sglang-fp4": "SGLang with FP4 index keys: e2m1 per 32, midpoints toward zero, 68 B",
    "sglang-bf16": "SGLang patched to bf16 index keys, 256 B",
    "vllm-fp8": "vLLM's default: no Hadamard, e4m3 with power-of-two scales, 132 B",
    "vllm-mxfp4": "vLLM on Blackwell: no Hadamard, e2m1 per 32, 68 B",
    "trtllm-fp8": "TensorRT-LLM: bf16 pool, e4m3 keys with an fp32 scale, 132 B",
    "trtllm-fp4": "TensorRT-LLM: bf16 pool, e2m1 per 32, 68 B",
    "transformers": "transformers' modelling code: no Hadamard, bf16 keys, 256 B",
    "llama.cpp": "llama.cpp: fp32 throughout, f16 keys, 256 B",
}
PRECISIONS = {
    "reference": "the published code: FP4 step on queries and keys, bf16 cache, 256 B",
    "bf16": "the reference without the FP4 step",
    "fp8": "short for sglang-fp8",
    "fp4": "short for sglang-fp4",
    "ideal": "the same formulas in fp32, no rounding, no quantisation",
}
"""Names a precision can have besides the presets."""


def build(name: str, config: IndexerConfig) -> Recipe:
    """The recipe of a preset or precision, by name or spelled out (`diffcheck.grammar`), for this checkpoint.

    InputError for anything else, with the column of the wrong character.
    """
    reference = Recipe.reference(config)
    if name == "reference":
        return reference
    if name == "ideal":
        return Recipe.ideal(config)
    if name == "bf16":
        return reference.replace(name="bf16", fp4=False)
    preset = {"fp8": "sglang-fp8", "fp4": "sglang-fp4"}.get(name, name)
    if preset not in CHANGES:
        names = [*PRECISIONS, *CHANGES]
        return parse_precision(name, dim=config.index_head_dim, known=names).apply(reference)
    return reference.replace(name=name, **CHANGES[preset])
