"""The published schemas: what each command writes is what its schema says, and nothing else is."""

import ast
import copy
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import diffcheck.reporting
from diffcheck import load_layer
from diffcheck.gates import NUMERIC_FIELDS
from diffcheck.refimpl import Trace, run_indexer, save_traces
from diffcheck.reporting.schema import COMMANDS, load_schema

QUICK = ["--layers", "4", "--queries", "24", "--theta", "checkpoint,10000"]


def errors(command, document):
    found = Draft202012Validator(load_schema(command)).iter_errors(document)
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message:.300}" for e in found]


@pytest.mark.parametrize("command", COMMANDS)
def test_schemas_are_schemas(command):
    schema = load_schema(command)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


def test_a_run_with_every_kind_of_case(run_document):
    assert {case["verdict"] for case in run_document["cases"]} == {"same", "format", "config"}
    assert errors("run", run_document) == []


def test_vacuous_refused_and_kernel_steps(cli, mini, tmp_path):
    out = tmp_path / "out.json"
    assert cli("run", "--checkpoint", mini, *QUICK, "--length", "200", "--json", out)[0] == 0
    vacuous = json.loads(out.read_text())
    assert {case["verdict"] for case in vacuous["cases"]} == {"vacuous"}
    assert errors("run", vacuous) == []
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    done = cli(
        "run", "--checkpoint", mini, *QUICK, "--precision", "reference,fp8", "--backend", f"{kernels}:Mine",
        "--json", out,
    )  # fmt: skip
    assert done[0] == 0, done
    chain = json.loads(out.read_text())
    assert {case["verdict"] for case in chain["cases"]} == {"refused", "kernel"}
    assert errors("run", chain) == []


KERNELS = """
import torch

class Mine:
    name = "mine"
    steps = ("topk",)
    def unavailable(self, device): return None
    def version(self): return None
    def refusal(self, step, recipe, config): return "no FP4 step" if recipe.q_fp4 else None
    def topk(self, scores, visible, k):
        width = min(k, scores.shape[1])
        hidden = torch.arange(scores.shape[1]) >= visible[:, None]
        chosen = (-scores).masked_fill(hidden, -torch.inf).topk(width, dim=1).indices
        return chosen.masked_fill(torch.arange(width) >= visible[:, None], -1)
"""


def test_marginal_and_inspect(cli, mini, tmp_path):
    out = tmp_path / "out.json"
    what = ["--layers", "4", "--trials", "2", "--strengths", "0,1", "--json", out]
    assert cli("marginal", "--checkpoint", mini, *what)[0] == 0
    assert errors("marginal", json.loads(out.read_text())) == []
    assert cli("inspect", "--checkpoint", mini, "--json", out)[0] == 0
    assert errors("inspect", json.loads(out.read_text())) == []


def test_diagnose(cli, mini, tmp_path):
    config, weights = load_layer(mini, 4)
    source = Trace.load(mini / "trace.safetensors", 4)
    x, qr = source["x"][:600], source["qr"][:600]
    observed = dict(run_indexer(config, weights, x, qr)) | {"x": x, "qr": qr}
    observed["topk"] = observed["topk"].clone()
    observed["topk"][300:, 1] = observed["topk"][300:, 0]
    trace, out = tmp_path / "trace.safetensors", tmp_path / "out.json"
    save_traces(trace, [Trace(observed, layer=4)])
    assert cli("diagnose", "--checkpoint", mini, "--trace", trace, "--json", out)[0] == 1
    diagnosis = json.loads(out.read_text())
    assert [finding["cause"] for finding in diagnosis["findings"]] == ["topk_slots"]
    assert errors("diagnose", diagnosis) == []


def test_needle(cli, mini, tmp_path):
    config, out = tmp_path / "needle.toml", tmp_path / "out.json"
    (tmp_path / "filler.json").write_text(json.dumps(list(range(40, 90)) * 4))
    config.write_text(
        'lengths = ["330"]\ndepths = [0.5]\nhaystack = "filler.json"\n'
        "[[needle]]\ntext_tokens = [5, 6, 7]\nquestion_tokens = [5, 6]\n"
    )
    done = cli("needle", "--checkpoint", mini, "--config", config, "--layers", "2", "--json", out)
    assert done[0] == 0, done
    assert errors("needle", json.loads(out.read_text())) == []


