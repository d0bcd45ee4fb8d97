"""topk: the k best entries of every row, exact and deterministic.

Each fp32 score becomes a 32-bit key whose order is the wanted order (negative numbers have their other bits
flipped, -0.0 equals 0.0, NaN lies below -inf). Four passes over the row, one per byte of the key from the
top, count the bytes of the keys that still agree with the threshold found so far; after the last, the
threshold is the k-th largest key itself and the counts say how many of the keys equal to it are wanted. A
fifth pass writes the indices in ascending order: every key above the threshold, and the first so many equal
to it, their places found by prefix sums. So equal scores are settled by the lower index, nothing depends on
timing, and clustered scores cost no more than spread ones.

Letters: M rows, E columns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_devices, check_tensor

COLUMNS = 1024
"""Columns read at a time."""

_LOWEST = tl.constexpr(-0x8000_0000)


@triton.jit
def _load_keys(logits_ptr, column, stop):
    """int32 keys in the order of the scores, NaN lowest, and which of them exist."""
    valid = column < stop
    x = tl.load(logits_ptr + column, mask=valid, other=0.0)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x == x, key, _LOWEST), valid


@triton.jit
def topk_kernel(
    logits_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    row_stride,
    columns,
    k,
    HAS_STARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program selects from one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    out_ptr += row * k
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + row)
    stop = tl.minimum(start + tl.load(lengths_ptr + row), columns)
    start = tl.maximum(start, 0)
    count = tl.maximum(stop - start, 0)

    bins = tl.arange(0, 256)
    threshold = count * 0  # unsigned pattern: the key with its sign bit flipped
    wanted = tl.minimum(count, k)  # how many are still to be taken among keys that agree with the threshold
    if count > k:
        for shift in tl.static_range(24, -1, -8):
            histogram = tl.zeros((256,), tl.int32)
            for first in range(start, stop, COLUMNS):
                key, valid = _load_keys(logits_ptr, first + tl.arange(0, COLUMNS), stop)
                pattern = key ^ _LOWEST
                if shift < 24:
                    valid = valid & ((pattern >> (shift + 8)) == (threshold >> (shift + 8)))
                histogram += tl.histogram((pattern >> shift) & 255, 256, mask=valid)
            at_or_above = tl.cumsum(histogram, axis=0, reverse=True)
            digit = tl.sum((at_or_above >= wanted).to(tl.int32), axis=0) - 1
            wanted -= tl.sum(tl.where(bins > digit, histogram, 0), axis=0)
            threshold = threshold | (digit << shift)

    everything = count <= k
    limit = threshold ^ _LOWEST
    taken = count * 0
    equals_seen = count * 0
    for first in range(start, stop, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        key, valid = _load_keys(logits_ptr, column, stop)
        equal = (valid & (key == limit)).to(tl.int32)
        rank = equals_seen + tl.cumsum(equal, axis=0)  # from 1, among equals
        kept = valid & ((key > limit) | ((equal > 0) & (rank <= wanted)) | everything)
        place = taken + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(out_ptr + place, column, mask=kept)
        taken += tl.sum(kept.to(tl.int32), axis=0)
        equals_seen += tl.sum(equal, axis=0)
    for first in range(0, k, COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        tl.store(out_ptr + place, place * 0 - 1, mask=(place >= taken) & (place < k))


def topk(logits: Tensor, lengths: Tensor, k: int, starts: Tensor | None = None) -> Tensor:
    """Columns of the k best scores of each row, int32 [M, k], in ascending order; places beyond min(k,
    length) are -1.

    logits: fp32 [M, E], rows may be strided. lengths: int32 [M], visible columns of each row, counted from
    its start. starts: int32 [M], the first visible column of each row (default 0); returned columns count
    from column 0 of `logits`, so subtract `starts` to get a request's own entry numbers. Columns beyond E do
    not exist.

    Equal scores: the lower column wins. -0.0 equals 0.0; -inf is a score like any other; NaN ranks below
    -inf, and a visible NaN is taken before a place is left empty. Raises ValueError for other shapes or
    dtypes.
    """
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    if logits.dtype != torch.float32 or logits.ndim != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits is {logits.dtype} {list(logits.shape)}, expected torch.float32 [rows, entries]")
    rows, columns = logits.shape
    check_tensor("lengths", lengths, torch.int32, (rows,))
    if starts is not None:
        check_tensor("starts", starts, torch.int32, (rows,))
    check_devices(logits=logits, lengths=lengths, starts=starts)
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows:
        topk_kernel[(rows,)](
            logits,
            lengths if starts is None else starts,
            lengths,
            out,
            logits.stride(0),
            columns,
            k,
            HAS_STARTS=starts is not None,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
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
