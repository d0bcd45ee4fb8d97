"""topk: the k best entries of every row, exact and deterministic, each score read once.

Each fp32 score becomes a 32-bit key whose order is the wanted order (negative numbers have their other bits flipped,
-0.0 equals 0.0, NaN lies below -inf). A program walks over its row and appends to a short list whatever can still win:
keys above a limit that starts below everything. When the list is full, it shrinks to its k best and the k-th key
becomes the limit. The list stays in column order, so what comes later loses against an equal key and has to lie
strictly above the limit; in a row of random order hardly anything does, and in the worst order (ascending) the list
shrinks once per tile. The k-th key is found by halving an interval of keys, a count at a time, on a list held in
registers (above LIST keys, partly); the places of what stays are prefix sums. So equal scores are settled by the lower
index, nothing depends on timing, and clustered scores cost no more than spread ones.

`select` keeps the lists from one launch to the next. Few rows are shared by many programs instead, see `tournament`.

Letters: M rows, E columns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_devices, check_tensor
from .order import LOWEST, NAN, order_keys
from .tournament import most_rows, tournament, width_for
from .tuning import multiprocessors, plain

COLUMNS = 1024
"""Columns read at a time."""

LIST = 2048
"""Keys of a list that stay in registers while its k-th is looked for; the others are read again."""
LISTS_BYTES = 25 << 20
"""Bound of the lists of one launch."""


@triton.jit
def _at_least(key, keys_ptr, count, bound, LIST: tl.constexpr):
    """How many keys of a list are >= bound; `key` holds its first LIST."""
    number = tl.sum((key >= bound).to(tl.int32), axis=0)
    for first in range(LIST, count, LIST):
        place = first + tl.arange(0, LIST)
        more = tl.load(keys_ptr + place, mask=place < count, other=LOWEST)
        number += tl.sum((more >= bound).to(tl.int32), axis=0)
    return number


@triton.jit
def _keep_best(keys_ptr, columns_ptr, count, limit, k, COLUMNS: tl.constexpr, LIST: tl.constexpr):
    """Shrink a list of count > k keys, none below the limit, to its k best, in order; returns the new limit: k keys are
    at least that.
    """
    tl.static_assert(COLUMNS < LIST)  # so what a full list has beyond LIST is shorter than k
    tl.debug_barrier()  # other threads stored the list
    index = tl.arange(0, LIST)
    held = tl.load(keys_ptr + index, mask=index < count, other=LOWEST)
    high = tl.max(held, axis=0)
    low = tl.maximum(limit, NAN)
    # k keys or more are >= low and fewer than k are > high; in the end low is the k-th key or parts k from the others
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # mean rounded up, without overflow
        number = _at_least(held, keys_ptr, count, middle, LIST)
        high = tl.where(number > k, high, tl.where(number == k, middle, middle - 1))
        low = tl.where(number >= k, middle, low)
    wanted = k - _at_least(held, keys_ptr, count, low + 1, LIST)  # of the keys equal to low
    above_before = count * 0
    equal_before = count * 0
    for first in range(0, count, COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        key = tl.load(keys_ptr + place, mask=place < count, other=LOWEST)
        column = tl.load(columns_ptr + place, mask=place < count, other=0)
        both = (key > low).to(tl.int32) + ((key == low).to(tl.int32) << 16)  # two counts in one sum; COLUMNS < 2^15
        sums = tl.cumsum(both, axis=0)
        rank = equal_before + (sums >> 16)  # from 1, among equals
        kept = (key > low) | ((key == low) & (rank <= wanted))
        target = above_before + (sums & 0xFFFF) + tl.minimum(rank, wanted) - 1  # never beyond where it was read
        total = tl.sum(both, axis=0)
        above_before += total & 0xFFFF
        equal_before += total >> 16
        tl.debug_barrier()  # other threads may not have read yet what is overwritten
        tl.store(keys_ptr + target, key, mask=kept)
        tl.store(columns_ptr + target, column, mask=kept)
    return low


@triton.jit
def _append(key, column, keys_ptr, columns_ptr, count, limit, k, COLUMNS: tl.constexpr, LIST: tl.constexpr):
    """Append a tile's keys above the limit (a key that does not exist is LOWEST) to a list with room for k + COLUMNS;
    returns its new count and limit.
    """
    fresh = tl.sum((key > limit).to(tl.int32), axis=0)
    if count + fresh > k + COLUMNS:
        limit = _keep_best(keys_ptr, columns_ptr, count, limit, k, COLUMNS, LIST)
        count = k
        fresh = tl.sum((key > limit).to(tl.int32), axis=0)
    if fresh > 0:
        left = key > limit
        place = count + tl.cumsum(left.to(tl.int32), axis=0) - 1
        tl.store(keys_ptr + place, key, mask=left)
        tl.store(columns_ptr + place, column, mask=left)
        count += fresh
    return count, limit


@triton.jit
def _finish(out_ptr, columns_ptr, count, k, COLUMNS: tl.constexpr):
    """Write the columns of a list of count <= k, then -1."""
    tl.debug_barrier()  # other threads stored the list
    for first in range(0, k, COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        column = tl.load(columns_ptr + place, mask=place < count, other=-1)
        tl.store(out_ptr + place, column, mask=place < k)
    tl.debug_barrier()  # the list may be used for another row now


@triton.jit(do_not_specialize=["rows", "offset"])
def stream_kernel(
    scores_ptr,
    starts_ptr,
    lengths_ptr,
    keys_ptr,
    columns_ptr,
    counts_ptr,
    limits_ptr,
    out_ptr,
    row_stride,
    columns,
    rows,
    offset,
    k,
    HAS_STARTS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIST: tl.constexpr,
):
    """One program runs over a row, or over several rows one after the other.

    FIRST: its list is empty, else as the last launch left it. LAST: the list, shrunk to k, is the answer, else it stays
    for the next launch, and there is one program a row. Column c is stored as offset + c.
    """
    keys_ptr += tl.program_id(0).to(tl.int64) * (k + COLUMNS)
    columns_ptr += tl.program_id(0).to(tl.int64) * (k + COLUMNS)
    for job in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + job
        start = 0
        if HAS_STARTS:
            start = tl.load(starts_ptr + row)
        stop = tl.minimum(start + tl.load(lengths_ptr + row), columns)
        start = tl.maximum(start, 0)
        begin = start // COLUMNS * COLUMNS

        count = start * 0
        limit = count + LOWEST
        if not FIRST:
            count = tl.load(counts_ptr + job)
            limit = tl.load(limits_ptr + job)
        row_ptr = scores_ptr + row * row_stride
        tile = tl.arange(0, COLUMNS)
        # a whole tile is read, whatever the row's ends, so that the loads are wide
        following = tl.load(row_ptr + begin + tile, mask=(begin + tile < columns) & (begin < stop), other=0.0)
        for first in range(begin, stop, COLUMNS):
            column = first + tile
            x = following
            ahead = first + COLUMNS
            following = tl.load(row_ptr + ahead + tile, mask=(ahead + tile < columns) & (ahead < stop), other=0.0)
            key = tl.where((column >= start) & (column < stop), order_keys(x), LOWEST)
            count, limit = _append(key, offset + column, keys_ptr, columns_ptr, count, limit, k, COLUMNS, LIST)
        if LAST:
            if count > k:
                limit = _keep_best(keys_ptr, columns_ptr, count, limit, k, COLUMNS, LIST)
                count = tl.minimum(count, k)
            _finish(out_ptr + row * k, columns_ptr, count, k, COLUMNS)
        else:
            tl.store(counts_ptr + job, count)
            tl.store(limits_ptr + job, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """One list of candidates a program: keys and columns int32 [programs, k + tile], counts and limits int32
    [programs].
    """

    keys: Tensor
    columns: Tensor
    counts: Tensor
    limits: Tensor

    @staticmethod
    def empty(programs: int, k: int, device: torch.device, tile: int = COLUMNS) -> Lists:
        """Uninitialised lists."""
        keys, columns = (torch.empty(programs, k + tile, dtype=torch.int32, device=device) for _ in range(2))
        counts, limits = (torch.empty(programs, dtype=torch.int32, device=device) for _ in range(2))
        return Lists(keys=keys, columns=columns, counts=counts, limits=limits)


def longest_launch(k: int) -> int:
    """Programs whose lists fit LISTS_BYTES."""
    return max(1, LISTS_BYTES // (8 * (k + COLUMNS) + 8))


def stream(
    scores: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    k: int,
    lists: Lists,
    out: Tensor,
    *,
    programs: int,
    offset: int = 0,
    first: bool = True,
    last: bool = True,
) -> None:
    """Launch `stream_kernel` on checked arguments: `scores` and its ranges as `topk` takes them, `out` int32 [M, k]."""
    assert last or programs == len(scores), "lists that stay belong to one row each"
    assert len(lists.keys) >= programs
    tile = lists.keys.shape[1] - k
    choice = plain(scores.device)
    stream_kernel[(programs,)](
        scores, lengths if starts is None else starts, lengths, lists.keys, lists.columns, lists.counts, lists.limits,
        out, scores.stride(0), scores.shape[1], len(scores), offset, k, HAS_STARTS=starts is not None,
        FIRST=first, LAST=last, COLUMNS=tile, LIST=LIST,
        num_warps=choice.topk_warps, maxnreg=choice.topk_registers[last],
    )  # fmt: skip


def _programs(k: int, device: torch.device) -> int:
    """Programs that run at once, about, and have room for their lists; few where interpreted."""
    if device.type != "cuda":
        return 8
    at_once = plain(device).topk_programs * multiprocessors(device)
    return min(at_once, longest_launch(k))


def topk(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
    _tile: int = COLUMNS,
    _width: int | None = None,
) -> Tensor:
    """Columns of the k best scores of each row, int32 [M, k], in ascending order; places beyond min(k,
    length) are -1.

    logits: fp32 [M, E], rows may be strided. lengths: int32 [M], visible columns of each row, counted from
    its start. starts: int32 [M], the first visible column of each row (default 0); returned columns count
    from column 0 of `logits`, so subtract `starts` to get a request's own entry numbers. Columns beyond E do
    not exist. out: int32 [M, k] to write to instead of a new tensor.

    Equal scores: the lower column wins. -0.0 equals 0.0; -inf is a score like any other; NaN ranks below
    -inf, and a visible NaN is taken before a place is left empty. Working memory: at most LISTS_BYTES, half as much
    again where rows are shared. Raises ValueError for other shapes or dtypes.
    """
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    if logits.dtype != torch.float32 or logits.ndim != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits is {logits.dtype} {list(logits.shape)}, expected torch.float32 [rows, entries]")
    rows, columns = logits.shape
    check_tensor("lengths", lengths, torch.int32, (rows,))
    if starts is not None:
        check_tensor("starts", starts, torch.int32, (rows,))
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    check_tensor("out", out, torch.int32, (rows, k))
    check_devices(logits=logits, lengths=lengths, starts=starts, out=out)
    if not rows:
        return out
    programs = _programs(k, logits.device)
    width = width_for(columns, logits.device) if _width is None else _width
    height = most_rows(columns, k, width)
    few = min(programs, programs if columns <= width else plain(logits.device).tournament_rows)
    if height and (rows < few if _width is None else _width > 0):
        for first in range(0, rows, height):
            part = slice(first, first + height)
            tournament(logits[part], None if starts is None else starts[part], lengths[part], k, out[part], width)
        return out
    programs = min(programs, rows)
    lists = Lists.empty(programs, k, logits.device, _tile)
    stream(logits, starts, lengths, k, lists, out, programs=programs)
    return out


def topk_naive(logits: Tensor, lengths: Tensor, k: int, starts: Tensor | None = None) -> Tensor:
    """`topk` by a stable sort of each row in plain torch. Same arguments and result."""
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    for row, (scores, length) in enumerate(zip(logits, lengths.tolist(), strict=True)):
        start = 0 if starts is None else int(starts[row])
        visible = scores[max(start, 0) : max(start + length, 0)]
        # NaN as a second key below the first: sort the numbers, then move NaN to the end, both stably
        order = torch.sort(visible.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0,
                           descending=True, stable=True).indices  # fmt: skip
        order = order[torch.sort(visible[order].isnan(), stable=True).indices]
        best = order[:k].sort().values + max(start, 0)
        out[row, : len(best)] = best.int()
    return out
