"""The command line as a user meets it: exit codes, one-line errors, what is printed, what is written."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffcheck.gates import NUMERIC_FIELDS
from diffcheck.refimpl import Trace, save_traces

QUICK = ["--layers", "4", "--queries", "24", "--precision", "reference,fp8", "--theta", "checkpoint,10000"]
CASE_FIELDS = [
    "layer",
    "precision",
    "theta",
    "backend",
    "length",
    "queries",
    "k",
    "visible",
    "vacuous",
    "jaccard",
    "jaccard_tied",
    "jaccard_kernel",
    "recall_mean",
    "recall_p1",
    "recall_worst",
    "jaccard_ideal",
    "needle_rank_reference",
    "needle_rank",
    "needle_selected",
    "survival",
    "score_rel_error",
    "format_error",
    "kernel_error",
    "first_stage",
    "bytes_per_entry",
    "verdict",
]


def one_line_error(result, *parts, code=2):
    status, _, err = result
    lines = err.strip().splitlines()
    assert status == code, err
    assert len(lines) <= 3, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    return True


def test_run_prints_and_writes(cli, mini, tmp_path):
    path = tmp_path / "out.json"
    status, out, err = cli("run", "--checkpoint", mini, *QUICK, "--backend", "emulated", "--json", path)
    assert status == 0
    assert "what if theta were 10000" in out
    words = next(line for line in out.splitlines() if line.startswith("fp8: "))
    assert "stage evaluations were shared" in out
    assert err.count("layer 4 fp8") == 2  # plain progress lines where there is no terminal
    report = json.loads(path.read_text())
    assert report["schema_version"] == 1
    assert len(report["cases"]) == 4
    for case in report["cases"]:
        assert set(CASE_FIELDS) <= set(case)
        assert set(NUMERIC_FIELDS) <= set(case)
        assert all(set(b) == {"lo", "hi", "p", "n", "ci"} for b in case["survival"])
    fp8 = report["cases"][2]
    assert (fp8["layer"], fp8["precision"], fp8["theta"], fp8["backend"]) == (4, "fp8", 160000.0, "emulated")
    # of 1024 entries the last row compared, which is a needle's, sees 1022
    assert (fp8["length"], fp8["k"], fp8["visible"], fp8["bytes_per_entry"]) == (4096, 64, 1022, 132)
    assert f"Jaccard {fp8['jaccard_tied']:.3f}" in words  # not that of the what-if theta
    assert len(fp8["needle_rank"]) == 225, "all records of the keys that the text asks for"
    assert report["cases"][3]["theta"] == 10000.0
    assert report["cases"][3]["replaced"]["k_theta"] == 10000.0
    assert report["stage_evaluations"]["computed"] < report["stage_evaluations"]["asked"]
    assert report["environment"]["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["checkpoint"]["sources"]["compress_rope_theta"] == "checkpoint: compress_rope_theta"


def test_same_seed_same_numbers(cli, mini, tmp_path):
    documents = []
    for name in ("a", "b"):
        path = tmp_path / name
        cli("run", "--checkpoint", mini, *QUICK, "--length", "1200", "--seed", "7", "--json", path)
        cases = json.loads(path.read_text())["cases"]
        documents.append([{k: v for k, v in case.items() if k != "seconds"} for case in cases])
    assert documents[0] == documents[1]


def test_gates_decide_the_exit_code(cli, mini):
    command = ["run", "--checkpoint", mini, *QUICK, "--gate"]
    assert cli(*command, "jaccard_kernel>=0.999")[0] == 0
    status, out, _ = cli(*command, "jaccard>=0.99")
    assert status == 1
    assert "layer 4 fp8 theta checkpoint: jaccard 0." in out
    assert "theta 10000: jaccard" not in out  # what-if cases do not count
    status, out, _ = cli(*command, "jaccard>=0.5")
    assert status == 0
    status, out, _ = cli(*command, "jaccard>=0.5", "--gate-what-if")
    assert status == 1
    assert "theta 10000: jaccard" in out


def test_short_input_is_called_vacuous(cli, mini):
    status, out, _ = cli("run", "--checkpoint", mini, *QUICK, "--length", "256")
    assert status == 0
    assert "vacuous: no query sees more than 64 entries" in out
    status, out, _ = cli("run", "--checkpoint", mini, *QUICK, "--length", "256", "--gate", "jaccard>=0.5")
    assert status == 1
    assert "nothing was measured" in out


def test_recipe_file_and_synthetic_needles(cli, mini, tmp_path):
    recipe = Path(__file__).parents[2] / "fixtures" / "recipes" / "hadamard-on-queries-only.toml"
    status, out, _ = cli(
        "run", "--checkpoint", mini, *QUICK, "--recipe", recipe, "--length", "1500",
        "--needle-depth", "0.5", "--needle-strength", "0.5",
    )  # fmt: skip
    assert status == 0
    assert "q-only-hadamard" in out
    assert "k_hadamard" in out  # the first stage that differs


def test_dry_run_computes_nothing(cli, mini, tmp_path):
    status, out, err = cli("run", "--checkpoint", mini, "--dry-run", "--json", tmp_path / "no.json")
    assert status == 0
    assert "24 cases" in out
    assert "bytes of weights to read" in out
    assert not (tmp_path / "no.json").exists()
    assert err == ""


def test_list_presets_and_version(cli, mini):
    status, out, _ = cli("run", "--list-presets")
    assert status == 0
    assert "sglang-fp8" in out
    assert "llama.cpp" in out
    assert cli("--version")[1].startswith("diffcheck 0.")


def test_inspect(cli, mini):
    status, out, _ = cli("inspect", "--checkpoint", mini)
    assert status == 0
    assert "compress_rope_theta" in out


def test_fixture_then_run(cli, tmp_path):
    directory = tmp_path / "made"
    assert cli("fixture", directory, "--like", "mini", "--seed", "3")[0] == 0
    status, out, _ = cli(
        "run", "--checkpoint", directory, "--precision", "fp8", "--theta", "checkpoint", "--queries", "16"
    )
    assert status == 0
    assert "made-up hidden states" in out
    one_line_error(cli("fixture", directory), "expected")


BAD = [
    (["--layers", "3"], ["layer 3", "128"]),
    (["--layers", "99"], ["layer 99"]),
    (["--layers", "two"], ["--layers", "two"]),
    (["--layers", "-2"], ["--layers"]),
    (["--precision", "fp9"], ["fp9", "sglang-fp8"]),
    (["--precision", ""], ["at least one precision"]),
    (["--backend", "cuda"], ["unknown backend", "triton"]),
    (["--theta", "0"], ["--theta", "'0'"]),
    (["--theta", "ten"], ["--theta", "'ten'"]),
    (["--length", "3"], ["--length", "at least 4"]),
    (["--queries", "0"], ["--queries"]),
    (["--length", "64", "--queries", "65"], ["--queries", "64 tokens"]),
    (["--length", "64", "--queries", "256"], ["--queries", "64 tokens"]),
    (["--gate", "jacard>1"], ["jacard"]),
    (["--gate", "jaccard"], ["FIELD OP NUMBER"]),
    (["--recipe", "nowhere.toml"], ["nowhere.toml", "no such file"]),
    (["--trace", "nowhere.safetensors"], ["nowhere.safetensors", "no such file"]),
    (["--trace", "x", "--length", "64"], ["exclude each other"]),
    (["--device", "tpu"], ["--device", "tpu"]),
    (["--json", "/nowhere/at/all.json"], ["--json", "/nowhere/at/all.json"]),
    (["--needle-depth", "0.5"], ["--needle-depth"]),
    (["--needle-depth", "2", "--length", "1000"], ["--needle-depth", "0 to 1"]),
    (["--needle-strength", "0", "--length", "100"], ["no needle can be lost"]),
    (["--seed", "x"], ["--seed"]),
    (["--nonsense"], ["--nonsense"]),
]


@pytest.mark.parametrize(("arguments", "parts"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_usage(cli, mini, arguments, parts):
    one_line_error(cli("run", "--checkpoint", mini, *arguments), *parts)


def test_bad_checkpoints(cli, tmp_path, mini):
    one_line_error(cli("run", "--checkpoint", tmp_path / "none"), "no such directory")
    one_line_error(cli("run", "--checkpoint", tmp_path), "is empty")
    one_line_error(cli("run", "--checkpoint", mini / "config.json"), "config.json", "expected a directory")
    one_line_error(cli("inspect", "--checkpoint", tmp_path), "is empty")


def test_missing_gpu_is_exit_3(cli, mini, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one_line_error(cli("run", "--checkpoint", mini, "--device", "cuda"), "no CUDA device", code=3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one_line_error(cli("run", "--checkpoint", mini, "--backend", "triton"), "triton", "CUDA", code=3)


def test_absent_backend_says_how_to_install_it(cli, mini, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, package in (("deep_gemm", "pip install sgl-deep-gemm"), ("sglang", "pip install sglang")):
        if importlib.util.find_spec(name) is None:
            one_line_error(cli("run", "--checkpoint", mini, "--backend", name), name, package, code=3)


class TestTraces:
    """A trace that does not fit the checkpoint is refused before any work."""

    @pytest.fixture
    def good(self, mini):
        trace = Trace.load(mini / "trace.safetensors", 4)
        return {"x": trace["x"][:400], "qr": trace["qr"][:400]}

    def run(self, cli, mini, tmp_path, tensors, layer=4, shared=None, **options):
        path = tmp_path / "trace.safetensors"
        save_traces(path, [Trace(tensors, layer=layer, shared=shared or {})])
        return cli("run", "--checkpoint", mini, "--precision", "fp8", "--theta", "checkpoint", "--trace", path)

    def test_good(self, cli, mini, tmp_path, good):
        assert self.run(cli, mini, tmp_path, good)[0] == 0

    def test_hidden_size(self, cli, mini, tmp_path, good):
        result = self.run(cli, mini, tmp_path, good | {"x": good["x"][:, :128]})
        one_line_error(result, "layers.4.x", "[400, 128]", "[T, 256]")

    def test_q_lora(self, cli, mini, tmp_path, good):
        one_line_error(self.run(cli, mini, tmp_path, good | {"qr": good["qr"][:, :64]}), "layers.4.qr", "[T, 128]")

    def test_layer(self, cli, mini, tmp_path, good):
        one_line_error(self.run(cli, mini, tmp_path, good, layer=3), "layer 3")

    def test_nan(self, cli, mini, tmp_path, good):
        x = good["x"].clone()
        x[17, 3] = torch.nan
        one_line_error(self.run(cli, mini, tmp_path, good | {"x": x}), "layers.4.x", "row 17")

    def test_lengths(self, cli, mini, tmp_path, good):
        one_line_error(self.run(cli, mini, tmp_path, good | {"qr": good["qr"][:300]}), "400", "300")

    def test_needles(self, cli, mini, tmp_path, good):
        shared = {"needle_queries": torch.tensor([400]), "needle_positions": torch.tensor([8])}
        one_line_error(self.run(cli, mini, tmp_path, good, shared=shared), "400")

    def test_schema(self, cli, mini, tmp_path, good):
        from safetensors.torch import save_file

        path = tmp_path / "other.safetensors"
        save_file({"layers.4.x": good["x"].contiguous()}, path, metadata={"schema": "diffcheck-trace-9"})
        one_line_error(cli("run", "--checkpoint", mini, "--trace", path), "diffcheck-trace-9", "diffcheck-trace-1")


def test_a_lost_shard_is_named(cli, mini, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(mini, broken)
    shard = broken / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100_000])
    one_line_error(cli("run", "--checkpoint", broken, "--layers", "2"), "model-00001-of-00002.safetensors")


def test_module_entry_point():
    done = subprocess.run([sys.executable, "-m", "diffcheck", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("diffcheck ")


def test_json_has_null_for_what_it_cannot_spell(tmp_path):
    from diffcheck.commands.output import write_json

    path = tmp_path / "x.json"
    write_json(path, {"a": [1.5, float("nan")], "b": {"c": (float("inf"), "text", None, True)}})
    assert json.loads(path.read_text()) == {"a": [1.5, None], "b": {"c": [None, "text", None, True]}}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "value",
    [{}, [], {"a": {}}, [[]], [{}], {"a": [1, "b", None, True, 1e-9]}, [[1, 2], {"b": "x\ny"}], {"a": [{"b": [1]}]}],
)
def test_json_is_json(tmp_path, value):
    from diffcheck.commands.output import write_json

    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == value


def test_long_lists_of_numbers_take_a_line(tmp_path):
    from diffcheck.commands.output import write_json

    write_json(tmp_path / "x.json", {"a": {"b": list(range(300))}, "c": 1})
    assert (tmp_path / "x.json").read_text().count("\n") == 6


def test_capture_then_run(cli, mini, tmp_path):
    """A text's own hidden states: captured to a file, and in one step with `run`; both give the same numbers."""
    ids, trace, out = tmp_path / "ids.json", tmp_path / "trace.safetensors", tmp_path / "out.json"
    ids.write_text(json.dumps(json.loads((mini / "tokens.json").read_text())[:320]))
    options = ["--checkpoint", mini, "--layers", "2"]
    code, printed, err = cli("capture", *options, "--tokens", ids, "--out", trace)
    assert code == 0
    assert printed == f"wrote {trace}: forward pass of the reference, 320 tokens of ids.json\n"
    assert "layer 2 of 0..2: " in err
    what = ["--precision", "fp8", "--theta", "checkpoint", "--json", out]
    assert cli("run", *options, "--trace", trace, *what)[0] == 0
    first = json.loads(out.read_text())["cases"][0]
    code, printed, _ = cli("run", *options, "--tokens", ids, "--run-dir", tmp_path / "kept", *what)
    assert code == 0
    second = json.loads(out.read_text())
    assert {**second["cases"][0], "seconds": 0} == {**first, "seconds": 0}
    assert first["attention_mass_lost"] > 0
    known = [value for value in first["rows"]["attention_mass_lost"] if value is not None]
    assert len(known) == first["attention_mass_rows"]
    assert sum(known) / len(known) == pytest.approx(first["attention_mass_lost"], rel=1e-3)
    assert second["inputs"]["proxy"] is False
    assert (tmp_path / "kept" / "trace.safetensors").is_file()
    again = ["run", *options, "--tokens", ids, "--run-dir", tmp_path / "kept", *what]
    one_line_error(cli(*again), "holds 2 records, expected --resume or an empty directory")
    code, printed, err = cli(*again, "--resume")
    assert code == 0
    assert err.startswith("layers 0 to 2 are")
    assert "1 of 1 cases are done" in err
    assert json.loads(out.read_text())["cases"] == second["cases"], "not even the seconds are new"
    (tmp_path / "kept" / "records.jsonl").unlink()  # as after an interrupt of the forward pass
    one_line_error(cli(*again), "holds finished layers, expected --resume or an empty directory")


