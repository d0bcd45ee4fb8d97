"""What a deployment runs: the lightning indexer as fused Triton kernels, and the bytes of its key cache.

The path of one layer, each arrow one kernel::

    kv, gate (fp32 projections) --store_key--> cache pages
    q, gate                     --quantise_query--> QuantisedQuery
    QuantisedQuery, pages       --paged_logits--> scores   (decode: through a block table)
    QuantisedQuery, keys        --ragged_logits--> scores  (prefill: start and end per row)
    scores                      --topk--> selected entries

`select` and `select_paged` take the last two steps together, a segment of entries at a time, where the scores of all
entries would not fit.

Three cache formats are known (`layout.PAGE_FORMATS`): e4m3 with an fp32 scale per entry (132 bytes), bf16
(256 bytes) and e2m1 with four ue8m0 scales (68 bytes). Correct first: every rounding is spelled out on fp32
bits (`rounding`), no result depends on the launch, and nothing poisoned becomes finite.

A kernel runs compiled on CUDA tensors, or interpreted on CPU tensors when TRITON_INTERPRET=1 was set before
triton was first imported.
"""

from .layout import (
    ENTRIES_PER_PAGE,
    HEAD_DIM,
    PAGE_FORMATS,
    PageFormat,
    allocate_pages,
    dequantise,
    read_entries,
    write_entries,
)
from .logits import paged_logits, paged_logits_naive, ragged_logits, ragged_logits_naive
from .quantise_query import QuantisedQuery, quantise_query
from .select import select, select_paged
from .store_key import store_key
from .topk import topk, topk_naive

__all__ = [
    "ENTRIES_PER_PAGE",
    "HEAD_DIM",
    "PAGE_FORMATS",
    "PageFormat",
    "QuantisedQuery",
    "allocate_pages",
    "dequantise",
    "paged_logits",
    "paged_logits_naive",
    "quantise_query",
    "ragged_logits",
    "ragged_logits_naive",
    "read_entries",
    "select",
    "select_paged",
    "store_key",
    "topk",
    "topk_naive",
    "write_entries",
]
