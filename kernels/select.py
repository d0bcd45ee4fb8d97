"""select and select_paged: logits and top-k together, so that the scores of all queries and entries never exist.

8192 queries times 131072 entries are 4.3 GB of fp32 scores, of which top-k keeps 0.4 %. Here a chunk of query rows
meets a segment of entries at a time: the logits kernel scores the segment into a workspace of ROWS x SEGMENT, and
`topk.stream_kernel` appends to each row's list what can still win. The lists pass from segment to segment; segments go
in ascending order, so lists stay in column order and an equal score in a later segment loses, as in `topk`. The last
segment of a chunk writes the answer. Segments that no row of the chunk sees are not visited.

Each score is one (query row, key) product, whatever the tile it is computed in, and the best k of a row under a total
order are one set: so neither chunk nor segment shows in the result.

On Hopper, e4m3 keys and rows enough for all multiprocessors take one launch instead, see `hopper_select`; the result is
the same.

Memory beyond the result: the workspace (32 MiB) and the lists, 8 * (k + 1024) bytes a row of the chunk and at most
`topk.LISTS_BYTES` (25 MiB; above k = 2048 a chunk has fewer rows for it).

Letters: M prefill rows, N keys, R decode rows, B requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import ENTRIES_PER_PAGE
from .logits import aligned, paged_logits, ragged_logits
from .quantise_query import QuantisedQuery
from .topk import Lists, longest_launch, stream, topk
from .tuning import on_hopper

ROWS, SEGMENT = 1024, 8192
"""Query rows of a chunk and entries of a segment; their product is the workspace in fp32 scores."""


def select(
    query: QuantisedQuery,
    keys: Tensor,
    key_scales: Tensor | None,
    start: Tensor,
    end: Tensor,
    k: int,
    *,
    fmt: str,
    exact: bool = True,
    _rows: int | None = None,
    _segment: int | None = None,
) -> Tensor:
    """Prefill selection, int32 [M, k]: exactly `topk(ragged_logits(...), end - start, k, start)`.

    query, keys, key_scales, start, end, fmt, exact: as `ragged_logits` takes them. A row's result is the columns
    (numbered over all keys) of its k best scores in ascending order, then -1; ties, NaN and zeros as in `topk`.

    Peak memory beyond the result: below 58 MiB. Except in one launch, waits for the device once, to learn which entries
    each chunk sees. Raises ValueError as `ragged_logits` and `topk` do.
    """
    _check_k(k)
    ragged_logits(query, keys[:0], None if key_scales is None else key_scales[:0], start, end, fmt=fmt, exact=exact)
    rows, count = len(start), len(keys)
    if key_scales is not None and len(key_scales) != count:
        raise ValueError(f"key_scales has {len(key_scales)} rows for {count} keys, expected one each")
    out = torch.empty(rows, k, dtype=torch.int32, device=keys.device)
    if not rows or not count:
        return out.fill_(-1)
    if fmt == "e4m3" and key_scales is not None and _rows is None and on_hopper(keys) and aligned(query.codes, keys):
        from . import hopper_select

        if hopper_select.runs(rows, query.codes.shape[1], k, keys.device):
            hopper_select.select_sm90(query.codes, query.gate, keys, key_scales, start, end, k, out, exact)
            return out
    return _in_segments(query, keys, key_scales, start, end, k, fmt, exact, out, _rows or ROWS, _segment or SEGMENT)


def _in_segments(
    query: QuantisedQuery, keys: Tensor, key_scales: Tensor | None, start: Tensor, end: Tensor, k: int, fmt: str,
    exact: bool, out: Tensor, rows_at_once: int, segment: int,
) -> Tensor:  # fmt: skip
    """`select` of checked arguments, a chunk of rows and a segment of entries at a time."""
    rows, count = len(start), len(keys)

    def scores(part: slice, entries: slice, begin: Tensor, stop: Tensor) -> Tensor:
        scales = None if key_scales is None else key_scales[entries]
        return ragged_logits(
            _rows_of(query, part), keys[entries], scales, begin, stop, fmt=fmt, exact=exact, fill=False
        )

    begin, stop = start.clamp(0, count), end.clamp(0, count)
    if count <= segment:
        whole = slice(0, count)
        for part in _parts(rows, max(1, rows_at_once * segment // count)):
            topk(scores(part, whole, start[part], end[part]), (stop - begin)[part], k, begin[part], out=out[part])
        return out

    height = min(rows_at_once, longest_launch(k))
    lists = Lists.empty(min(rows, height), k, keys.device)
    for part, (low, high) in zip(_parts(rows, height), _spans(begin, stop, count, height), strict=True):
        low = low // ENTRIES_PER_PAGE * ENTRIES_PER_PAGE  # whole tiles, and pointers as aligned as those of all keys
        firsts = range(low, high, segment)
        if not firsts:
            out[part] = -1
            continue
        begins, stops, lengths = _within(begin[part], stop[part], low, len(firsts), segment)
        for step, first in enumerate(firsts):
            last = min(first + segment, -(-high // ENTRIES_PER_PAGE) * ENTRIES_PER_PAGE, count)
            stream(
                scores(part, slice(first, last), begins[step], stops[step]), begins[step], lengths[step], k, lists,
                out[part], programs=len(out[part]), offset=first, first=step == 0, last=step == len(firsts) - 1,
            )  # fmt: skip
    return out


def select_paged(
    query: QuantisedQuery,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    *,
    fmt: str,
    max_length: int,
    next_n: int = 1,
    exact: bool = True,
    _scores: int = ROWS * SEGMENT,
) -> Tensor:
    """Decode selection, int32 [R, k]: exactly `topk(paged_logits(...), lengths, k)`.

    query, pages, block_table, lengths, fmt, max_length, next_n, exact: as `paged_logits` takes them. Result as `topk`.
    Requests are taken so many at a time that their scores fit the workspace (one request in any case); nothing waits
    for the device. Raises ValueError as `paged_logits` and `topk` do.
    """
    _check_k(k)
    paged_logits(query, pages, block_table, lengths, fmt=fmt, max_length=0, next_n=next_n)
    rows = len(lengths)
    out = torch.empty(rows, k, dtype=torch.int32, device=pages.device)
    for requests in _parts(rows // next_n, max(1, _scores // max(1, max_length * next_n))):
        part = slice(requests.start * next_n, requests.stop * next_n)
        scores = paged_logits(
            _rows_of(query, part), pages, block_table[requests], lengths[part],
            fmt=fmt, max_length=max_length, next_n=next_n, exact=exact, fill=False,
        )  # fmt: skip
        topk(scores, lengths[part], k, out=out[part])
        del scores  # so that the next ones take its place
    return out


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")


def _parts(rows: int, height: int) -> list[slice]:
    """Slices of at most `height` rows."""
    return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]


def _rows_of(query: QuantisedQuery, part: slice) -> QuantisedQuery:
    scales = None if query.scales is None else query.scales[part]
    return QuantisedQuery(codes=query.codes[part], scales=scales, gate=query.gate[part])


def _spans(begin: Tensor, stop: Tensor, count: int, height: int) -> list[tuple[int, int]]:
    """First and one past the last entry that any row of each chunk sees (first >= last: none does), as host numbers."""
    seen = stop > begin
    missing = -len(begin) % height
    low = torch.nn.functional.pad(torch.where(seen, begin, count), (0, missing), value=count)
    high = torch.nn.functional.pad(torch.where(seen, stop, 0), (0, missing), value=0)
    pairs = torch.stack((low.view(-1, height).amin(1), high.view(-1, height).amax(1)), 1)
    return [(low, high) for low, high in pairs.tolist()]


def _within(begin: Tensor, stop: Tensor, low: int, segments: int, segment: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's begin, stop and length counted within each segment from `low` on: int32 [segments, rows] each, rows
    of storage padded so that a segment's pointers stay aligned.
    """
    rows = len(begin)
    first = low + segment * torch.arange(segments, dtype=torch.int32, device=begin.device)[:, None]
    begin, stop = (torch.nn.functional.pad(t, (0, -rows % 4)) for t in (begin, stop))
    begins, stops = ((t - first).clamp(0, segment) for t in (begin, stop))
    return begins[:, :rows], stops[:, :rows], (stops - begins)[:, :rows]
