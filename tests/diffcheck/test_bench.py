"""The benchmark's bookkeeping, and on a GPU that a wrong kernel gets no speed."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
import triton
from jsonschema import Draft202012Validator
from rich.console import Console

from diffcheck import bench
from diffcheck.bench import logits
from diffcheck.bench.reading import read_pages
from diffcheck.errors import EnvironmentMissing, InputError
from diffcheck.kernels import PAGE_FORMATS, QuantisedQuery
from diffcheck.reporting.schema import load_schema


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


def test_a_writer_is_held_against_a_copy_of_as_many_bytes(gpu):
    problem = SimpleNamespace(
        shape="queries:8", fmt="e4m3", bytes_per_entry=132, measure="different", limit=1e-3, bytes=1e9, operations=0,
        error=lambda result: 0.0,
    )  # fmt: skip
    record = bench.measure("triton", lambda p: lambda: None, [problem], TOP, like=0.4)
    assert record["of_like_copy"] == 0.8
    assert record["of_copy"] == 0.5
    assert "80% of the speed of a copy of as many bytes" in rendered(record)
    assert "of_like_copy" not in bench.measure("triton", lambda p: lambda: None, [problem], TOP)


def of_six_rows(kind, entries):
    """bf16 codes on the CPU."""
    draw = torch.Generator().manual_seed(0)
    shape = bench.Shape.parse(f"{kind}:6x{entries}")
    keys = torch.randn(entries, 128, generator=draw).bfloat16()
    query = QuantisedQuery(
        codes=torch.randn(6, 64, 128, generator=draw).bfloat16(), scales=None, gate=torch.rand(6, 64, generator=draw)
    )
    return logits.Problem(
        shape=shape, fmt="bf16", query=query, keys=keys, key_scales=None, pages=None, block_table=None,
        visible=shape.visible(),
    )  # fmt: skip


def exact(problem):
    products = torch.einsum("rhd,ed->rhe", problem.query.codes.double(), problem.keys.double())
    return (problem.query.gate.double()[:, :, None] * products.relu()).sum(1)


def test_error_of_scores():
    """By hand: half of one row is off by a factor of two; what a row does not see is of no account."""
    problem = of_six_rows("prefill", 12)
    right = exact(problem)
    scores = right.float().masked_fill(torch.arange(12) >= problem.visible[:, None], torch.nan)
    assert problem.error(scores) < 1e-12
    scores[3, :4] *= 2
    seen = torch.where(torch.arange(12) < problem.visible[:, None], right, 0)
    total = 2 * seen.square().sum() + 3 * seen[3, :4].square().sum()
    assert problem.error(scores) == pytest.approx(float(seen[3, :4].square().sum() / total), rel=1e-5)


@pytest.mark.parametrize("entries", [3, 1200])
def test_error_of_selections(entries):
    """Rows may see nothing (as most do of 4096 rows over few entries), all, or more than k."""
    problem = of_six_rows("select", entries)
    hidden = torch.arange(entries) >= problem.visible[:, None]
    found = exact(problem).masked_fill(hidden, -torch.inf).topk(min(512, entries))
    places = torch.full((6, 512), -1)
    places[:, : found.indices.shape[1]] = torch.where(found.values > -torch.inf, found.indices, -1)
    assert problem.error(places) == 0
    few = places.clone()
    few[5, 0] = -1
    assert problem.error(few) == 1, "an entry is missing"
    twice = places.clone()
    twice[5, 0] = twice[5, 1]
    assert problem.error(twice) == 1, "an entry is there twice"
    beyond = places.clone()
    beyond[5, 0] = entries
    assert problem.error(beyond) == 1, "an entry that no row sees"
    if entries > 512:
        other = places.clone()
        other[5, 0] = next(place for place in range(entries) if place not in set(places[5].tolist()))
        assert problem.error(other) == pytest.approx(1 / problem.visible.clamp(max=512).sum().item())


def raising(error):
    def call():
        raise error

    return call


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU, on which nothing is launched and every call takes half a millisecond; returns the kernels that
    there are on it, to be filled in.
    """
    kernels = {}
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    monkeypatch.setattr(bench, "answers", lambda: True)
    monkeypatch.setattr(bench, "packages", lambda: {"kernels": {"mine": "1.0"}, "missing": {"theirs": "not installed"}})
    monkeypatch.setattr(bench, "ceilings", lambda: TOP | {"empty_ms": 0.003})
    monkeypatch.setattr(bench, "milliseconds", lambda calls: (0.5, 0.01))
    monkeypatch.setattr(bench, "copy_milliseconds", lambda traffic: 0.4)
    monkeypatch.setattr(bench, "runners", lambda kind: {name: lambda p, c=call: c for name, call in kernels.items()})
    monkeypatch.setattr(logits.Problem, "error", lambda problem, result: result)

    def make(shape, fmt, seed):
        if fmt == "e2m1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nMore about it")
        pages = torch.zeros(1, dtype=torch.uint8) if shape.paged else None
        return logits.Problem(
            shape=shape, fmt=fmt, query=None, keys=torch.zeros(64, 1), key_scales=None, pages=pages, block_table=pages,
            visible=shape.visible(),
        )  # fmt: skip

    monkeypatch.setattr(bench, "make", make)
    return kernels


