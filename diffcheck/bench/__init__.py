"""`diffcheck bench`: accuracy first, then speed, of every kernel on the same bytes.

One line a case. The error is taken against fp64 or the emulation on a sample; a result whose error is not below its
limit is wrong, and no speed is printed for it. A kernel that raises, or a problem that does not fit the device, is a
failed case and not the end.
Kernels that only move and convert are also held against a device copy that reads and writes as many bytes: a small
problem pays for its launch whoever solves it. `shapes` says what is timed, `timing` how, `logits` and `writers` what
the problems are and who can solve them. The ceilings (a device copy, an fp8 matrix product) are of the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console

from ..backends.deep_gemm import DeepGemmKernels
from ..backends.sglang import SglangKernels
from ..backends.triton import TritonKernels
from ..errors import EnvironmentMissing, InputError
from ..exhausted import out_of_memory, release
from . import logits, writers
from .reading import read_pages
from .shapes import DEFAULT_SHAPES, TOKENS, Shape
from .timing import ceilings, copy_milliseconds, milliseconds

__all__ = ["DEFAULT_SHAPES", "FORMATS", "Shape", "bench", "measure", "passed", "render"]

FORMATS = ("e4m3", "bf16", "e2m1")
TWO_SETS_BELOW = 2 << 30
"""Bytes of a problem up to which two sets of inputs are rotated."""

Problem = logits.Problem | writers.Queries | writers.Keys
Runner = Callable[[Any], Callable[[], Any]]


def bench(names: list[str] | None, shapes: list[str], formats: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the ceilings, then one record a case.

    Raises EnvironmentMissing without a CUDA device, and when a kernel has left it unusable.
    """
    parsed = [shape for text in shapes for shape in Shape.named_by(text)]
    unknown = [fmt for fmt in formats if fmt not in FORMATS]
    if unknown:
        raise InputError(f"--formats: unknown {unknown[0]!r}, expected {', '.join(FORMATS)}")
    if not torch.cuda.is_available():
        raise EnvironmentMissing("bench needs a CUDA device, torch sees none here")
    available = {shape.kind: runners(shape.kind) for shape in parsed}
    known = {name for some in available.values() for name in some}
    for name in names or []:
        if name not in known:
            raise EnvironmentMissing(f"--backend: {name} has no such kernel here, expected one of {sorted(known)}")
    top = ceilings()
    yield {"device": torch.cuda.get_device_name(), **top, **packages()}
    for shape in parsed:
        chosen = {name: run for name, run in available[shape.kind].items() if names is None or name in names}
        for fmt in formats:
            for record in cases(shape, fmt, chosen, top):
                yield record
                if "failed" in record and not answers():
                    raise EnvironmentMissing("the GPU takes no more work after that failure; the rest was not timed")
            release()


def packages() -> dict[str, dict[str, str]]:
    """`kernels`: whose kernels can be timed here, with their versions. `missing`: whose cannot, and why."""
    kernels, missing = dict[str, str](), dict[str, str]()
    for each in (TritonKernels(), DeepGemmKernels(), SglangKernels("v1")):
        reason = each.unavailable("cuda")
        if reason is None:
            kernels[each.name] = each.version() or "unknown"
        else:
            missing[each.name] = reason
    return {"kernels": kernels, "missing": missing}


