"""Times of one call on the device, and the two ceilings they are measured against.

Before each timed call the L2 cache is overwritten and the device is kept busy for BUSY_CYCLES, so that the call is in
the queue before it can start: what is timed is the device, not Python. Inputs are rotated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

WARMUP, REPEATS = 3, 15
FLUSH_BYTES = 256 << 20
BUSY_CYCLES = 1_500_000
"""Cycles of the device, about 0.8 ms on an H200."""


def milliseconds(calls: Sequence[Callable[[], object]], repeats: int = REPEATS) -> tuple[float, float]:
    """(median, interquartile range) of one call in ms; `calls` are the same work on different inputs, in turn."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times = []
    for turn in range(WARMUP + repeats):
        flush.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[turn % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        if turn >= WARMUP:
            times.append(begin.elapsed_time(end))
    quarter = statistics.quantiles(times, n=4)
    return statistics.median(times), quarter[2] - quarter[0]


def copy_milliseconds(traffic: int) -> float:
    """ms of a device copy that reads and writes `traffic` bytes in all."""
    source = torch.empty(traffic // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return milliseconds([lambda: target.copy_(source)])[0]


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (bytes read plus written) and the fp8 matrix product in TFLOP/s, of this GPU now.

    empty_ms is what a kernel that does nothing takes by the same measure: no time below it can be reached.
    """
    copied = 2 << 30
    copy = copy_milliseconds(copied)
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product, _ = milliseconds([lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)])
    empty, _ = milliseconds([lambda: one.zero_()])
    return {
        "copy_tb_s": copied / copy / 1e9,
        "fp8_tflop_s": 2 * size**3 / product / 1e9,
        "empty_ms": empty,
    }
