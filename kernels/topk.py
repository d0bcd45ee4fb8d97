"""topk: the k best entries of every row, exact and deterministic, each score read once.

Each fp32 score becomes a 32-bit key whose order is the wanted order (negative numbers have their other bits flipped,
-0.0 equals 0.0, NaN lies below -inf). A program walks over its row and appends to a short list whatever can still win:
keys above a limit that starts below everything. When the list is full, it shrinks to its k best and the k-th key
becomes the limit. The list stays in column order, so what comes later loses against an equal key and has to lie
strictly above the limit; in a row of random order hardly anything does, and in the worst order (ascending) the list
shrinks once per tile. The k-th key is found by halving an interval of keys, a count at a time, on a list held in
registers (above LIST keys, partly); the places of what stays are prefix sums. So equal scores are settled by the lower
index, nothing depends on timing, and clustered scores cost no more than spread ones.

With few long rows, several programs take a part of a row each and a second kernel runs over their lists as one would
over the row. `select` keeps the lists from one launch to the next.

Letters: M rows, E columns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_devices, check_tensor
from .tuning import plain

COLUMNS = 1024
"""Columns read at a time."""

LIST = 2048
"""Keys of a list that stay in registers while its k-th is looked for; the others are read again."""
LISTS_BYTES = 25 << 20
"""Bound of the lists of one launch."""
PART = 4096
"""Fewest columns worth a program of their own where a row is shared."""

_LOWEST = tl.constexpr(-0x8000_0000)
_NAN = tl.constexpr(-0x7FFF_FFFF)


@triton.jit
def _order(x):
    """int32 keys in the order of the scores; NaN lies below -inf, and _LOWEST below every key."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x == x, key, _NAN)


@triton.jit
def _at_least(key, keys_ptr, count, bound, LIST: tl.constexpr):
    """How many keys of a list are >= bound; `key` holds its first LIST."""
    number = tl.sum((key >= bound).to(tl.int32), axis=0)
    for first in range(LIST, count, LIST):
        place = first + tl.arange(0, LIST)
        more = tl.load(keys_ptr + place, mask=place < count, other=_LOWEST)
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
    held = tl.load(keys_ptr + index, mask=index < count, other=_LOWEST)
    high = tl.max(held, axis=0)
    low = tl.maximum(limit, _NAN)
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
        key = tl.load(keys_ptr + place, mask=place < count, other=_LOWEST)
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
    """Append a tile's keys above the limit (a key that does not exist is _LOWEST) to a list with room for k + COLUMNS;
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


@triton.jit(do_not_specialize=["jobs", "parts", "offset"])
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
    jobs,
    parts,
    offset,
    k,
    HAS_STARTS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SHRINK: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIST: tl.constexpr,
):
    """One program runs over a part of a row, or of several rows one after the other.

    FIRST: its list is empty, else as the last launch left it. SHRINK: to k in the end. LAST: the list is the answer,
    else it stays for the next launch, and there is one program a job. Column c is stored as offset + c.
    """
    keys_ptr += tl.program_id(0).to(tl.int64) * (k + COLUMNS)
    columns_ptr += tl.program_id(0).to(tl.int64) * (k + COLUMNS)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        row = (job // parts).to(tl.int64)
        start = 0
        if HAS_STARTS:
            start = tl.load(starts_ptr + row)
        stop = tl.minimum(start + tl.load(lengths_ptr + row), columns)
        start = tl.maximum(start, 0)
        base = start // COLUMNS * COLUMNS
        step = tl.cdiv(tl.cdiv(tl.maximum(stop - base, 0), parts), COLUMNS) * COLUMNS
        begin = base + job % parts * step
        stop = tl.minimum(stop, begin + step)

        count = start * 0
        limit = count + _LOWEST
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
            key = tl.where((column >= start) & (column < stop), _order(x), _LOWEST)
            count, limit = _append(key, offset + column, keys_ptr, columns_ptr, count, limit, k, COLUMNS, LIST)
        if SHRINK:  # noqa: SIM102 (known when compiled, unlike the count)
            if count > k:
                limit = _keep_best(keys_ptr, columns_ptr, count, limit, k, COLUMNS, LIST)
                count = tl.minimum(count, k)
        if LAST:
            _finish(out_ptr + row * k, columns_ptr, count, k, COLUMNS)
        else:
            tl.store(counts_ptr + job, count)
            tl.store(limits_ptr + job, limit)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(
    keys_ptr,
    columns_ptr,
    counts_ptr,
    into_keys_ptr,
    into_columns_ptr,
    out_ptr,
    parts,
    k,
    COLUMNS: tl.constexpr,
    LIST: tl.constexpr,
):
    """One program selects from the lists of a row's parts."""
    row = tl.program_id(0).to(tl.int64)
    into_keys_ptr += row * (k + COLUMNS)
    into_columns_ptr += row * (k + COLUMNS)
    count = parts * 0
    limit = count + _LOWEST
    for part in range(parts):
        job = row * parts + part
        held = tl.load(counts_ptr + job)
        for first in range(0, held, COLUMNS):
            place = first + tl.arange(0, COLUMNS)
            key = tl.load(keys_ptr + job * (k + COLUMNS) + place, mask=place < held, other=_LOWEST)
            column = tl.load(columns_ptr + job * (k + COLUMNS) + place, mask=place < held, other=0)
            count, limit = _append(key, column, into_keys_ptr, into_columns_ptr, count, limit, k, COLUMNS, LIST)
    if count > k:
        limit = _keep_best(into_keys_ptr, into_columns_ptr, count, limit, k, COLUMNS, LIST)
        count = tl.minimum(count, k)
    _finish(out_ptr + row * k, into_columns_ptr, count, k, COLUMNS)


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
    parts: int = 1,
    offset: int = 0,
    first: bool = True,
    last: bool = True,
) -> None:
    """Launch `stream_kernel` on checked arguments: `scores` and its ranges as `topk` takes them, `out` int32 [M, k]."""
    assert last or programs == len(scores) * parts, "lists that stay belong to one job each"
    assert len(lists.keys) >= programs
    tile = lists.keys.shape[1] - k
    shrink, choice = last or parts > 1, plain(scores.device)
    stream_kernel[(programs,)](
        scores, lengths if starts is None else starts, lengths, lists.keys, lists.columns, lists.counts, lists.limits,
        out, scores.stride(0), scores.shape[1], len(scores) * parts, parts, offset, k, HAS_STARTS=starts is not None,
        FIRST=first, LAST=last, SHRINK=shrink, COLUMNS=tile, LIST=LIST,
        num_warps=choice.topk_warps, maxnreg=choice.topk_registers[shrink],
    )  # fmt: skip