def cases(shape: Shape, fmt: str, chosen: dict[str, Runner], top: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The records of one shape and format."""
    try:
        sets = [make(shape, fmt, seed=0)]
        if sets[0].bytes < TWO_SETS_BELOW:
            sets.append(make(shape, fmt, seed=1))
    except RuntimeError as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        yield {"shape": str(shape), "format": fmt, "failed": reason}
        return
    if isinstance(sets[0], logits.Problem) and sets[0].pages is not None:
        yield read(sets)
    like = copy_milliseconds(sets[0].bytes) if shape.kind in TOKENS else None
    for name, run in chosen.items():
        yield measure(name, run, sets, top, like)


def answers() -> bool:
    """Whether the GPU still takes work of this process: after an access to memory that is none it does not."""
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def said(error: Exception) -> str:
    """An exception on one line; of what CUDA and compilers say the first line."""
    return out_of_memory(error) or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def passed(record: dict[str, Any]) -> bool:
    """Whether a record is none of a wrong or failed kernel."""
    return not record.get("wrong") and "failed" not in record


def make(shape: Shape, fmt: str, seed: int) -> Problem:
    """Random inputs on the device."""
    if shape.kind in TOKENS:
        return (writers.Queries if shape.kind == "queries" else writers.Keys).make(shape, fmt, seed)
    return logits.Problem.make(shape, fmt, seed)


def runners(kind: str) -> dict[str, Runner]:
    """Who can solve a kind of problem here: name -> function that prepares a call; it raises ValueError to refuse."""
    return writers.runners(kind) if kind in TOKENS else logits.runners(kind)


def read(sets: list[Any]) -> dict[str, Any]:
    """The record of reading a decode problem's pages and doing nothing with them."""
    calls = [partial(read_pages, each.pages, each.block_table) for each in sets]
    median, spread = milliseconds(calls)
    return {"shape": str(sets[0].shape), "format": sets[0].fmt, "read_ms": median, "spread_ms": spread}


def measure(
    name: str, prepare: Runner, sets: list[Any], top: dict[str, float], like: float | None = None
) -> dict[str, Any]:
    """The record of one case: error, then times if it is right. like: ms of a device copy of as many bytes."""
    problem = sets[0]
    record: dict[str, Any] = {
        "shape": str(problem.shape),
        "format": problem.fmt,
        "backend": name,
        "bytes_per_entry": problem.bytes_per_entry,
        "measure": problem.measure,
    }
    try:
        calls = [prepare(each) for each in sets]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = calls[0]()
        torch.cuda.synchronize()
    except ValueError as error:
        return record | {"refused": str(error)}
    except Exception as error:  # whatever others' kernels raise: out of memory, no compiler, no such architecture
        return record | {"failed": said(error)}
    record["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    record["error"] = problem.error(result)
    del result
    if not record["error"] < problem.limit:
        return record | {"wrong": True}
    median, spread = milliseconds(calls)
    rate = problem.bytes / median / 1e9
    record |= {"ms": median, "spread_ms": spread, "tb_s": rate, "of_copy": rate / top["copy_tb_s"]}
    if like is not None:
        record["of_like_copy"] = like / median
    if problem.operations:
        tera = problem.operations / median / 1e9
        record |= {"tflop_s": tera, "of_fp8": tera / top["fp8_tflop_s"]}
    return record


def render(console: Console, record: dict[str, Any]) -> None:
    """One aligned line."""
    if "copy_tb_s" in record:
        text = (
            f"{record['device']}: copy {record['copy_tb_s']:.2f} TB/s, fp8 matmul {record['fp8_tflop_s']:.0f} TFLOP/s, "
            f"empty kernel {record['empty_ms']:.4f} ms\n"
            f"kernels: {', '.join(f'{name} {version}' for name, version in record['kernels'].items())}"
        )
        text += "".join(f"\nnot here: {name}: {reason}" for name, reason in record["missing"].items())
    elif "read_ms" in record:
        text = (
            f"{record['shape']:20s} {record['format']:4s}       its pages alone are read in {record['read_ms']:.4f} ms"
        )
    elif "backend" not in record:
        text = f"{record['shape']:20s} {record['format']:4s}       FAILED to make its inputs: {record['failed']}"
    else:
        text = f"{record['shape']:20s} {record['format']:4s} {record['bytes_per_entry']:3d} B {record['backend']:26s} "
        if "failed" in record:
            text += f"FAILED: {record['failed']}"
        elif "refused" in record:
            text += f"refused: {record['refused']}"
        elif record.get("wrong"):
            text += f"WRONG: {record['measure']} {record['error']:.1e}, no speed for a wrong result"
        else:
            text += (
                f"{record['measure']:9s} {record['error']:7.1e} {record['ms']:9.4f} ms +-{record['spread_ms']:.4f} "
                f"{record['tb_s']:6.2f} TB/s ({record['of_copy']:4.0%}) "
            )
            if "of_like_copy" in record:
                text += f"{record['of_like_copy']:4.0%} of the speed of a copy of as many bytes, "
            if "tflop_s" in record:
                text += f"{record['tflop_s']:6.0f} TFLOP/s ({record['of_fp8']:4.0%}) "
            text += f"peak {record['peak_mib']:.0f} MiB"
    console.print(text, highlight=False, soft_wrap=True)