def test_every_gate_field_is_in_the_schema():
    properties = load_schema("run")["$defs"]["case"]["properties"]
    assert set(NUMERIC_FIELDS) <= set(properties)


def test_a_sweep_and_its_bytes(cli, mini, tmp_path):
    out, space = tmp_path / "out.json", tmp_path / "space.toml"
    space.write_text('also = ["bf16", "fp8", "qat+e2m1/32/ue8m0"]\n')
    options = ("--layers", "4", "--rows", "24", "--halvings", "0")
    assert cli("sweep", "--checkpoint", mini, "--space", space, *options, "--json", out)[0] == 0
    found = json.loads(out.read_text())
    assert errors("sweep", found) == []
    found["recipes"][0]["logits"] = {
        "layout": "e4m3",
        "shape": "decode:8x64",
        "backend": "triton",
        "ms": None,
        "reason": "slow",
    }
    assert len(errors("sweep", found)) == 1
    assert cli("memory", "--checkpoint", mini, "--json", out)[0] == 0
    found = json.loads(out.read_text())
    assert errors("memory", found) == []
    del found["main_entry"]
    assert errors("memory", found) == [": 'main_entry' is a required property"]


MUTANTS = [
    (lambda d: d["cases"][0].pop("jaccard"), "'jaccard' is a required property"),
    (lambda d: d["cases"][0].update(jacard=1.0), "'jacard' was unexpected"),
    (lambda d: d["cases"][0].update(jaccard=1.5), "1.5 is greater than the maximum of 1"),
    (lambda d: d["cases"][0].update(verdict="good"), "'good' is not one of"),
    (lambda d: d["cases"][0]["survival"][0].pop("n"), "'n' is a required property"),
    (lambda d: d["cases"][0]["stages"][0].update(format="0"), "'0' is not of type 'number', 'null'"),
    (lambda d: d["cases"][0]["by_visible"][0].update(queries=0), "0 is less than the minimum of 1"),
    (lambda d: d["cases"][0]["margins"].update(counts=None), "None is not of type 'array'"),
    (lambda d: d["gates"][0]["checked"][0].pop("value"), "'value' is a required property"),
    (lambda d: d["headline"].update(status="fine"), "'fine' is not one of"),
    (lambda d: d.update(schema_version=2), "1 was expected"),
    (lambda d: d.update(finished="yesterday at noon"), "'yesterday at noon' does not match"),
    (lambda d: d.pop("environment"), "'environment' is a required property"),
]


@pytest.mark.parametrize(("change", "message"), MUTANTS, ids=[message for _, message in MUTANTS])
def test_a_changed_document_fails(run_document, change, message):
    document = copy.deepcopy(run_document)
    change(document)
    (found,) = errors("run", document)
    assert message in found


def test_reports_are_made_from_the_document_alone():
    """Only `document` knows a run (and `moved` a comparison); what else a report needs is names and words."""
    allowed = {"errors", "invariants", "probes", "recipe"}
    folder = Path(diffcheck.reporting.__file__).parent
    seen = 0
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and path.stem not in ("document", "moved"):
                assert node.module in allowed, f"{path.name} imports {node.module}"
                seen += 1
    assert seen >= len(allowed)


def test_schema_command(cli):
    status, out, _ = cli("schema", "diagnose")
    assert status == 0
    assert json.loads(out) == load_schema("diagnose")
    assert json.loads(cli("schema")[1]) == load_schema("run")
    status, _, err = cli("schema", "backends")
    assert status == 2
    assert err.strip() == (
        "diffcheck: schema: 'backends', expected one of run, compare, diagnose, marginal, needle, sweep, memory, "
        "inspect, bench"
    )
