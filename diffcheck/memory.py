"""What index keys cost in memory, from config.json alone, with every term shown.

Letters: L4, L128, L layers of ratio 4, of ratio 128, and in all; D head dim, R RoPE dims, W window, d index head dim.

    entry        = (D - R) * 1 B e4m3 + ceil((D - R) / 64) * 1 B ue8m0 + R * 2 B bf16, aligned to 8 B
                   what the reference quantises its keys to; key and value are one vector
    per token    = L4 * entry / 4 + L128 * entry / 128 + L4 * index / 4
    per request  = L * W * entry                  the sliding window, which every layer has
                 + L4 * 8 * 2 * 2D * 4 B          open and previous window, fp32: kv and gate, two halves
                 + L4 * 8 * 2 * 2d * 4 B          the same of the indexer's compressor
                 + L128 * 128 * 2 * D * 4 B       the open window at ratio 128
    KV of n tokens in one request = n * per token + per request
    slots        = tokens that fit into the same bytes: share lost or gained = KV(first format) / KV(format) - 1

`index` is the bytes of one key in the format, as cache pages hold it (64 entries a page, no padding). Engines differ in
what they keep besides, above all for windows and open windows; the growing part is common to all. Logits of a chunk are
fp32 [queries, entries], made for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .checkpoint.layer import resolve_directory
from .compare import bytes_per_entry
from .errors import InputError
from .presets import build
from .refimpl.compressor import WINDOW
from .refimpl.model import ModelConfig

DEFAULT_FORMATS = ("e4m3/128/fp32", "bf16", "e2m1/32/ue8m0")
CONTEXT, CHUNK = 524_288, 8192
SCALE_BLOCK, ALIGNMENT = 64, 8
HCA_RATIO = 128
REQUEST_TOKENS = (8192, 32768, 131072, 524288)
"""Tokens of one request for which the share of the part that does not grow is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of a sum: its name, how it comes about, and its bytes."""

    name: str
    formula: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCost:
    """Index keys in one format: bytes of an entry and of a token, and of the KV cache with them (a token, a context).

    more and slots are the shares of KV bytes and of slots gained (or, negative, lost) against the first format, of the
    part that grows with the tokens; by_request are the same for requests of REQUEST_TOKENS tokens, all parts counted.
    """

    format: str
    entry: float
    token: float
    kv_token: float
    context: float
    kv_context: float
    more: float
    slots: float
    by_request: dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All terms: of a main entry, of a token without index keys, of a request; then the index keys by format."""

    layers: dict[int, int]
    entry: list[Term]
    entry_bytes: int
    token: list[Term]
    request: list[Term]
    costs: list[IndexCost]
    context: int
    chunk: int
    logits_bytes: int
    topk_bytes: int


