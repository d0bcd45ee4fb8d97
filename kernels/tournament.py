"""tournament: the k best entries of a few long rows, each row shared by many programs.

A program holds WIDTH scores in registers, finds the k-th of them by halving an interval of keys, a count at a time, and
leaves a list of the k best in column order. Lists of a row are merged the same way, several at a time, until one is
left: that is the answer. Every round keeps the k best of what it sees under one total order (higher key, then lower
column), so neither widths nor the number of rounds show in the result.

For many rows `topk.stream_kernel` does less work: it reads a score once and looks for no k-th in most tiles.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .order import LOWEST, key_score, order_keys
from .tuning import plain

NUMBER_STEPS = tl.constexpr(20)
"""Steps of a search that go by numbers rather than by keys, at most."""

LISTS_BYTES = 25 << 20
"""Bound of the lists of one round; rows are taken so many at a time."""


@triton.jit
def _threshold(key, k):
    """(limit, kept): the k best are the keys above the limit and the first that equal it, `kept` keys in all."""
    count = tl.sum((key > LOWEST).to(tl.int32), axis=0)
    limit = tl.full((), LOWEST, tl.int32)
    if count > k:
        high = tl.max(key, axis=0)
        limit = tl.min(tl.where(key > LOWEST, key, high), axis=0)
        # k keys or more are >= limit, fewer than k are > high; in the end limit is the k-th or parts k from the others
        step = count * 0
        while limit < high:
            middle = (limit | high) - ((limit ^ high) >> 1)  # mean rounded up, without overflow
            # scores of many magnitudes are parted faster by the mean of the numbers, as long as there is one
            mean = 0.5 * key_score(limit) + 0.5 * key_score(high)
            if (step < NUMBER_STEPS) & (tl.abs(mean) < float("inf")):
                middle = tl.minimum(tl.maximum(order_keys(mean), limit + 1), high)
            step += 1
            number = tl.sum((key >= middle).to(tl.int32), axis=0)
            high = tl.where(number > k, high, tl.where(number == k, middle, middle - 1))
            limit = tl.where(number >= k, middle, limit)
    return limit, tl.minimum(count, k)


@triton.jit
def tournament_kernel(
    scores_ptr,
    starts_ptr,
    lengths_ptr,
    keys_ptr,
    columns_ptr,
    keys_out_ptr,
    columns_out_ptr,
    row_stride,
    columns,
    lists,
    k,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LIST: tl.constexpr,
):
    """One program of one row: WIDTH of its scores (FIRST), or WIDTH // LIST of its `lists` lists, to the best k.

    LIST is a power of two that holds k. A list is k keys, LOWEST where there is none, and their columns; LAST writes
    columns only, -1 where there is none.
    """
    row = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, WIDTH)
    if FIRST:
        start = 0
        if HAS_STARTS:
            start = tl.load(starts_ptr + row)
        stop = tl.minimum(start + tl.load(lengths_ptr + row), columns)
        column = tl.program_id(0) * WIDTH + place
        seen = (column >= start) & (column < stop)
        x = tl.load(scores_ptr + row * row_stride + column, mask=seen, other=0.0)
        key = tl.where(seen, order_keys(x), LOWEST)
    else:
        part = tl.program_id(0) * (WIDTH // LIST) + place // LIST
        there = (part < lists) & (place % LIST < k)
        at = (row * lists + part) * k + place % LIST
        key = tl.load(keys_ptr + at, mask=there, other=LOWEST)
        column = tl.load(columns_ptr + at, mask=there, other=0)

    limit, kept = _threshold(key, k)
    above = (key > limit).to(tl.int32)
    both = above + (((key == limit) & (limit > LOWEST)).to(tl.int32) << 16)  # two counts in one sum; WIDTH <= 2^14
    wanted = kept - tl.sum(above, axis=0)  # of the keys equal to the limit
    sums = tl.cumsum(both, axis=0)
    rank = sums >> 16  # from 1, among equals
    keep = (key > limit) | ((key == limit) & (limit > LOWEST) & (rank <= wanted))
    target = (sums & 0xFFFF) + tl.minimum(rank, wanted) - 1
    into = (row * tl.num_programs(0) + tl.program_id(0)) * k
    slot = tl.arange(0, LIST)
    empty = (slot >= kept) & (slot < k)
    tl.store(columns_out_ptr + into + target, column, mask=keep)
    if LAST:
        tl.store(columns_out_ptr + into + slot, tl.full((LIST,), -1, tl.int32), mask=empty)
    else:
        tl.store(keys_out_ptr + into + target, key, mask=keep)
        tl.store(keys_out_ptr + into + slot, tl.full((LIST,), LOWEST, tl.int32), mask=empty)


def width_for(columns: int, device: torch.device) -> int:
    """WIDTH of programs on a device: twice the usual one where that makes a second round unnecessary."""
    width = plain(device).tournament_width
    return 2 * width if width < columns <= 2 * width else width


def most_rows(columns: int, k: int, width: int) -> int:
    """Rows whose lists fit LISTS_BYTES; 0 where two lists of k do not fit `width`, so that nothing could be merged."""
    if 2 * triton.next_power_of_2(k) > width and columns > width:
        return 0
    return LISTS_BYTES // (8 * k * max(1, -(-columns // width)))


def tournament(scores: Tensor, starts: Tensor | None, lengths: Tensor, k: int, out: Tensor, width: int) -> None:
    """Write `topk` of checked arguments into `out`, int32 [M, k]; M at most `most_rows`."""
    rows, columns = scores.shape
    choice = plain(scores.device)
    size = triton.next_power_of_2(k)
    lists, programs = (scores, out), max(1, triton.cdiv(columns, width))
    first, before = True, programs
    while True:
        last = programs == 1
        into = (out, out)
        if not last:
            both = torch.empty(2, rows, programs, k, dtype=torch.int32, device=scores.device)
            into = both[0], both[1]
        wide = width if first else min(width, size * triton.next_power_of_2(before))
        tournament_kernel[(programs, rows)](
            scores, lengths if starts is None else starts, lengths, *lists, *into, scores.stride(0), columns, before, k,
            FIRST=first, LAST=last, HAS_STARTS=starts is not None, WIDTH=wide, LIST=size,
            num_warps=max(4, wide // choice.tournament_scores), maxnreg=choice.tournament_registers,
        )  # fmt: skip
        if last:
            return
        lists, before, first = into, programs, False
        programs = triton.cdiv(programs, width // size)
