"""Long runs: what a run directory keeps, what an interrupt and a lack of memory cost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from diffcheck.checkpoint.layer import Checkpoint
from diffcheck.digests import tensor_digest
from diffcheck.exhausted import out_of_memory
from diffcheck.journal import RECORDS, Journal
from diffcheck.reporting.schema import load_schema

QUICK = ["--layers", "4", "--queries", "24", "--precision", "reference,fp8,fp4"]
QUICK += ["--theta", "checkpoint", "--device", "cpu"]
KERNELS = '''
"""The emulation's top-k, which says when it was called, and on a call of one's choice fails or waits for ever."""
import os, time
import torch
from diffcheck.refimpl.scoring import select_topk

class Mine:
    name, steps, calls = "mine", ("topk",), 0
    def unavailable(self, device): return None
    def version(self): return "1"
    def refusal(self, step, recipe, config): return None
    def topk(self, scores, visible, k):
        Mine.calls += 1
        with open("calls", "a") as file:
            file.write(".")
        what, _, at = os.environ.get("MINE", "nothing 0").partition(" ")
        if Mine.calls >= int(at):
            if what == "wait":
                time.sleep(100)
            if what == "allocate":
                torch.empty(1 << 60, dtype=torch.uint8)
            if what == "device":
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
            if what == "bytes":
                bytearray(1 << 62)
            if what == "raise":
                raise RuntimeError("an illegal memory access")
        return select_topk(scores, visible, k)
'''
CALLS = 3  # of the top-k in a case: in the chain, judged on the emulation's scores, and repeated


@pytest.fixture
def run(cli, mini, tmp_path, monkeypatch):
    """Runs a few cases with the kernels above; gives exit code, output, errors, and how many cases it measured."""
    (tmp_path / "mine.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)

    def call(*arguments, checkpoint=mini, what="nothing 0"):
        monkeypatch.setenv("MINE", what)
        (tmp_path / "calls").write_text("")
        out = cli("run", "--checkpoint", checkpoint, *QUICK, "--backend", "mine.py:Mine", *arguments)
        return *out, (tmp_path / "calls").stat().st_size / CALLS

    return call


def cases(path):
    """The cases of a report without their times."""
    return [{k: v for k, v in case.items() if k != "seconds"} for case in json.loads(path.read_text())["cases"]]


def test_finished_cases_are_not_run_again(run, tmp_path):
    status, _, _, measured = run("--run-dir", "kept", "--json", "a.json")
    assert (status, measured) == (0, 3)
    status, _, err, measured = run("--run-dir", "kept", "--json", "b.json", "--resume")
    assert (status, measured) == (0, 0)
    assert err == "3 of 3 cases are done, found in kept\n"
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    changing = ("seconds", "finished", "command", "stage_evaluations")
    assert {k: v for k, v in first.items() if k not in changing} == {
        k: v for k, v in second.items() if k not in changing
    }
    assert run("--json", "c.json")[0] == 0
    assert cases(tmp_path / "c.json") == cases(tmp_path / "a.json"), "a run directory changes no number"


def test_old_records_are_used_on_demand_only(run):
    assert run("--run-dir", "kept")[0] == 0
    status, _, err, measured = run("--run-dir", "kept")
    assert (status, measured) == (2, 0)
    assert "holds 4 records, expected --resume or an empty directory" in err


def test_more_cases_of_the_same_run(run, tmp_path):
    assert run("--run-dir", "kept", "--precision", "fp8")[3] == 1
    assert run("--run-dir", "kept", "--resume", "--json", "a.json")[3] == 2
    assert [case["precision"] for case in cases(tmp_path / "a.json")] == ["reference", "fp8", "fp4"]


def test_an_edited_recipe_is_measured_anew(run, tmp_path):
    recipe = tmp_path / "mine.toml"
    for value, measured in (("40000", 1), ("40000", 0), ("50000", 1)):
        recipe.write_text(f"[replace]\ntheta = {value}\n")
        found = run("--run-dir", "kept", "--resume", "--precision", "", "--recipe", recipe, "--json", "a.json")
        assert found[3] == measured
        assert cases(tmp_path / "a.json")[0]["replaced"]["k_theta"] == float(value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (["--queries", "25"], "query rows was 24 there and is 25"),
        (["--length", "1200"], "inputs was 'trace "),
        (["--backend", "emulated"], "backend was 'mine.py:Mine "),
    ],
)
def test_another_run_is_refused(run, change, what):
    run("--run-dir", "kept")
    status, _, err, measured = run("--run-dir", "kept", "--resume", *change)
    assert (status, measured) == (2, 0)
    assert what in err


def test_other_kernels_in_the_same_file_are_refused(run, tmp_path):
    run("--run-dir", "kept")
    (tmp_path / "mine.py").write_text(KERNELS + "\n# better now")
    status, _, err, _ = run("--run-dir", "kept", "--resume")
    assert status == 2
    assert "backend was 'mine.py:Mine " in err


@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "config.json", "trace.safetensors"])
def test_another_checkpoint_is_refused(run, mini, tmp_path, file):
    other = tmp_path / "other"
    shutil.copytree(mini, other)
    run("--run-dir", "kept", checkpoint=other)
    if file == "config.json":
        (other / file).write_text((other / file).read_text().replace("1e-06", "2e-06"))
    os.utime(other / file, (1, 1))
    status, _, err, _ = run("--run-dir", "kept", "--resume", checkpoint=other)
    assert status == 2
    assert ("inputs was" if file == "trace.safetensors" else "checkpoint was") in err


def test_two_runs_in_one_directory_are_refused(run):
    run("--run-dir", "kept")
    with open("kept/" + RECORDS) as file:
        before = json.loads(file.readline())["identity"]
    with Journal.open(Path("kept"), identity=before, resume=True):
        status, _, err, measured = run("--run-dir", "kept", "--resume")
    assert (status, measured) == (2, 0)
    assert "another run is using it" in err


# ------------------------------------------------------------------------------------------------------- interrupts


@pytest.fixture
def interrupted(mini, tmp_path):
    """Starts a run in a process of its own and interrupts it in the case of that number; (exit code, out, err)."""
    (tmp_path / "mine.py").write_text(KERNELS)

    def call(*arguments, case):
        calls = tmp_path / "calls"
        calls.write_text("")
        command = [sys.executable, "-m", "diffcheck", "run", "--checkpoint", mini, *QUICK, "--backend", "mine.py:Mine"]
        at = case * CALLS + 1
        process = subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"MINE": f"wait {at}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            until = time.monotonic() + 180
            while calls.stat().st_size < at and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
        return process.returncode, out, err

    return call


def test_an_interrupt_reports_what_is_finished(interrupted, run, tmp_path):
    status, out, err = interrupted("--json", "a.json", "--run-dir", "kept", "--gate", "jaccard>=0.1", case=2)
    assert status == 130
    assert "Traceback" not in err
    assert "interrupted: 2 of 3 cases are finished; the same command with --resume goes on from kept" in err
    assert "\nfp8: " in out
    assert "fp4" not in out
    report = json.loads((tmp_path / "a.json").read_text())
    Draft202012Validator(load_schema("run")).validate(report)
    assert report["partial"] is True
    assert report["headline"]["sentence"].startswith("Interrupted after 2 cases. ")
    assert [case["precision"] for case in report["cases"]] == ["reference", "fp8"]
    assert run("--json", "b.json", "--run-dir", "kept", "--resume")[3] == 1, "the third case only"
    assert run("--json", "c.json")[3] == 3
    assert cases(tmp_path / "b.json") == cases(tmp_path / "c.json")
    assert json.loads((tmp_path / "b.json").read_text())["partial"] is False


def test_an_interrupt_before_the_first_case(interrupted, tmp_path):
    forms = ["--html", "a.html", "--markdown", "a.md", "--metrics", "a.prom"]
    status, out, err = interrupted("--json", "a.json", *forms, case=0)
    assert status == 130
    assert "interrupted: 0 of 3 cases are finished" in err
    assert "vacuous" not in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["partial"], report["cases"]) == (True, [])
    assert all((tmp_path / name).is_file() for name in forms[1::2])


def test_a_second_interrupt_ends_at_once():
    code = (
        "import os, signal\nfrom diffcheck.commands.running import _interrupted_once\n"
        "try:\n    with _interrupted_once(): os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('first', flush=True)\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nfinally:\n    print('survived', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "first\n"
    assert done.returncode == -signal.SIGINT


def test_without_an_interrupt_the_handler_is_as_before():
    from diffcheck.commands.running import _interrupted_once

    before = signal.getsignal(signal.SIGINT)
    with _interrupted_once():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


# ----------------------------------------------------------------------------------------------------- out of memory


@pytest.mark.parametrize(("what", "said"), [("allocate", "can't allocate memory"), ("bytes", "out of memory")])
def test_a_case_without_memory_does_not_end_the_run(run, tmp_path, monkeypatch, what, said):
    """Fails in the second case and in its second try, then works again."""
    source = (tmp_path / "mine.py").read_text().replace("Mine.calls >= int(at)", f"{CALLS} < Mine.calls <= {CALLS + 2}")
    (tmp_path / "mine.py").write_text(source)
    forms = ["--junit", "junit.xml", "--html", "a.html", "--markdown", "a.md", "--metrics", "a.prom"]
    options = ["--json", "a.json", "--run-dir", "kept", *forms]
    status, out, _, _ = run(*options, what=f"{what} 0")
    (failure,) = ET.parse("junit.xml").getroot().iter("error")
    assert "fp8 theta checkpoint: out of memory" in failure.text
    assert "1 of 3 cases failed: out of memory" in json.loads((tmp_path / "a.json").read_text())["headline"]["sentence"]
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("FAILED: ")]
    assert line.startswith("FAILED: layer 4 fp8 theta checkpoint: out of memory")
    assert said in line
    Draft202012Validator(load_schema("run")).validate(json.loads((tmp_path / "a.json").read_text()))
    assert [case["verdict"] == "failed" for case in cases(tmp_path / "a.json")] == [False, True, False]
    status, _, _, measured = run(*options, "--resume")
    assert (status, measured) == (0, 1), "a failed case is tried again"


@pytest.mark.gpu
def test_a_case_without_device_memory_does_not_end_the_run(run, tmp_path):
    source = (tmp_path / "mine.py").read_text().replace("Mine.calls >= int(at)", f"{CALLS} < Mine.calls <= {CALLS + 2}")
    (tmp_path / "mine.py").write_text(source)
    status, out, _, _ = run("--json", "a.json", "--device", "cuda", what="device 0")
    assert status == 1
    assert "FAILED: layer 4 fp8 theta checkpoint: out of memory (CUDA out of memory" in out
    assert [case["verdict"] == "failed" for case in cases(tmp_path / "a.json")] == [False, True, False]


def test_a_case_that_fits_once_memory_is_free_is_measured(run, tmp_path):
    source = (tmp_path / "mine.py").read_text().replace("Mine.calls >= int(at)", f"Mine.calls == {CALLS + 1}")
    (tmp_path / "mine.py").write_text(source)
    assert run("--json", "a.json", what="allocate 0")[0] == 0
    first = cases(tmp_path / "a.json")
    assert run("--json", "b.json")[0] == 0
    assert first == cases(tmp_path / "b.json")


def test_gates_fail_on_a_failed_case(run):
    status, out, _, _ = run("--gate", "jaccard>=0.1", what=f"allocate {CALLS + 1}")
    assert status == 1
    assert "gate jaccard>=0.1: FAILED (3 cases, command line)" in out
    assert "layer 4 fp8 theta checkpoint: out of memory" in out


def test_a_reference_without_memory_fails_the_layers_cases(run, monkeypatch, tmp_path):
    monkeypatch.setattr("diffcheck.run.Targets.of", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    status, out, _, _ = run("--json", "a.json")
    assert status == 1
    assert {case["verdict"] for case in cases(tmp_path / "a.json")} == {"failed"}
    assert out.count("FAILED: ") == 3
    assert "the reference ran out of memory" in out


def test_other_errors_end_the_run_but_not_what_is_kept(run):
    with pytest.raises(RuntimeError, match="illegal"):
        run("--run-dir", "kept", what=f"raise {2 * CALLS + 1}")
    assert run("--run-dir", "kept", "--resume")[3] == 1


def test_other_errors_are_not_lack_of_memory():
    assert out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
    assert out_of_memory(ValueError("can't allocate memory")) is None
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried")) == (
        "out of memory (CUDA out of memory. Tried)"
    )
    assert out_of_memory(MemoryError()) == "out of memory"
    assert out_of_memory(RuntimeError("CUDA error: out of memory\nCompile with")) is not None


# ----------------------------------------------------------------------------------------------------------- digests


def test_digests_see_bits_types_and_shapes():
    zero = torch.zeros(4, 2)
    others = [-zero, zero.reshape(2, 4), zero.int(), zero.T.contiguous(), torch.zeros(4, 3)]
    assert tensor_digest(zero) == tensor_digest(zero.clone()) == tensor_digest(torch.zeros(2, 4).T)
    assert all(tensor_digest(zero) != tensor_digest(other) for other in others)
    assert tensor_digest(zero, None) != tensor_digest(None, zero) != tensor_digest(zero)
    assert tensor_digest(torch.ones(3, dtype=torch.float8_e4m3fn)) != tensor_digest(torch.ones(3, dtype=torch.uint8))


def test_fingerprint_is_of_the_files(mini, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(mini, other)
    first = Checkpoint(other).fingerprint()
    assert Checkpoint(other).fingerprint() == first
    os.utime(other / "model-00001-of-00002.safetensors", (1, 1))
    assert Checkpoint(other).fingerprint() != first
