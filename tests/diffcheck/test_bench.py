"""The benchmark's bookkeeping, and on a GPU that a wrong kernel gets no speed."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from diffcheck import bench
from diffcheck.bench.reading import read_pages
from diffcheck.errors import EnvironmentMissing, InputError
from diffcheck.kernels import PAGE_FORMATS


@pytest.mark.parametrize(
    "text", ["prefill", "prefill:3", "prefill:3x", "decode:0x4", "train:3x4", "decode:3x4x5", "queries:3x4", "keys:6"]
)
def test_bad_shapes(text):
    with pytest.raises(InputError, match="--shapes"):
        bench.Shape.parse(text)


def test_shapes_read_back_as_written():
    for text in bench.DEFAULT_SHAPES:
        assert str(bench.Shape.parse(text)) == text


def test_a_kind_alone_is_its_default_shapes():
    kinds = ["prefill", "decode", "select", "select-decode", "queries", "keys"]
    named = [str(shape) for kind in kinds for shape in bench.Shape.named_by(kind)]
    assert sorted(named) == sorted(bench.DEFAULT_SHAPES)
    assert [str(shape) for shape in bench.Shape.named_by("keys:12")] == ["keys:12"]
    with pytest.raises(InputError, match="--shapes: 'train', expected prefill:ROWS"):
        bench.Shape.named_by("train")


def test_visible_entries():
    assert bench.Shape.parse("decode:3x7").visible().tolist() == [7, 7, 7]
    assert bench.Shape.parse("prefill:4x10").visible().tolist() == [2, 5, 7, 10]


def test_no_gpu_is_said_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMissing, match="needs a CUDA device"):
        next(bench.bench(None, ["decode:1x64"], ["e4m3"]))
    with pytest.raises(InputError, match="--formats"):
        next(bench.bench(None, ["decode:1x64"], ["e9m9"]))


TOP = {"copy_tb_s": 4.0, "fp8_tflop_s": 1000.0}


def rendered(record):
    out = io.StringIO()
    bench.render(Console(file=out, width=200), record)
    return out.getvalue()


def test_a_wrong_result_prints_no_speed():
    line = rendered(
        {
            "shape": "decode:1x64",
            "format": "e4m3",
            "backend": "mine",
            "bytes_per_entry": 132,
            "measure": "calc_diff",
            "error": 0.5,
            "wrong": True,
        }
    )
    assert "WRONG" in line
    assert "TB/s" not in line
    assert "ms" not in line


def test_a_writer_is_held_against_a_copy_of_as_many_bytes(monkeypatch):
    problem = SimpleNamespace(
        shape="queries:8", fmt="e4m3", bytes_per_entry=132, measure="different", limit=1e-3, bytes=1e9, operations=0,
        error=lambda result: 0.0,
    )  # fmt: skip
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(bench, "milliseconds", lambda calls: (0.5, 0.0))
    record = bench.measure("triton", lambda p: lambda: None, [problem], TOP, like=0.4)
    assert record["of_like_copy"] == 0.8
    assert record["of_copy"] == 0.5
    assert "80% of the speed of a copy of as many bytes" in rendered(record)
    assert "of_like_copy" not in bench.measure("triton", lambda p: lambda: None, [problem], TOP)


@pytest.mark.parametrize("fmt", bench.FORMATS)
def test_pages_are_read_whole(fmt):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages = torch.randint(256, (5, PAGE_FORMATS[fmt].page_bytes), dtype=torch.uint8, device=device)
    table = torch.tensor([[3, 0], [4, 4]], dtype=torch.int32, device=device)
    want = pages.view(torch.int32).view(5, -1, 64).sum(1)[table.flatten().long()]
    assert torch.equal(read_pages(pages, table), want.to(torch.int32))  # wraps around as int32 does


BREAK = {
    "calc_diff": lambda scores: scores.roll(1, 1).nan_to_num(neginf=0),
    "missed": lambda places: places.roll(1, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", bench.FORMATS)
@pytest.mark.parametrize(
    "text", ["prefill:128x1000", "decode:3x200", "select:300x4000", "select-decode:3x2000", "queries:64", "keys:256"]
)
def test_right_and_wrong_kernels(fmt, text):
    shape = bench.Shape.parse(text)
    problem = bench.make(shape, fmt, seed=0)
    run = bench.runners(shape.kind)["triton"]
    good = bench.measure("triton", run, [problem], TOP)
    assert good["error"] < (1e-10 if problem.measure == "calc_diff" else problem.limit)
    assert good["ms"] > 0
    assert good["bytes_per_entry"] == problem.bytes_per_entry
    if problem.measure == "different":
        result = run(problem)()
        (result if shape.kind == "keys" else result[0].codes.view(torch.uint8)).fill_(1)
        assert not problem.error(result) < problem.limit
        return
    bad = bench.measure("broken", lambda p: lambda: BREAK[p.measure](run(p)()), [problem], TOP)
    assert bad["wrong"]
    assert "ms" not in bad
