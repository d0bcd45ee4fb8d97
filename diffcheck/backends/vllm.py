"""vLLM's public index kernels as steps: its quantised key store, its DeepGEMM logits and its top-k.

Written against the signatures of the vLLM 0.33.0 wheel (commit 4ba787ec9), and **tested with fakes only**: no run with
the real package has been seen. (The library with these operators is 88 MiB, more than could be taken to the GPU
machine that the other backends were run on.)

- keys: `vllm._custom_ops.indexer_k_quant_and_cache` takes keys in bf16 as they are before quantisation, and writes
  e4m3 values and one fp32 scale an entry to pages of 64 in the layout of `kernels.PAGE_FORMATS["e4m3"]`. Scale format
  "ue8m0" makes the scale a power of two. Pool, norm and RoPE come from the emulation: for V4 vLLM fuses them with the
  store in kernels of its model code that have no public entry. No query kernel is public either.
- logits: `vllm.utils.deep_gemm.fp8_fp4_paged_mqa_logits`, a thin wrapper of DeepGEMM's function; see `deep_gemm` for
  what is done around it. Versions before 0.33 want to be told not to clean the result.
- topk: `vllm._custom_ops.top_k_per_row_decode`, vLLM's choice where none of its faster ones is on. Which of several
  equal scores it takes is not defined.

On compute capability 10 vLLM's logits take bf16 gates, store four scale bytes an entry and return bf16 scores; that
is another recipe, so only Hopper is supported.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..formats import Format
from ..packages import installed_version, present
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerConfig
from .base import KeyCache, fixed_refusal
from .deep_gemm import import_or_explain, logits_refusal, score_rows
from .emulated import shuffled_slots

if TYPE_CHECKING:
    from ..kernels import QuantisedQuery

PACKAGE = "vllm"
INSTALL = "pip install 'vllm>=0.33'"
OPS, DEEP_GEMM = "vllm._custom_ops", "vllm.utils.deep_gemm"
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    OPS: {
        "indexer_k_quant_and_cache": ("k", "kv_cache", "slot_mapping", "quant_block_size", "kv_cache_dtype"),
        "top_k_per_row_decode": (
            "logits", "next_n", "seq_lens", "raw_topk_indices", "num_rows", "stride0", "stride1", "topk_tokens",
        ),
    },
    DEEP_GEMM: {
        "is_deep_gemm_supported": (),
        "get_num_sms": (),
        "get_paged_mqa_logits_metadata": ("context_lens", "block_size", "num_sms"),
        "fp8_fp4_paged_mqa_logits": (
            "q", "kv_cache", "weights", "context_lens", "block_tables", "schedule_metadata", "max_model_len",
        ),
    },
}  # fmt: skip
"""Functions that are called, by module, and the parameters that they must have; all are passed by name."""
KEY_FORMAT = Format(element="e4m3", block=128, scale="ue8m0", amax_floor=1e-4)
FIXED: dict[str, dict[str, Any]] = {
    "keys": {
        "compute": "fp32",
        "round_k_rope": "bf16",
        "k_hadamard": False,
        "k_fp4": False,
        "k_format": KEY_FORMAT,
    },
    "topk": {"ties": "lower"},
}
"""Recipe fields for which a step has only one value; those of `logits` are DeepGEMM's."""
LARGEST_K = 2048