def kept(file):
    document = json.loads(file.read_text())
    assert not list(Draft202012Validator(load_schema("bench")).iter_errors(document))
    return document


def refuse(problem):
    raise ValueError("too many heads")


def test_every_kind_of_record(gpu, cli, monkeypatch, tmp_path):
    """A wrong or failed kernel ends with 1, and neither it nor inputs too large for the device end the others."""
    gpu |= {
        "right": lambda: 1e-9,
        "wrong": lambda: 0.5,
        "nan": lambda: float("nan"),
        "raises": raising(RuntimeError("no kernel image\nCompile with more")),
    }
    made = bench.runners
    monkeypatch.setattr(bench, "runners", lambda kind: made(kind) | {"refuses": refuse})
    out = tmp_path / "bench.json"
    shapes = "decode:2x64,prefill:2x64"
    status, text, err = cli("bench", "--shapes", shapes, "--formats", "e2m1,e4m3", "--json", out)
    assert (status, err) == (1, "")
    lines = text.splitlines()
    assert lines[0].startswith("a made-up GPU: copy 4.00 TB/s")
    assert lines[1:3] == ["kernels: mine 1.0", "not here: theirs: not installed"]
    assert "FAILED to make its inputs: out of memory (CUDA out of memory. Tried to allocate 80 GiB)" in lines[3]
    assert "its pages alone are read in 0.5000 ms" in lines[4]
    assert [line.split()[4] for line in lines[5:10]] == ["right", "wrong", "nan", "raises", "refuses"]
    assert "0.5000 ms +-0.0100" in lines[5]
    for line, said in zip(
        lines[6:10],
        ["WRONG: calc_diff 5.0e-01", "WRONG: calc_diff nan", "FAILED: RuntimeError: no kernel image", "refused: too"],
        strict=True,
    ):
        assert said in line
        assert "TB/s" not in line
    assert len(lines) == 16, "the same without the pages, for prefill"
    document = kept(out)
    assert document["partial"] is False
    assert document["environment"]["device"] == "a made-up GPU"
    assert document["environment"]["cuda"] == torch.version.cuda
    assert len(document["records"]) == 14
    assert document["records"][5]["error"] is None, "NaN, which JSON has not"


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        (raising(ValueError("not this one")), 0, "refused: not this one"),
        (raising(TypeError("five arguments")), 1, "FAILED: TypeError: five arguments"),
        (lambda: 0.5, 1, "WRONG: calc_diff 5.0e-01, no speed for a wrong result"),
    ],
)
def test_exit_code(gpu, cli, call, status, said):
    gpu |= {"right": lambda: 1e-9, "other": call}
    found, text, _ = cli("bench", "--shapes", "prefill:2x64")
    assert found == status
    assert said in text


def test_an_interrupt_loses_nothing(gpu, cli, tmp_path):
    gpu |= {"right": lambda: 1e-9, "long": raising(KeyboardInterrupt)}
    out = tmp_path / "bench.json"
    status, _, err = cli("bench", "--shapes", "prefill:2x64", "--json", out)
    assert (status, err) == (130, "diffcheck: interrupted\n")
    document = kept(out)
    assert document["partial"] is True
    assert [record.get("backend") for record in document["records"]] == [None, "right"]


def test_a_lost_gpu_is_blamed_on_nobody_else(gpu, cli, monkeypatch, tmp_path):
    """After an illegal access every call of the process fails, the next kernels' too."""
    gpu |= {"right": lambda: 1e-9, "breaks": raising(RuntimeError("CUDA error: an illegal memory access"))}
    gpu["innocent"] = gpu["breaks"]
    monkeypatch.setattr(bench, "answers", lambda: False)
    out = tmp_path / "bench.json"
    status, text, err = cli("bench", "--shapes", "prefill:2x64", "--json", out)
    assert status == 3
    assert err == "diffcheck: the GPU takes no more work after that failure; the rest was not timed\n"
    assert "FAILED: RuntimeError: CUDA error: an illegal memory access" in text
    document = kept(out)
    assert document["partial"] is True
    assert [record.get("backend") for record in document["records"]] == [None, "right", "breaks"]


def test_whether_a_gpu_answers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    assert bench.answers()
    monkeypatch.setattr(torch.cuda, "synchronize", raising(RuntimeError("CUDA error: an illegal memory access")))
    assert not bench.answers()


def test_what_cannot_be_timed_is_named():
    found = bench.packages()
    assert set(found["kernels"]) | set(found["missing"]) == {"triton", "deep_gemm", "sglang-topk-v1"}
    assert found["kernels"]["triton"].endswith(f"(triton {triton.__version__})")
    if not torch.cuda.is_available():
        assert "deep_gemm" in found["missing"]


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