def test_a_proxy_says_so_everywhere(cli, mini, tmp_path):
    ids, out = tmp_path / "ids.json", tmp_path / "out.json"
    ids.write_text(json.dumps(list(range(300))))
    options = ["--checkpoint", mini, "--layers", "2", "--tokens", ids, "--inputs", "embedding"]
    code, printed, err = cli("capture", *options, "--out", tmp_path / "trace.safetensors")
    assert code == 0
    assert "PROXY: embedding rows" in printed
    assert "PROXY: embedding rows" in err
    run = [*options, "--precision", "fp8", "--theta", "checkpoint"]
    code, printed, _ = cli("run", *run, "--json", out)
    assert code == 0
    assert printed.count("PROXY") == 2, "with the inputs and in the summary"
    document = json.loads(out.read_text())
    assert document["inputs"]["proxy"] is True
    assert "PROXY" in document["summary"][0]
    assert "PROXY" in cli("run", *run, "--dry-run")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--tokens", "none.json"], "none.json: no such file"),
        (["run", "--tokens", "none.json", "--length", "300"], "--text and --tokens exclude"),
        (["run", "--text", "none.txt", "--needle-depth", "0.5"], "plant into made-up inputs"),
        (["run", "--inputs", "embedding"], "belongs to --text or --tokens"),
        (["run", "--resume"], "expected --run-dir DIR"),
        (["capture", "--out", "x"], "expected one of --text FILE and --tokens"),
        (["capture", "--out", "x", "--tokens", "t", "--inputs", "guess"], "--inputs: 'guess', expected model or"),
        (["capture", "--out", "x", "--tokens", "t", "--stages", "q,w"], "--stages: 'w', expected all or some of q,"),
        (["capture", "--out", "x", "--tokens", "t", "--queries", "0"], "--queries: 0, expected at least 1"),
    ],
)
def test_bad_text_options(cli, mini, arguments, message):
    code, _, err = cli(arguments[0], "--checkpoint", mini, *arguments[1:])
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_convert_says_what_it_found_and_what_is_missing(cli, mini, tmp_path):
    source = Trace.load(mini / "trace.safetensors", layer=4)
    dump, out = tmp_path / "dump.pt", tmp_path / "trace.safetensors"
    torch.save({"layers.4.x": source["x"][:300], "layers.4.qr": source["qr"][:300], "layers.2.x": source["x"]}, dump)
    code, printed, _ = cli("convert", dump, "--checkpoint", mini, "--out", out)
    assert code == 0
    assert "layer 4, from token 0 on: x [300, 256], qr [300, 128]" in printed
    assert "missing: layer 2: qr" in printed
    assert cli("run", "--checkpoint", mini, "--trace", out, "--layers", "4", "--precision", "fp8")[0] == 0
    assert cli("convert", dump, "--checkpoint", mini, "--out", out, "--request", "1")[0] == 2
    code, _, err = cli("convert", tmp_path / "none", "--checkpoint", mini, "--out", out)
    assert code == 2
    assert err.count("\n") == 1