class VllmKernels:
    """`indexer_k_quant_and_cache`, `fp8_fp4_paged_mqa_logits` and `top_k_per_row_decode`."""

    name: str = "vllm"
    steps: tuple[str, ...] = ("keys", "logits", "topk")

    def unavailable(self, device: str) -> str | None:
        """None on a Hopper GPU where vLLM has the functions and finds DeepGEMM."""
        if not present(PACKAGE):
            return f"package {PACKAGE} is missing: {INSTALL}"
        if device != "cuda":
            return "needs a CUDA device"
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            major, minor = torch.cuda.get_device_capability()
            return f"needs a GPU of compute capability 9, this one has {major}.{minor}"
        try:
            load_module(OPS)
            if not load_module(DEEP_GEMM).is_deep_gemm_supported():
                return "package vllm finds no DeepGEMM for this GPU, or VLLM_USE_DEEP_GEMM=0 is set"
        except ImportError as error:
            return str(error)
        return None

    def version(self) -> str | None:
        """Version of vLLM; it is not imported."""
        return installed_version(PACKAGE)

    def refusal(self, step: str, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Everything but vLLM's own recipe on the key side, DeepGEMM's logits and the usual selection."""
        if step not in self.steps:
            return "vLLM has no public kernel for this step"
        if step == "logits":
            return logits_refusal(recipe, config)
        if reason := fixed_refusal(recipe, FIXED[step]):
            return reason
        if step == "keys" and config.index_head_dim != 128:
            return f"head dim {config.index_head_dim}, the kernel needs 128"
        if step == "topk" and recipe.k > LARGEST_K:
            return f"k is {recipe.k}, the kernel selects at most {LARGEST_K}"
        return None

    def store_keys(self, pipeline: Pipeline, recipe: Recipe) -> KeyCache:
        """vLLM's store on the emulated keys, into pages in shuffled order."""
        from .. import kernels

        keys = pipeline.stage(recipe.replace(k_format=None), "k_quant").bfloat16().contiguous()
        table, slots = shuffled_slots(len(keys), keys.device)
        pages = kernels.allocate_pages("e4m3", table.shape[1], keys.device)
        if len(keys):
            load_module(OPS).indexer_k_quant_and_cache(
                k=keys,
                kv_cache=pages.view(len(pages), kernels.ENTRIES_PER_PAGE, -1),
                slot_mapping=slots,
                quant_block_size=KEY_FORMAT.block,
                kv_cache_dtype=KEY_FORMAT.scale,
            )
        return KeyCache(pages=pages, block_table=table, slots=slots, fmt="e4m3")

    def paged_logits(self, query: QuantisedQuery, cache: KeyCache, visible: Tensor) -> Tensor:
        """DeepGEMM's decode kernel through vLLM, every query row as a request of its own."""
        package = load_module(DEEP_GEMM)
        told = "clean_logits" in inspect.signature(package.fp8_fp4_paged_mqa_logits).parameters
        options = {"clean_logits": False} if told else {}

        def score(codes: Tensor, pages: Tensor, gate: Tensor, lengths: Tensor, tables: Tensor, width: int) -> Any:
            plan = package.get_paged_mqa_logits_metadata(
                context_lens=lengths, block_size=pages.shape[1], num_sms=package.get_num_sms()
            )
            return package.fp8_fp4_paged_mqa_logits(
                q=(codes, None),
                kv_cache=pages,
                weights=gate,
                context_lens=lengths,
                block_tables=tables,
                schedule_metadata=plan,
                max_model_len=width,
                **options,
            )

        return score_rows(score, query, cache, visible)

    def topk(self, scores: Tensor, visible: Tensor, k: int) -> Tensor:
        """vLLM's decode selection, one token a request: int64 [rows, min(k, E)], -1 in empty places, in any order."""
        places = min(k, scores.shape[1])
        selected = torch.full((len(scores), places), -1, dtype=torch.int64, device=scores.device)
        rows = (visible > 0).nonzero().squeeze(1)
        if len(rows) and places:
            logits = scores[rows].float()
            # the kernel writes what it finds; places that it leaves must read as empty
            found = torch.full((len(rows), places), -1, dtype=torch.int32, device=scores.device)
            load_module(OPS).top_k_per_row_decode(
                logits=logits,
                next_n=1,
                seq_lens=visible[rows].to(torch.int32),
                raw_topk_indices=found,
                num_rows=len(rows),
                stride0=logits.stride(0),
                stride1=logits.stride(1),
                topk_tokens=places,
            )
            selected[rows] = found.long()
        return selected


def load_module(name: str) -> ModuleType:
    """A module of vLLM with all functions that are called; ImportError says in one line what is wrong."""
    module = import_or_explain(name, INSTALL)
    for function, parameters in PARAMETERS[name].items():
        found = getattr(module, function, None)
        if not callable(found):
            raise ImportError(f"{name} has no {function}: {INSTALL}")
        lacking = set(parameters) - set(inspect.signature(found).parameters)
        if lacking:
            raise ImportError(f"{name}.{function} has no {', '.join(sorted(lacking))}: {INSTALL}")
    return module
