"""Hypothesis strategies for what an indexer's kernels are called with.

Tensors are made from a drawn seed, so that examples are found and shrunk quickly; what shrinks is their size, their
kind and the edge cases: lengths of 0, 1, 63, 64, 65, k - 1, k and k + 1, shuffled pages, poison where nothing may be
read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..refimpl import IndexerConfig, IndexerWeights
from .layers import PUBLISHED_YARN, STORED, made_up_config, made_up_inputs, made_up_weights

try:
    from hypothesis import strategies as st
except ImportError:
    raise ImportError(
        "diffcheck.testing.strategies needs hypothesis: pip install 'diffcheck[testing]', or hypothesis itself"
    ) from None

SCORE_KINDS = (
    "constant", "few values", "ascending", "descending", "normal", "bf16", "clustered", "one byte", "special values",
)  # fmt: skip
"""Kinds of `scores`, simplest first."""
PAGE = 64
_SEEDS = st.integers(0, 2**16)


def configs(*, max_heads: int = 4) -> st.SearchStrategy[IndexerConfig]:
    """Small indexers of any geometry that a checkpoint may have, with and without YaRN; layer 1 has the indexer."""

    def make(
        heads: int, dim: int, rope: int, hidden: int, lora: int, k: int, theta: float, yarn: bool
    ) -> IndexerConfig:
        return made_up_config(
            index_n_heads=heads, index_head_dim=dim, rope_head_dim=min(rope, dim), hidden_size=hidden,
            q_lora_rank=lora, index_topk=k, compress_rope_theta=theta, yarn=PUBLISHED_YARN if yarn else None,
        )  # fmt: skip

    return st.builds(
        make,
        heads=st.integers(1, max_heads),
        dim=st.sampled_from([32, 64, 128]),
        rope=st.sampled_from([2, 16, 32, 64, 128]),
        hidden=st.sampled_from([32, 64, 96]),
        lora=st.sampled_from([128, 256]),
        k=st.integers(1, 16),
        theta=st.sampled_from([10000.0, 160000.0]),
        yarn=st.booleans(),
    )


def weights(config: IndexerConfig, *, stored: tuple[str, ...] = STORED) -> st.SearchStrategy[IndexerWeights]:
    """Weights of one layer, wq_b stored in one of the ways named."""
    return st.builds(lambda seed, how: made_up_weights(config, seed, how), _SEEDS, st.sampled_from(stored))


def hidden_states(
    config: IndexerConfig, *, min_tokens: int = 4, max_tokens: int = 80
) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Inputs (x, qr) of a sequence, bf16 [T, hidden] and [T, q_lora]; any T, not only multiples of four."""
    return st.builds(
        lambda tokens, seed: made_up_inputs(config, tokens, seed), st.integers(min_tokens, max_tokens), _SEEDS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores to select from: fp32 [rows, E] with poison beyond each row's `visible`, int32 [rows]; and k."""

    scores: Tensor
    visible: Tensor
    k: int
    kind: str


@st.composite
def scores(
    draw: st.DrawFn,
    *,
    max_rows: int = 5,
    max_entries: int = 300,
    max_k: int = 70,
    kinds: tuple[str, ...] = SCORE_KINDS,
    poison: bool = True,
) -> Scores:
    """Rows of scores that tie, nearly tie or cluster; a row sees any number of entries, often about k.

    poison: entries beyond `visible` are NaN or the largest scores, otherwise like the others.
    """
    kind = draw(st.sampled_from(kinds))
    rows, k = draw(st.integers(1, max_rows)), draw(st.integers(1, max_k))
    edges = [n for n in (1, 63, 64, 65, k - 1, k, k + 1, max_entries) if 1 <= n <= max_entries]
    entries = draw(st.sampled_from(edges) | st.integers(1, max_entries))
    some = [n for n in (0, 1, 63, 64, 65, k - 1, k, k + 1, entries) if n <= entries]
    visible = torch.tensor(
        draw(st.lists(st.sampled_from(some) | st.integers(0, entries), min_size=rows, max_size=rows))
    )
    rng = torch.Generator().manual_seed(draw(_SEEDS))
    made = _scores(kind, rows, entries, rng)
    if poison:
        hidden = torch.arange(entries) >= visible[:, None]
        made = made.masked_fill(hidden, draw(st.sampled_from([torch.nan, torch.inf])))
    return Scores(scores=made, visible=visible.int(), k=k, kind=kind)


def _scores(kind: str, rows: int, entries: int, rng: torch.Generator) -> Tensor:
    normal = torch.randn(rows, entries, generator=rng)
    if kind == "constant":
        return torch.full((rows, entries), 3.5)
    if kind == "few values":
        return torch.randint(-2, 3, (rows, entries), generator=rng) / 2
    if kind in ("ascending", "descending"):
        return normal.sort(dim=1, descending=kind == "descending").values
    if kind == "bf16":
        return normal.bfloat16().float()
    if kind == "clustered":  # more of them share a coarse bin than a bounded list of candidates holds
        return 100 + 0.5 * normal
    if kind == "one byte":  # fp32 numbers that are told apart by one byte alone
        shift = 8 * int(torch.randint(3, (), generator=rng))
        byte = torch.randint(256, (rows, entries), generator=rng, dtype=torch.int32)
        return ((byte << shift) | 0x3F00_0000).view(torch.float32)
    if kind == "special values":
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0])
        return special[torch.randint(len(special), (rows, entries), generator=rng)]
    if kind != "normal":
        raise ValueError(f"kind of scores {kind!r}, expected some of {', '.join(SCORE_KINDS)}")
    return normal


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Prefills of several requests in one call.

    tokens: of each request. cu_tokens and cu_entries, int32 [B + 1]: where the tokens and the compressed entries of a
    request begin among all. start and end, int32 [T]: a token sees the entries start … end - 1 of all, those of its own
    request that end at or before it.
    """

    tokens: tuple[int, ...]
    cu_tokens: Tensor
    cu_entries: Tensor
    start: Tensor
    end: Tensor


def ragged_batches(*, max_requests: int = 4, max_tokens: int = 300, k: int = 8) -> st.SearchStrategy[RaggedBatch]:
    """Requests of any length, often at an edge of a window of four, a page of 64 entries or a selection of k."""
    edges = {4 * entries + rest for entries in (1, 63, 64, 65, k - 1, k, k + 1) for rest in (-1, 0, 1)} | {1, 2}
    some = sorted(n for n in edges if 1 <= n <= max_tokens)
    lengths = st.lists(st.sampled_from(some) | st.integers(1, max_tokens), min_size=1, max_size=max_requests)
    return lengths.map(_ragged)


def _ragged(tokens: list[int]) -> RaggedBatch:
    entries = [n // 4 for n in tokens]
    offsets = torch.tensor([0, *torch.tensor(entries).cumsum(0).tolist()])
    start = torch.cat([torch.full((n,), int(first)) for n, first in zip(tokens, offsets[:-1], strict=True)])
    seen = torch.cat([(torch.arange(n) + 1) // 4 for n in tokens])
    return RaggedBatch(
        tokens=tuple(tokens), cu_tokens=torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()]).int(),
        cu_entries=offsets.int(), start=start.int(), end=(start + seen).int(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """Where the entries of several requests lie in a paged cache.

    lengths: int32 [B], entries of each request. table: int32 [B, W], entry e is row e % page of page table[b, e //
    page]; columns beyond a request's pages hold ids that must not be followed. pages: size of the pool. No two requests
    share a page.
    """

    lengths: Tensor
    table: Tensor
    pages: int
    page: int

    def slots(self, request: int) -> Tensor:
        """Slot (page id * page + row) of each entry of a request, int64 [length]."""
        entry = torch.arange(int(self.lengths[request]), device=self.table.device)
        return self.table[request, entry // self.page].long() * self.page + entry % self.page


@st.composite
def block_tables(
    draw: st.DrawFn, *, max_requests: int = 4, max_entries: int = 200, k: int = 8, page: int = PAGE, spare: int = 3
) -> BlockTables:
    """Shuffled pages of requests of any length, 0 included; `spare` pages of the pool belong to nobody."""
    some = sorted({n for n in (0, 1, page - 1, page, page + 1, k - 1, k, k + 1) if 0 <= n <= max_entries})
    lengths = draw(st.lists(st.sampled_from(some) | st.integers(0, max_entries), min_size=1, max_size=max_requests))
    rng = torch.Generator().manual_seed(draw(_SEEDS))
    needed = [-(-n // page) for n in lengths]
    pages = sum(needed) + spare
    order = torch.randperm(pages, generator=rng).tolist()
    width = max(*needed, 1) + draw(st.integers(0, 2))
    table = torch.randint(-(2**31), 2**31, (len(lengths), width), generator=rng)
    for request, count in enumerate(needed):
        table[request, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
    return BlockTables(lengths=torch.tensor(lengths).int(), table=table.int(), pages=pages, page=page)
