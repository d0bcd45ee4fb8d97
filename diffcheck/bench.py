"""`diffcheck bench`: accuracy first, then speed, of every logits kernel on the same bytes.

One line a case. The error is taken against fp64 products of the dequantised codes on a sample of rows; a result whose
calc_diff is not below CALC_DIFF is wrong, and no speed is printed for it. Times are CUDA events around one call, the
L2 cache overwritten before each, inputs rotated where two sets fit; median of REPEATS after WARMUP. The two ceilings, a
device copy and an fp8 matrix product, are measured in the same run.

Shapes: `prefill:MxE` scores M query rows of one text, row i seeing (i + 1) * E // M entries; `decode:BxE` scores one
row of each of B requests over E entries of shuffled pages. H = 64 heads of D = 128.

    operations = 2 * H * D per visible (row, entry) pair
    bytes      = the keys each request reads once, and fp32 scores written once
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .errors import EnvironmentMissing, InputError

HEADS, DIM = 64, 128
CALC_DIFF = 5e-6
WARMUP, REPEATS = 3, 15
SAMPLED_ROWS = 16
FLUSH_BYTES = 256 << 20
DEFAULT_SHAPES = (
    "prefill:2048x8192", "prefill:4096x65536", "prefill:8192x32768",
    "decode:1x131072", "decode:32x16384", "decode:64x32768", "decode:256x8192",
)  # fmt: skip
FORMATS = ("e4m3", "bf16", "e2m1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A problem: `rows` query rows over `entries` keys (decode: of each row's own request)."""

    kind: str
    rows: int
    entries: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Parse prefill:MxE or decode:BxE; InputError otherwise."""
        kind, _, size = text.partition(":")
        parts = size.split("x")
        if kind not in ("prefill", "decode") or len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
            raise InputError(f"--shapes: {text!r}, expected prefill:ROWSxENTRIES or decode:REQUESTSxENTRIES")
        return Shape(kind=kind, rows=int(parts[0]), entries=int(parts[1]))

    def visible(self) -> Tensor:
        """Entries that each row sees, int32 [rows]."""
        if self.kind == "decode":
            return torch.full((self.rows,), self.entries, dtype=torch.int32)
        return ((torch.arange(self.rows) + 1) * self.entries // self.rows).to(torch.int32)

    def __str__(self) -> str:
        return f"{self.kind}:{self.rows}x{self.entries}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Random codes on the device; `run` of a backend gets it and returns fp32 scores [rows, entries]."""

    shape: Shape
    fmt: str
    query: Any
    keys: Tensor
    key_scales: Tensor | None
    pages: Tensor | None
    block_table: Tensor | None
    visible: Tensor

    @staticmethod
    def make(shape: Shape, fmt: str, seed: int) -> Problem:
        """Codes of Gaussian values, as quantised by the format; pages of all requests in shuffled order."""
        from . import kernels
        from .backends.emulated import encode
        from .presets import CHANGES

        generator = torch.Generator("cuda").manual_seed(seed)

        def gaussian(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", generator=generator)

        preset = {"e4m3": "sglang-fp8", "bf16": "sglang-bf16", "e2m1": "sglang-fp4"}[fmt]
        q_format, k_format = (CHANGES[preset][side] for side in ("q_format", "k_format"))
        q_codes, q_scales = encode(gaussian(shape.rows, HEADS, DIM), q_format)
        gate = gaussian(shape.rows, HEADS) * HEADS**-0.5
        if q_codes.dtype == torch.float8_e4m3fn and q_scales is not None:
            gate = gate * q_scales
        query = kernels.QuantisedQuery(codes=q_codes, scales=q_scales, gate=gate)
        total = shape.entries * (shape.rows if shape.kind == "decode" else 1)
        parts = [encode(gaussian(min(1 << 20, total - first), DIM), k_format) for first in range(0, total, 1 << 20)]
        codes = torch.cat([c.view(torch.uint8) if c.dtype != torch.bfloat16 else c for c, _ in parts])
        keys = codes.view(torch.float8_e4m3fn) if fmt == "e4m3" else codes
        scales = None if parts[0][1] is None else torch.cat([s for _, s in parts if s is not None])
        visible = shape.visible().cuda()
        pages = table = None
        if shape.kind == "decode":
            per_request = -(-shape.entries // kernels.ENTRIES_PER_PAGE)
            table = torch.randperm(shape.rows * per_request, device="cuda", generator=generator).to(torch.int32)
            table = table.view(shape.rows, per_request)
            entry = torch.arange(shape.entries, device="cuda")
            slots = table[:, entry // kernels.ENTRIES_PER_PAGE].long() * kernels.ENTRIES_PER_PAGE
            slots = (slots + entry % kernels.ENTRIES_PER_PAGE).flatten()
            pages = kernels.allocate_pages(fmt, table.numel(), "cuda")
            kernels.write_entries(pages, fmt, slots, keys, scales)
        return Problem(
            shape=shape, fmt=fmt, query=query, keys=keys, key_scales=scales, pages=pages, block_table=table,
            visible=visible,
        )  # fmt: skip

    @property
    def pairs(self) -> int:
        """Visible (row, entry) pairs."""
        return int(self.visible.sum())

    @property
    def bytes(self) -> int:
        """Keys read once by each request, and scores written once."""
        from . import kernels

        requests = self.shape.rows if self.shape.kind == "decode" else 1
        keys = requests * self.shape.entries * kernels.PAGE_FORMATS[self.fmt].bytes_per_entry
        return keys + 4 * self.pairs

    def calc_diff(self, scores: Tensor) -> float:
        """1 - 2<a,b>/(<a,a> + <b,b>) of the visible scores of some rows against fp64 products."""
        from . import kernels

        rows = torch.linspace(0, self.shape.rows - 1, min(SAMPLED_ROWS, self.shape.rows)).long().tolist()
        difference = total = 0.0
        for row in rows:
            first = row * self.shape.entries if self.shape.kind == "decode" else 0
            seen = slice(first, first + int(self.visible[row]))
            scales = None if self.key_scales is None else self.key_scales[seen]
            keys = kernels.dequantise(self.keys[seen], scales, self.fmt).double()
            q_scales = self.query.scales[row] if self.query.fmt == "e2m1" else None
            q = kernels.dequantise(self.query.codes[row], q_scales, self.query.fmt).double()
            want = (self.query.gate[row].double()[:, None] * (q @ keys.T).relu()).sum(0)
            got = scores[row, : seen.stop - seen.start].double()
            difference += float((got - want).square().sum())
            total += float(got.square().sum() + want.square().sum())
        return difference / total


def runners() -> dict[str, Callable[[Problem], Tensor]]:
    """Who can score a problem: name -> function; ValueError from a function means that it refuses."""
    from .backends.deep_gemm import DeepGemmKernels

    found: dict[str, Callable[[Problem], Tensor]] = {"triton": _run_triton, "triton-fast": _run_triton_fast}
    if not DeepGemmKernels().unavailable("cuda"):
        found["deep_gemm"] = _run_deep_gemm
    return found


def _run_triton(p: Problem) -> Tensor:
    from . import kernels

    if p.pages is None or p.block_table is None:
        return kernels.ragged_logits(p.query, p.keys, p.key_scales, torch.zeros_like(p.visible), p.visible, fmt=p.fmt)
    return kernels.paged_logits(
        p.query, p.pages, p.block_table, p.visible, fmt=p.fmt, max_length=p.shape.entries
    )  # fmt: skip


def _run_triton_fast(p: Problem) -> Tensor:
    """The prefill kernel with the tensor core's own accumulation, where there is one."""
    from . import kernels

    if p.pages is not None or p.fmt != "e4m3":
        raise ValueError("only the e4m3 prefill kernel has a fast variant")
    start = torch.zeros_like(p.visible)
    return kernels.ragged_logits(p.query, p.keys, p.key_scales, start, p.visible, fmt=p.fmt, exact=False)


def _run_deep_gemm(p: Problem) -> Tensor:
    """DeepGEMM's own functions without the adapter's masking, which would be timed with them."""
    from . import kernels
    from .backends.deep_gemm import as_tensor, load_package

    deep_gemm = load_package()

    if p.fmt != "e4m3":
        raise ValueError("DeepGEMM has logits for e4m3 keys only on this GPU")
    gate, visible = p.query.gate, p.visible
    if p.pages is None or p.block_table is None:
        start = torch.zeros_like(visible)
        result = deep_gemm.fp8_mqa_logits(p.query.codes, (p.keys, p.key_scales), gate, start, visible, False)
        return as_tensor(result)
    cache = p.pages.view(len(p.pages), kernels.ENTRIES_PER_PAGE, 1, -1)
    lengths = visible[:, None].contiguous()
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, kernels.ENTRIES_PER_PAGE, deep_gemm.get_num_sms())
    codes = p.query.codes[:, None]
    result = deep_gemm.fp8_paged_mqa_logits(codes, cache, gate, lengths, p.block_table, plan, p.shape.entries, False)
    return as_tensor(result)


def milliseconds(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """(median, spread) of one call in ms; `calls` are the same work on different inputs, used in turn."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times = []
    for turn in range(WARMUP + REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[turn % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        if turn >= WARMUP:
            times.append(begin.elapsed_time(end))
    quarter = statistics.quantiles(times, n=4)
    return statistics.median(times), quarter[2] - quarter[0]


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (bytes read plus written) and the fp8 matrix product in TFLOP/s, of this GPU now."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy, _ = milliseconds([lambda: target.copy_(source)])
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product, _ = milliseconds([lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)])
    return {"copy_tb_s": 2 * source.numel() / copy / 1e9, "fp8_tflop_s": 2 * size**3 / product / 1e9}


def bench(names: list[str] | None, shapes: list[str], formats: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the ceilings, then one record a case. Raises EnvironmentMissing without a CUDA device."""
    problems = [(Shape.parse(text), fmt) for text in shapes for fmt in formats]
    unknown = [fmt for fmt in formats if fmt not in FORMATS]
    if unknown:
        raise InputError(f"--formats: unknown {unknown[0]!r}, expected {', '.join(FORMATS)}")
    if not torch.cuda.is_available():
        raise EnvironmentMissing("bench needs a CUDA device, torch sees none here")
    available = runners()
    for name in names or []:
        if name not in available:
            raise EnvironmentMissing(f"--backend: {name} has no logits kernel here, expected one of {list(available)}")
    top = ceilings()
    yield {"device": torch.cuda.get_device_name(), **top}
    for shape, fmt in problems:
        sets = [Problem.make(shape, fmt, seed=0)]
        if sets[0].bytes < 2 << 30:
            sets.append(Problem.make(shape, fmt, seed=1))
        for name in names or available:
            yield _measure(name, available[name], sets, top)
        del sets
        torch.cuda.empty_cache()


def _measure(name: str, run: Callable[[Problem], Tensor], sets: list[Problem], top: dict[str, float]) -> dict[str, Any]:
    problem = sets[0]
    record: dict[str, Any] = {"shape": str(problem.shape), "format": problem.fmt, "backend": name}
    try:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        scores = run(problem)
    except ValueError as error:
        return record | {"refused": str(error)}
    record["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    record["calc_diff"] = problem.calc_diff(scores)
    del scores
    if not record["calc_diff"] < CALC_DIFF:
        return record | {"wrong": True}
    median, spread = milliseconds([lambda p=p: run(p) for p in sets])  # type: ignore[misc]
    tera = 2 * HEADS * DIM * problem.pairs / median / 1e9
    rate = problem.bytes / median / 1e9
    return record | {
        "ms": median,
        "spread_ms": spread,
        "tflop_s": tera,
        "tb_s": rate,
        "of_fp8": tera / top["fp8_tflop_s"],
        "of_copy": rate / top["copy_tb_s"],
    }


def render(console: Console, record: dict[str, Any]) -> None:
    """One aligned line."""
    if "copy_tb_s" in record:
        text = (
            f"{record['device']}: copy {record['copy_tb_s']:.2f} TB/s, fp8 matmul {record['fp8_tflop_s']:.0f} TFLOP/s"
        )
    else:
        text = f"{record['shape']:20s} {record['format']:5s} {record['backend']:10s} "
        if "refused" in record:
            text += f"refused: {record['refused']}"
        elif record.get("wrong"):
            text += f"WRONG: calc_diff {record['calc_diff']:.1e}, no speed for a wrong result"
        else:
            text += (
                f"calc_diff {record['calc_diff']:.1e} {record['ms']:9.3f} ms +-{record['spread_ms']:.3f} "
                f"{record['tflop_s']:7.0f} TFLOP/s ({record['of_fp8']:4.0%}) {record['tb_s']:6.2f} TB/s "
                f"({record['of_copy']:4.0%}) peak {record['peak_mib']:.0f} MiB"
            )
    console.print(text, highlight=False, soft_wrap=True)
