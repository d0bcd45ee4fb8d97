"""A layer to test kernels on: one of a checkpoint with its inputs, or a small made-up one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..inputs.source import choose_queries
from ..pipeline import Pipeline
from ..refimpl import IndexerConfig, IndexerWeights, Trace, Yarn, run_indexer
from ..refimpl.scoring import visible_entries
from ..run import Options, layer_inputs, plan

PUBLISHED_YARN = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
STORED = ("fp8", "fp4", "bf16", "fp32")
"""How wq_b can be stored."""
DEFAULT_QUERIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's indexer and its inputs, on one device.

    x bf16 [T, hidden] and qr bf16 [T, q_lora] are the hidden states of tokens 0 … T-1; queries, int64 [rows], are the
    positions of the query rows to compare. `number` is the layer's in its checkpoint.
    """

    number: int
    config: IndexerConfig
    weights: IndexerWeights = field(repr=False)
    x: Tensor = field(repr=False)
    qr: Tensor = field(repr=False)
    queries: Tensor = field(repr=False)
    source: str

    @property
    def k(self) -> int:
        """How many entries a row selects."""
        return self.config.index_topk

    @property
    def visible(self) -> Tensor:
        """How many entries each query row sees, int32 [rows]."""
        return visible_entries(self.queries).int()

    def reference(self) -> Trace:
        """All stages as the published code computes them, for the query rows."""
        return run_indexer(self.config, self.weights, self.x, self.qr, queries=self.queries)

    def pipeline(self) -> Pipeline:
        """For any other recipe: `layer.pipeline().stage(Recipe.preset("vllm-fp8", layer.config), "k_quant")`."""
        return Pipeline(self.config, self.weights, self.x, self.qr, queries=self.queries)

    @staticmethod
    def load(
        checkpoint: str | Path,
        number: int | None = None,
        *,
        trace: str | Path | None = None,
        length: int | None = None,
        queries: int = DEFAULT_QUERIES,
        device: str = "auto",
        seed: int = 0,
    ) -> Layer:
        """A layer of a checkpoint, by default its first indexer layer.

        Inputs are those of `trace`, of the checkpoint's own trace.safetensors, or made up (`length` tokens), as for
        `diffcheck run`. Fewer query rows than asked for where there are not that many tokens. InputError or
        EnvironmentMissing says what is wrong.
        """
        options = Options(
            checkpoint=Path(checkpoint), layers=None if number is None else [number], precisions=["reference"],
            thetas=["checkpoint"], trace=None if trace is None else Path(trace), length=length, device=device,
            seed=seed,
        )  # fmt: skip
        todo = plan(options)
        layer = todo.layers[0]
        weights, inputs = layer_inputs(todo, layer)
        must = [needle.query for needle in inputs.needles]
        rows = choose_queries(inputs.length, todo.checkpoint.config.index_topk, min(queries, inputs.length), must)
        return Layer(
            number=layer, config=todo.checkpoint.config, weights=weights.to(todo.device),
            x=inputs.x.to(todo.device), qr=inputs.qr.to(todo.device), queries=rows.to(todo.device), source=todo.source,
        )  # fmt: skip


def made_up_config(**changes: Any) -> IndexerConfig:
    """A tiny indexer with the published constants; `changes` replaces fields. Layer 1 is its indexer layer."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "q_lora_rank": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "rope_head_dim": 64,
        "index_topk": 4,
        "compress_ratios": (0, 4),
        "compress_rope_theta": 160000.0,
        "yarn": PUBLISHED_YARN,
        "rms_norm_eps": 1e-6,
    }
    return IndexerConfig(**(fields | changes))


def made_up_weights(config: IndexerConfig, seed: int = 0, stored: str = "fp8") -> IndexerWeights:
    """Random weights of one layer, about as large as a trained layer's, wq_b stored as one of STORED."""
    rng = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=rng) * scale

    heads, dim, lora, hidden = config.index_n_heads, config.index_head_dim, config.q_lora_rank, config.hidden_size
    out = heads * dim
    scale: Tensor | None = None
    wq_b = gaussian(out, lora, scale=lora**-0.5)
    if stored == "fp8":
        rows, columns = config.weight_block
        shape = (-(-out // rows), -(-lora // columns))
        scale = torch.randint(115, 120, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        wq_b = gaussian(out, lora, scale=60.0).to(torch.float8_e4m3fn)
    elif stored == "fp4":
        scale = torch.randint(121, 126, (out, lora // 32), generator=rng, dtype=torch.uint8)
        scale = scale.view(torch.float8_e8m0fnu)
        wq_b = torch.randint(-128, 128, (out, lora // 2), generator=rng, dtype=torch.int8)
    elif stored == "bf16":
        wq_b = wq_b.bfloat16()
    elif stored != "fp32":
        raise ValueError(f"stored is {stored!r}, expected one of {', '.join(STORED)}")
    plain = torch.float32 if stored == "fp32" else torch.bfloat16
    return IndexerWeights(
        wq_b=wq_b,
        wq_b_scale=scale,
        weights_proj=gaussian(heads, hidden, scale=hidden**-0.5).to(plain),
        wkv=gaussian(2 * dim, hidden, scale=hidden**-0.5).to(plain),
        wgate=gaussian(2 * dim, hidden, scale=2 * hidden**-0.5).to(plain),
        ape=gaussian(4, 2 * dim, scale=0.5),
        norm=(1 + gaussian(dim, scale=0.2)).to(plain),
    )


def made_up_inputs(config: IndexerConfig, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random x bf16 [tokens, hidden] and qr bf16 [tokens, q_lora], channels of unequal size as real ones have."""
    rng = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(tokens, config.hidden_size, generator=rng)
    qr = torch.randn(tokens, config.q_lora_rank, generator=rng)
    x = x * torch.randn(config.hidden_size, generator=rng).exp()
    qr = qr * torch.randn(config.q_lora_rank, generator=rng).exp()
    return x.bfloat16(), qr.bfloat16()