def measure(
    checkpoint: Path,
    formats: Sequence[str],
    *,
    context: int = CONTEXT,
    chunk: int = CHUNK,
    kv_entry: int | None = None,
) -> Memory:
    """Count from a checkpoint directory, or a config.json, that needs to hold nothing else.

    kv_entry: bytes of a main entry, where a deployment stores it otherwise. InputError for what cannot be counted.
    """
    for name, value, least in (("context", context, WINDOW), ("chunk", chunk, 1), ("kv-entry", kv_entry, 1)):
        if value is not None and value < least:
            raise InputError(f"--{name}: {value}, expected at least {least}")
    if not formats:
        raise InputError("--precision: names nothing, expected formats such as e4m3/128/fp32,bf16")
    config = ModelConfig.from_json(_config_file(checkpoint))
    c, dim = config.indexer, config.indexer.index_head_dim
    layers = {ratio: c.compress_ratios.count(ratio) for ratio in (0, WINDOW, HCA_RATIO)}
    if sum(layers.values()) != len(c.compress_ratios):
        odd = next(ratio for ratio in c.compress_ratios if ratio not in layers)
        raise InputError(f"config: a layer has compress ratio {odd}, expected 0, {WINDOW} or {HCA_RATIO}")
    entry = _entry_terms(config, kv_entry)
    size = -(-int(sum(term.bytes for term in entry)) // ALIGNMENT) * ALIGNMENT if kv_entry is None else kv_entry
    token = [
        Term(name=f"ratio {ratio}", formula=f"{layers[ratio]} layers x {size} / {ratio}",
             bytes=layers[ratio] * size / ratio)
        for ratio in (WINDOW, HCA_RATIO)
    ]  # fmt: skip
    request = _request_terms(config, layers, size)
    index = {text: bytes_per_entry(build(text, c), dim) for text in dict.fromkeys(formats)}
    costs = [
        _cost(text, index, layers[WINDOW], sum(t.bytes for t in token), sum(t.bytes for t in request), context)
        for text in index
    ]
    entries = context // WINDOW
    return Memory(
        layers=layers, entry=entry, entry_bytes=size, token=token, request=request, costs=costs, context=context,
        chunk=chunk, logits_bytes=4 * chunk * entries, topk_bytes=4 * chunk * min(c.index_topk, entries),
    )  # fmt: skip


def _config_file(path: Path) -> Path:
    if path.suffix == ".json" and path.is_file():
        return path
    return resolve_directory(path)[0] / "config.json"


def _entry_terms(config: ModelConfig, given: int | None) -> list[Term]:
    if given is not None:
        return [Term(name="as given", formula=f"{given} B", bytes=given)]
    rope = config.indexer.rope_head_dim
    plain = config.head_dim - rope
    scales = -(-plain // SCALE_BLOCK)
    return [
        Term(name="e4m3", formula=f"{plain} x 1 B e4m3", bytes=plain),
        Term(name="scales", formula=f"{scales} x 1 B ue8m0", bytes=scales),
        Term(name="RoPE", formula=f"{rope} x 2 B bf16", bytes=2 * rope),
    ]


def _request_terms(config: ModelConfig, layers: dict[int, int], size: int) -> list[Term]:
    four, many, dim, index = layers[WINDOW], layers[HCA_RATIO], config.head_dim, config.indexer.index_head_dim
    every, window, slots = sum(layers.values()), config.sliding_window, 2 * WINDOW
    rows = [
        ("sliding window", (every, window, size)),
        (f"open windows, ratio {WINDOW}", (four, slots, 2, 2 * dim, 4)),
        ("open windows, indexer", (four, slots, 2, 2 * index, 4)),
        (f"open windows, ratio {HCA_RATIO}", (many, HCA_RATIO, 2, dim, 4)),
    ]
    terms = []
    for name, factors in rows:
        product = 1
        for factor in factors:
            product *= factor
        first, *rest = factors
        terms.append(Term(name=name, formula=" x ".join([f"{first} layers", *map(str, rest)]), bytes=product))
    return terms


def _cost(text: str, index: dict[str, float], layers: int, token: float, request: float, context: int) -> IndexCost:
    def kv(entry: float, tokens: int | None) -> float:
        """Bytes a token; tokens None: of the growing part only."""
        return token + layers * entry / WINDOW + (0 if tokens is None else request / tokens)

    base, own = next(iter(index.values())), index[text]
    shares = {n: (kv(own, n) / kv(base, n) - 1, kv(base, n) / kv(own, n) - 1) for n in (None, *REQUEST_TOKENS)}
    return IndexCost(
        format=text,
        entry=own,
        token=layers * own / WINDOW,
        kv_token=kv(own, None),
        context=layers * own / WINDOW * context,
        kv_context=kv(own, None) * context,
        more=shares[None][0],
        slots=shares[None][1],
        by_request={n: shares[n] for n in REQUEST_TOKENS},
    )


def render(console: Console, memory: Memory) -> None:
    """Print every term, then the formats."""

    def line(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    m, first = memory, memory.costs[0]
    line(
        f"{sum(m.layers.values())} layers: {m.layers[0]} with a window only, {m.layers[WINDOW]} of ratio {WINDOW} "
        f"(with an indexer), {m.layers[HCA_RATIO]} of ratio {HCA_RATIO}"
    )
    total = sum(term.bytes for term in m.entry)
    padded = f" = {total:g}, aligned to {ALIGNMENT}" if total != m.entry_bytes else ""
    line(f"main entry          {' + '.join(term.formula for term in m.entry)}{padded} = {m.entry_bytes} B")
    line("a token:")
    for term in m.token:
        line(f"  {term.name:26s}{term.formula:34s}= {term.bytes:10.2f} B")
    for cost in m.costs:
        name = f"index keys, {cost.format}"
        line(f"  {name:26s}{f'{m.layers[WINDOW]} layers x {cost.entry:g} / {WINDOW}':34s}= {cost.token:10.2f} B")
    line("a request, whatever its length:")
    for term in m.request:
        line(f"  {term.name:26s}{term.formula:34s}= {term.bytes / 1e6:10.3f} MB")
    line()
    width = max(12, *(len(cost.format) for cost in m.costs))
    line(
        f"{'format':{width}s}  B an entry  B a token  KV B a token  index share  {m.context:>9,} tokens, KV GB  "
        f"KV bytes    slots"
    )
    for cost in m.costs:
        line(
            f"{cost.format:{width}s}  {cost.entry:10g}  {cost.token:9.2f}  {cost.kv_token:12.2f}  "
            f"{cost.token / cost.kv_token:11.1%}  {cost.context / 1e9:9.3f} of {cost.kv_context / 1e9:10.3f}  "
            f"{_share(cost.more, cost is first)}  {_share(cost.slots, cost is first)}"
        )
    line()
    line(f"with what a request has besides, KV bytes and slots against {first.format}, by tokens of a request:")
    line(f"{'format':{width}s}  " + "  ".join(f"{n:>17,}" for n in REQUEST_TOKENS))
    for cost in m.costs[1:]:
        cells = (f"{more:+8.1%} {slots:+8.1%}" for more, slots in cost.by_request.values())
        line(f"{cost.format:{width}s}  " + "  ".join(cells))
    line()
    line(
        f"logits of a chunk   {m.chunk} queries x {m.context // WINDOW} entries x 4 B = {m.logits_bytes / 1e9:.3f} GB "
        f"for the layer at work, its selection {m.topk_bytes / 1e6:.1f} MB"
    )


def _share(value: float, first: bool) -> str:
    return f"{'-' if first else f'{value:+.1%}':>8s}"


def document(memory: Memory) -> dict[str, Any]:
    """Everything as JSON values."""

    def terms(of: Sequence[Term]) -> list[dict[str, Any]]:
        return [{"name": t.name, "formula": t.formula, "bytes": t.bytes} for t in of]

    m = memory
    return {
        "schema_version": 1,
        "layers": {str(ratio): count for ratio, count in m.layers.items()},
        "main_entry": {"terms": terms(m.entry), "bytes": m.entry_bytes},
        "bytes_per_token_without_index_keys": terms(m.token),
        "bytes_per_request": terms(m.request),
        "context": m.context,
        "formats": [
            {
                "format": c.format,
                "bytes_per_entry": c.entry,
                "bytes_per_token": c.token,
                "kv_bytes_per_token": c.kv_token,
                "bytes_per_context": c.context,
                "kv_bytes_per_context": c.kv_context,
                "kv_bytes_share": c.more,
                "slots_share": c.slots,
                "by_request_tokens": {
                    str(n): {"kv_bytes_share": more, "slots_share": slots} for n, (more, slots) in c.by_request.items()
                },
            }
            for c in m.costs
        ],
        "logits": {"chunk": m.chunk, "entries": m.context // WINDOW, "bytes": m.logits_bytes},
        "selection_bytes": m.topk_bytes,
    }
