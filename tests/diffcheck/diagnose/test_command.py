"""`diffcheck diagnose` as a user meets it: the README's words, exit codes, JSON, and one line for bad input."""

import json
import re
from pathlib import Path

import pytest
import torch

from diffcheck import Recipe
from diffcheck.refimpl import Trace

ROOT = Path(__file__).parents[3]
FIELDS = {
    "layer", "stage", "cause", "field", "value", "explained", "runner_up", "runner_up_explained", "rows",
    "undecidable_with",
}  # fmt: skip


@pytest.fixture(scope="module")
def setup(pipeline_faults):
    return pipeline_faults.trained(440, 1)


@pytest.fixture(scope="module")
def mini(setup):
    """The checkpoint as the harness has it, which selects 16 entries."""
    return setup.checkpoint


@pytest.fixture
def write(setup, pipeline_faults, tmp_path):
    def write(changes, evidence="ends", **more):
        path = tmp_path / "trace.safetensors"
        trace = setup.pipeline(setup.queries(32)).trace(Recipe.reference(setup.config).replace(**changes))
        kept = (*pipeline_faults.EVIDENCE[evidence], "x", "qr", "queries")
        tensors = {n: t.clone() for n, t in trace.items() if n in kept} | more
        Trace({n: t for n, t in tensors.items() if t is not None}, layer=4).save(path)
        return path

    return write


def test_findings_are_written_and_decide_the_exit_code(cli, mini, write, tmp_path):
    path, out_file = write({"theta": 40000.0}), tmp_path / "out.json"
    status, out, err = cli("--checkpoint", mini, "--trace", path, "--recipe", "reference", "--json", out_file)
    assert (status, err) == (1, "")
    (finding,) = json.loads(out_file.read_text())["findings"]
    assert set(finding) >= FIELDS
    assert (finding["layer"], finding["stage"], finding["cause"], finding["value"]) == (4, "q_rope", "theta", 40000.0)
    assert finding["explained_ci"][0] > 0.99
    assert finding["sentence"] in out
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^layer 4: first wrong stage .*$", readme, flags=re.MULTILINE) == [finding["sentence"]]


def test_no_fault_is_exit_0(cli, mini, write, tmp_path):
    out_file = tmp_path / "out.json"
    status, out, _ = cli("--checkpoint", mini, "--trace", write({}), "--layer", 4, "--json", out_file)
    assert status == 0
    assert json.loads(out_file.read_text())["findings"] == []
    assert "layer 4: no fault found" in out


def test_the_recipe_may_be_in_the_trace(cli, mini, setup, tmp_path):
    """As a name or as all fields; a file that says what it runs is compared with that."""
    recipe = Recipe.preset("vllm-fp8", setup.config)
    trace = setup.pipeline(setup.queries(16)).trace(recipe.replace(q_fp4=True))
    path = tmp_path / "trace.safetensors"
    for text in ("vllm-fp8", json.dumps(recipe.to_json())):
        Trace({n: t.clone() for n, t in trace.items()}, layer=4, metadata={"recipe": text}).save(path)
        status, out, _ = cli("--checkpoint", mini, "--trace", path)
        assert status == 1
        assert "recipe     vllm-fp8" in out
        assert "fp4_q" in out


def bad(result, *parts):
    status, _, err = result
    assert status == 2, err
    assert len(err.strip().splitlines()) == 1, err
    for part in parts:
        assert part in err


def test_bad_input_is_one_line(cli, mini, setup, write, tmp_path):
    nan = setup.x.clone()
    nan[5, 3] = torch.nan
    run = ("--checkpoint", mini, "--trace")
    bad(cli(*run, tmp_path / "none"), "no such file")
    bad(cli(*run, write({}), "--layer", 2), "layers.2.x", "[4]")
    bad(cli(*run, write({}), "--recipe", "fp9"), "fp9", "vllm-fp8")
    bad(cli(*run, write({}), "--recipe", "none.toml"), "none.toml", "no such file")
    bad(cli(*run, write({}, x=nan)), "layers.4.x", "row 5")
    bad(cli(*run, write({}, x=setup.x[:, :100])), "layers.4.x", "[T, 256]")
    bad(cli(*run, write({}, qr=None)), "layers.4.qr")
    bad(cli(*run, write({}, k_quant=torch.zeros(7, 128))), "k_quant", "[7, 128]", "[110, 128]")
    bad(cli(*run, write({}, gate=torch.zeros(3, 32))), "gate", "[3, 32]")
    bad(cli(*run, write({}, scores=torch.zeros(33, 9))), "scores")
    bad(cli(*run, write({}, topk=torch.zeros(4, 4))), "topk")
    bad(cli(*run, write({}, queries=torch.tensor([900]))), "queries", "900")
    bad(cli(*run, write({}, "topk", topk=None)), "inputs only")
    bad(cli(*run, write({}, pages=torch.zeros(2, 999, dtype=torch.uint8))), "pages of 999 bytes", "8448")
    bad(cli(*run, write({}), "--json", "/nowhere/x.json"), "/nowhere/x.json")


def test_a_chunk_of_a_stream(cli, mini, setup, tmp_path):
    """start_position above 0: judged on the entries whose tokens the call holds."""
    recipe = Recipe.reference(setup.config)
    from diffcheck import evaluate

    for start in (200, 201, 202, 203):
        first = evaluate(recipe, setup.config, setup.weights, setup.x[:start], setup.qr[:start])
        for changes, causes in (({}, set()), ({"k_theta": 40000.0}, {"theta"}), ({"ape": False}, {"ape"})):
            second = evaluate(
                recipe.replace(**changes), setup.config, setup.weights, setup.x[start:], setup.qr[start:], start=start,
                state=first.state, queries=torch.arange(start, 440, 7),
            )  # fmt: skip
            path = tmp_path / "trace.safetensors"
            Trace({n: t.clone() for n, t in second.items()}, layer=4, start=start).save(path)
            status, out, _ = cli("--checkpoint", mini, "--trace", path, "--recipe", "reference")
            assert status == bool(causes), (start, changes, out)
            for cause in causes:
                assert f"best matching cause: {cause}" in out
