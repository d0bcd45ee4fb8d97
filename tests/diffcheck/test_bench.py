"""The benchmark's bookkeeping, and on a GPU that a wrong kernel gets no speed."""

import io

import pytest
import torch
from rich.console import Console

from diffcheck import bench
from diffcheck.errors import EnvironmentMissing, InputError


@pytest.mark.parametrize("text", ["prefill", "prefill:3", "prefill:3x", "decode:0x4", "train:3x4", "decode:3x4x5"])
def test_bad_shapes(text):
    with pytest.raises(InputError, match="--shapes"):
        bench.Shape.parse(text)


def test_visible_entries():
    assert bench.Shape.parse("decode:3x7").visible().tolist() == [7, 7, 7]
    assert bench.Shape.parse("prefill:4x10").visible().tolist() == [2, 5, 7, 10]


def test_no_gpu_is_said_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMissing, match="needs a CUDA device"):
        next(bench.bench(None, ["decode:1x64"], ["e4m3"]))
    with pytest.raises(InputError, match="--formats"):
        next(bench.bench(None, ["decode:1x64"], ["e9m9"]))


def rendered(record):
    out = io.StringIO()
    bench.render(Console(file=out, width=200), record)
    return out.getvalue()


def test_a_wrong_result_prints_no_speed():
    line = rendered({"shape": "decode:1x64", "format": "e4m3", "backend": "mine", "calc_diff": 0.5, "wrong": True})
    assert "WRONG" in line
    assert "TB/s" not in line
    assert "ms" not in line


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", bench.FORMATS)
@pytest.mark.parametrize("shape", ["prefill:128x1000", "decode:3x200"])
def test_right_and_wrong_kernels(fmt, shape, monkeypatch):
    problem = bench.Problem.make(bench.Shape.parse(shape), fmt, seed=0)
    top = {"copy_tb_s": 4.0, "fp8_tflop_s": 1000.0}
    good = bench._measure("triton", bench._run_triton, [problem], top)
    assert good["calc_diff"] < 1e-10
    assert good["ms"] > 0
    bad = bench._measure("broken", lambda p: bench._run_triton(p).roll(1, 1).nan_to_num(neginf=0), [problem], top)
    assert bad["wrong"]
    assert "ms" not in bad