def _programs(k: int, device: torch.device) -> int:
    """Programs that run at once, about, and have room for their lists; few where interpreted."""
    if device.type != "cuda":
        return 8
    at_once = plain(device).topk_programs * torch.cuda.get_device_properties(device).multi_processor_count
    return min(at_once, longest_launch(k))


def _parts(rows: int, columns: int, k: int, programs: int) -> int:
    """Programs that share a row: what the device has room for, as long as reading their lists takes less than a part,
    and 1 where a second launch would cost more than it saves.
    """
    parts = min(programs // rows, isqrt(columns // k), columns // PART)
    return parts if parts >= 4 else 1


def topk(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
    _tile: int = COLUMNS,
    _parts_per_row: int | None = None,
) -> Tensor:
    """Columns of the k best scores of each row, int32 [M, k], in ascending order; places beyond min(k,
    length) are -1.

    logits: fp32 [M, E], rows may be strided. lengths: int32 [M], visible columns of each row, counted from
    its start. starts: int32 [M], the first visible column of each row (default 0); returned columns count
    from column 0 of `logits`, so subtract `starts` to get a request's own entry numbers. Columns beyond E do
    not exist. out: int32 [M, k] to write to instead of a new tensor.

    Equal scores: the lower column wins. -0.0 equals 0.0; -inf is a score like any other; NaN ranks below
    -inf, and a visible NaN is taken before a place is left empty. Working memory: at most LISTS_BYTES, a quarter more
    where rows are shared. Raises ValueError for other shapes or dtypes.
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
    parts = _parts(rows, columns, k, programs) if _parts_per_row is None else _parts_per_row
    programs = min(programs, rows) if parts == 1 else rows * parts
    lists = Lists.empty(programs, k, logits.device, _tile)
    stream(logits, starts, lengths, k, lists, out, programs=programs, parts=parts, last=parts == 1)
    if parts > 1:
        choice = plain(logits.device)
        into = Lists.empty(rows, k, logits.device, _tile)
        combine_kernel[(rows,)](
            lists.keys, lists.columns, lists.counts, into.keys, into.columns, out, parts, k, COLUMNS=_tile,
            LIST=LIST, num_warps=choice.topk_warps, maxnreg=choice.combine_registers,
        )  # fmt: skip
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
