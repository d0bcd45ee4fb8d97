"""Backends from entry points and files, the documented example, and what happens to broken ones."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from diffcheck.backends import all_backends, find_backend
from diffcheck.backends import registry as module
from diffcheck.cli import main
from diffcheck.refimpl import InputError

DOC = (Path(__file__).parents[3] / "docs" / "adding_a_backend.md").read_text()


@pytest.fixture
def example(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL)
    path = tmp_path / "my_kernels.py"
    path.write_text(code)
    assert len(code.splitlines()) <= 40
    return path


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["diffcheck", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0, *capsys.readouterr()


def test_documented_example_runs(monkeypatch, capsys, mini, example):
    command = ["run", "--checkpoint", mini, "--layers", "4", "--precision", "fp8", "--theta", "checkpoint"]
    gate = ["--queries", "16", "--device", "cpu", "--gate", "jaccard_kernel>=0.999"]
    status, out, err = run(monkeypatch, capsys, *command, "--backend", f"{example}:MyTopK", *gate)
    assert status == 0, err
    assert "topk by my-topk: right" in out
    assert "keys by emulated: 100.0000%" in out


def test_broken_example_is_a_kernel_fault(monkeypatch, capsys, mini, example):
    example.write_text(example.read_text().replace("scores.masked_fill", "(-scores).masked_fill"))
    command = ["run", "--checkpoint", mini, "--layers", "4", "--precision", "fp8", "--theta", "checkpoint"]
    status, out, _ = run(
        monkeypatch, capsys, *command, "--queries", "16", "--device", "cpu", "--backend", f"{example}:MyTopK"
    )
    assert status == 0
    assert "topk by my-topk: top-k drops winners" in out
    assert "KERNEL" in out


NAN_LOGITS = """
from diffcheck.backends import EmulatedKernels

class Bad(EmulatedKernels):
    name = "bad"
    steps = ("logits",)

    def paged_logits(self, query, cache, visible):
        return super().paged_logits(query, cache, visible) * float("nan")
"""


def test_a_backend_of_nan_is_reported_and_written(monkeypatch, capsys, mini, tmp_path):
    path, report = tmp_path / "bad.py", tmp_path / "report.json"
    path.write_text(NAN_LOGITS)
    command = ["run", "--checkpoint", mini, "--layers", "4", "--precision", "fp8", "--theta", "checkpoint"]
    gate = ["--gate", "kernel_error<1", "--json", report, "--device", "cpu", "--queries", "8"]
    status, out, err = run(monkeypatch, capsys, *command, "--backend", f"{path}:Bad", *gate)
    assert status == 1, err
    assert "kernel_error is NaN or inf" in out
    assert "logits by bad: calc_diff nan" in out
    (case,) = json.loads(report.read_text())["cases"]
    assert case["verdict"] == "kernel"
    assert {"score_rel_error", "kernel_error"} <= set(case["nonfinite"])


def test_entry_point(monkeypatch, example):
    monkeypatch.syspath_prepend(str(example.parent))
    point = EntryPoint(name="my-topk", value="my_kernels:MyTopK", group=module.GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [point] if group == module.GROUP else [])
    assert "my-topk" in all_backends()[0]
    assert find_backend("my-topk").refusal.__self__.name == "my-topk"
    monkeypatch.delitem(sys.modules, "my_kernels")


def test_a_broken_offer_disturbs_only_itself(monkeypatch, capsys):
    point = EntryPoint(name="broken", value="no_such_module_here:X", group=module.GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [point])
    assert find_backend("emulated").name == "emulated"
    with pytest.raises(InputError, match=r"backend broken \(no_such_module_here:X\) cannot be loaded: No module"):
        find_backend("broken")
    status, out, _ = run(monkeypatch, capsys, "backends", "--device", "cpu")
    assert status == 0
    assert "broken: not available: backend broken" in out
    assert "emulated: available" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X = 1 +", "cannot be loaded: SyntaxError"),
        ("Y = 1", "has no 'X'"),
        ("X = object", "lacks name, unavailable, version, refusal"),
        ("class X:\n name = 'x'; steps = ('sort',)\n unavailable = version = refusal = None", "lacks run or steps"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as error:
        find_backend(f"{path}:X")
    assert "\n" not in str(error.value)


def test_unknown_and_absent(tmp_path):
    with pytest.raises(InputError, match="unknown backend 'cuda', expected auto, emulated, triton"):
        find_backend("cuda")
    with pytest.raises(InputError, match="no such file"):
        find_backend(f"{tmp_path}/none.py:X")


def test_listing(monkeypatch, capsys):
    status, out, _ = run(monkeypatch, capsys, "backends", "--device", "cpu")
    assert status == 0
    for name, backend in all_backends()[0].items():
        assert f"{name}: " in out
        assert " ".join(backend.stages) in out
    assert "sglang-fp8" in out
