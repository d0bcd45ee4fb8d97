"""fill_outside: -inf in the columns that a row may not see, after a kernel that writes whole tiles."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Columns of one program."""

_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def fill_outside_kernel(
    out_ptr, start_ptr, end_ptr, out_stride, columns, HAS_START: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program fills one stretch of one row."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * COLUMNS
    start = 0
    if HAS_START:
        start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    if (first < start) | (tl.minimum(first + COLUMNS, columns) > end):
        column = first + tl.arange(0, COLUMNS)
        outside = (column < start) | (column >= end)
        minus_inf = tl.full((COLUMNS,), _MINUS_INF, tl.float32)
        tl.store(out_ptr + row * out_stride + column, minus_inf, mask=outside & (column < columns))


def fill_outside(out: Tensor, start: Tensor | None, end: Tensor) -> None:
    """Set columns outside [start, end) of each row to -inf, in place.

    out: fp32 [R, N], rows may be strided; start, end: int32 [R], start=None is 0.
    """
    rows, columns = out.shape
    for first in range(0, rows, 65535):  # the most that a grid's second side takes
        part = slice(first, first + 65535)
        grid = (triton.cdiv(columns, COLUMNS), min(65535, rows - first))
        fill_outside_kernel[grid](
            out[part], end[part] if start is None else start[part], end[part], out.stride(0), columns,
            HAS_START=start is not None, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
