"""Sweeps on the trained miniature: the same numbers as a run, interrupted and resumed, within a budget, refused."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diffcheck import Pipeline, Recipe
from diffcheck.backends import find_backend
from diffcheck.cli import app
from diffcheck.compare import Targets, compare
from diffcheck.errors import InputError
from diffcheck.journal import RECORDS
from diffcheck.presets import build
from diffcheck.sweeping import cases, search
from diffcheck.sweeping.cases import Rung, measure, spread
from diffcheck.sweeping.executors import LocalExecutor, pack, unpack
from diffcheck.sweeping.report import render
from diffcheck.sweeping.result import document
from diffcheck.sweeping.search import SweepOptions, execute, identity, plan

SPACE = 'keys = ["e4m3/128/ue8m0", "e4m3/128/fp32", "e2m1/64/ue8m0", "int4/32/ue8m0"]\nprefixes = ["", "qat+"]\n'


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return str(path)


def quiet(line):
    pass


def swept(mini, **options):
    todo = plan(SweepOptions(**({"checkpoint": mini, "device": "cpu"} | options)))
    return todo, execute(todo, quiet)


def same(a, b):
    """Equal numbers in all samples."""
    pairs = [(a.recall, b.recall), (a.plain, b.plain), (a.needles, b.needles)]
    return a.layers == b.layers and all(np.array_equal(x.values, y.values, equal_nan=True) for x, y in pairs)


def test_spread_is_even_at_every_beginning():
    for rows in (1, 2, 5, 16, 37, 256):
        order = spread(rows)
        assert sorted(order) == list(range(rows))
        for count in (4, 8, 16):
            if count < rows:
                assert max(np.diff(sorted(order[:count]))) <= 2 * -(-rows // count)


@pytest.mark.parametrize("name", ["qat+e4m3/128/fp32", "k=nohad+bf16", "sglang-fp8", "reference"])
def test_a_case_says_what_a_run_says(mini, name):
    """Recall, plain and tie-tolerant, and needles are those of `compare` on the same rows."""
    todo = plan(SweepOptions(checkpoint=mini, device="cpu", rows=24))
    given = todo.texts.load(4, 0)
    recipe = build(name, given.config)
    record = measure(given, recipe, Rung(first=0, last=24, needles=True), "cpu")
    queries = torch.cat((given.positions, torch.tensor([n.query for n in given.needles]))).unique()
    layer = Pipeline(given.config, given.weights, given.x, given.qr, queries=queries)
    rows = torch.isin(queries, given.positions)
    trace = find_backend("emulated").run(layer, recipe)
    found = compare(layer, recipe, trace, Targets.of(layer, given.needles))
    assert record["needles_kept"] == found["needle_selected"]
    assert record["needles_had"] == found["needle_selected_reference"]
    if name in ("reference", "k=nohad+bf16"):
        assert (record["needles_kept"] == record["needles_had"]) is (name == "reference")
    part = layer.narrowed(rows.nonzero().flatten())
    found = compare(part, recipe, find_backend("emulated").run(part, recipe), Targets.of(part, ()))
    k = given.config.index_topk
    assert np.mean(record["hits_tied"]) / k == pytest.approx(found["recall_tied"], abs=1e-12)
    assert np.mean(record["hits"]) / k == pytest.approx(found["recall_mean"], abs=1e-12)
    assert record["rows"] == list(range(24))


def test_rungs_add_up_to_the_whole(mini):
    todo = plan(SweepOptions(checkpoint=mini, device="cpu", rows=40))
    given = todo.texts.load(2, 0)
    recipe = build("e2m1/64/ue8m0", given.config)
    whole = measure(given, recipe, Rung(first=0, last=40, needles=True), "cpu")
    cases.forget()
    parts = [measure(given, recipe, Rung(first=a, last=b, needles=a == 0), "cpu") for a, b in ((0, 10), (10, 40))]
    rows = dict(sorted((row, hit) for p in parts for row, hit in zip(p["rows"], p["hits_tied"], strict=True)))
    assert [len(p["rows"]) for p in parts] == [10, 30]  # none is measured twice
    assert list(rows) == whole["rows"]
    assert list(rows.values()) == whole["hits_tied"]
    assert parts[0]["needles_kept"] == whole["needles_kept"]
    assert "needles_kept" not in parts[1]


def test_stages_are_shared_and_do_not_change_a_result(mini):
    todo = plan(SweepOptions(checkpoint=mini, device="cpu", rows=16))
    given, rung = todo.texts.load(2, 0), Rung(first=0, last=16, needles=False)
    cases.forget()
    records = [measure(given, c.recipe, rung, "cpu") for c in todo.candidates[:6]]
    asked, computed = cases._kept[given.key, "cpu"].rows(list(range(16))).savings()
    assert computed < 0.6 * asked
    for candidate, record in zip(todo.candidates[:6], records, strict=True):
        cases.forget()
        assert measure(given, candidate.recipe, rung, "cpu") == record


def test_what_is_kept_serves_its_own_sweep_only(mini):
    """A process of a cluster meets the same layer with other rows, seeds and files."""
    given = [
        plan(SweepOptions(checkpoint=mini, device="cpu", **options)).texts.load(2, 0)
        for options in ({"rows": 16}, {"rows": 12}, {"rows": 12, "length": 400}, {"length": 400, "seed": 1})
    ]
    assert len({each.key for each in given}) == 4
    assert plan(SweepOptions(checkpoint=mini, rows=16)).texts.load(2, 0).key == given[0].key


def test_packed_inputs_are_the_same(mini):
    given = plan(SweepOptions(checkpoint=mini, device="cpu", rows=16)).texts.load(2, 0)
    again = unpack(pack(given))
    assert (again.key, again.order, again.needles, again.config) == (
        given.key, given.order, given.needles, given.config
    )  # fmt: skip
    for name in ("x", "qr", "positions"):
        assert torch.equal(getattr(again, name), getattr(given, name))
    assert again.weights.wq_b.dtype == given.weights.wq_b.dtype
    assert torch.equal(again.weights.wq_b_scale.view(torch.uint8), given.weights.wq_b_scale.view(torch.uint8))


def test_a_sweep_halves_and_finds_what_is_known(mini, space):
    todo, found = swept(mini, space=space, rows=64, halvings=1)
    result = document(todo, found, {}, {})
    assert todo.sizes == [16, 64]
    by_name = {r["name"]: r for r in result["recipes"]}
    assert by_name["qat+e4m3/128/ue8m0"]["recall"] == 1.0
    assert by_name["qat+e4m3/128/ue8m0"]["rows_measured"] == [64, 64]
    assert by_name["qat+e4m3/128/fp32"]["recall"] < 1.0
    assert 0.8 < by_name["e4m3/128/fp32"]["recall"] < 0.95
    dropped = [r for r in result["recipes"] if r["rows_measured"] == [16, 16]]
    assert 1 <= len(dropped) <= 4
    assert result["fronts"]["recall"][0]["name"] == "qat+e2m1/64/ue8m0"
    assert result["fronts"]["recall"][-1]["name"] == "qat+e4m3/128/ue8m0"
    step = result["fronts"]["recall"][-1]
    assert step["gain_ci"][0] <= step["gain"] <= step["gain_ci"][1]
    assert step["gain"] == pytest.approx(1 - by_name["qat+e2m1/64/ue8m0"]["recall"])
    for record in result["recipes"]:
        low, high = record["recall_ci"]
        assert low <= record["recall"] <= high
        assert record["worst_row"]["recall"] <= record["worst_layer"]["recall"] <= record["recall"] + 1e-12
        assert record["needle_kept"] <= record["needle_count"] <= 374
    assert [r["rank"] for r in sorted(result["recipes"], key=lambda r: -r["recall"])] == list(range(1, 9))
    full = swept(mini, space=space, rows=64, halvings=0)[1]
    kept = ~np.isnan(found.recall.values)
    assert np.array_equal(found.recall.values[kept], full.recall.values[kept])


def test_a_floor_chooses_by_layer(mini, space):
    todo, found = swept(mini, space=space, rows=64, halvings=0, floor=0.985)
    mixed = document(todo, found, {}, {})["mixed"]
    assert mixed["below_floor"] == []
    assert set(mixed["by_layer"]) == {"2", "4"}
    todo, found = swept(mini, space=space, rows=64, halvings=0, floor=0.9999)
    mixed = document(todo, found, {}, {})["mixed"]
    assert set(mixed["by_layer"].values()) == {"qat+e4m3/128/ue8m0"}
    assert mixed["uniform"]["bytes_per_entry"] == mixed["bytes_per_entry"] == 132


def test_the_needle_objective(mini, space):
    todo, found = swept(mini, space=space, rows=32, halvings=1, objective="needle")
    result = document(todo, found, {}, {})
    assert result["objective"] == "needle"
    shares = {r["name"]: r["needle_share"] for r in result["recipes"]}
    cheapest = [r["name"] for r in result["recipes"] if r["bytes_per_entry"] == 66]
    assert max(shares[name] for name in cheapest) == shares[result["fronts"]["needle"][0]["name"]]


@pytest.fixture
def two_requests(mini, tmp_path):
    """A trace of layer 2 with two requests: the trace's first 1000 tokens and its first 1400, one after the other."""
    tensors = load_file(mini / "trace.safetensors")
    x, qr = tensors["layers.2.x"], tensors["layers.2.qr"]
    path = tmp_path / "two.safetensors"
    parts = {"layers.2.x": torch.cat((x[:1000], x[:1400])), "layers.2.qr": torch.cat((qr[:1000], qr[:1400]))}
    save_file(parts | {"requests": torch.tensor([0, 1000, 2400])}, path, metadata={"schema": "diffcheck-trace-1"})
    return path


def test_each_request_of_a_trace_is_a_text(mini, space, two_requests):
    todo, found = swept(mini, space=space, trace=two_requests, rows=16, halvings=0)
    assert todo.texts.lengths == (1000, 1400)
    assert found.layers == (2,)
    assert found.recall.values.shape == (8, 1, 32)
    assert found.recall.group_count == 8  # two texts are few: blocks of four rows, none of them across texts
    assert {text for text, _ in found.where} == {0, 1}
    _, first = swept(mini, space=space, trace=two_requests, request=0, rows=16, halvings=0)
    assert np.array_equal(first.recall.values, found.recall.values[:, :, :16])


def test_several_made_up_texts_are_resampled_whole(mini, space):
    todo, found = swept(mini, space=space, length=400, texts=6, rows=8, halvings=0, layers=[2])
    assert found.recall.group_count == 6
    assert found.recall.values.shape == (8, 1, 48)
    assert document(todo, found, {}, {})["inputs"]["resampled"] == "6 texts"
    assert len(np.unique(found.needles.groups)) == 6
    blocks = found.recall.values.reshape(8, 6, 8)
    assert not np.array_equal(blocks[:, 0], blocks[:, 1])  # each text is another one


def lines(directory):
    return [json.loads(line) for line in (directory / RECORDS).read_text().splitlines()]


def test_an_interrupted_sweep_goes_on_and_says_the_same(mini, space, tmp_path, monkeypatch):
    options = {"space": space, "rows": 32, "halvings": 1, "layers": [2, 4]}
    _, want = swept(mini, **options)
    calls = []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return measure(*arguments)

    from diffcheck.sweeping import executors

    monkeypatch.setattr(executors, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        swept(mini, **options, run_dir=tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 1 + 8
    with pytest.raises(InputError, match="holds 8 records, expected --resume"):
        swept(mini, **options, run_dir=tmp_path / "run")
    monkeypatch.setattr(executors, "measure", measure)
    _, found = swept(mini, **options, run_dir=tmp_path / "run", resume=True)
    assert same(found, want)
    assert (found.kept_cases, found.measured_cases) == (8, want.measured_cases - 8)
    keys = [line["key"] for line in lines(tmp_path / "run")[1:]]
    assert len(set(keys)) == len(keys) == want.measured_cases
    _, again = swept(mini, **options, run_dir=tmp_path / "run", resume=True)
    assert same(again, want)
    assert again.measured_cases == 0


def test_a_killed_sweep_loses_nothing_that_was_done(mini, space, tmp_path):
    """SIGKILL in the middle of a real process."""
    command = [sys.executable, "-m", "diffcheck", "sweep", "--checkpoint", str(mini), "--space", space]
    command += ["--rows", "64", "--halvings", "1", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until and not (
        (tmp_path / "run" / RECORDS).exists() and len((tmp_path / "run" / RECORDS).read_bytes().splitlines()) > 3
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    options = {"space": space, "rows": 64, "halvings": 1}
    _, found = swept(mini, **options, run_dir=tmp_path / "run", resume=True)
    assert found.kept_cases >= 3
    assert same(found, swept(mini, **options)[1])


def test_records_of_another_sweep_are_refused(mini, space, tmp_path):
    options = {"space": space, "rows": 16, "halvings": 0, "layers": [2], "run_dir": tmp_path / "run"}
    swept(mini, **options)
    for change, name in (({"seed": 1}, "seed"), ({"rows": 17}, "rows"), ({"layers": [4]}, "layers")):
        with pytest.raises(InputError, match=f"{name} was"):
            swept(mini, **(options | change), resume=True)
    (tmp_path / "space.toml").write_text(SPACE + 'queries = ["base"]')
    with pytest.raises(InputError, match="recipes was"):
        swept(mini, **options, resume=True)


def test_a_changed_format_of_ones_own_is_another_sweep(mini, tmp_path):
    code = (
        "class F:\n def encode(self, x): return x\n def decode(self, x): return x\n"
        " def bytes(self, dim): return 8\nf = F()\n"
    )
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "space.toml").write_text(f'keys = ["{tmp_path}/mine.py:f"]')
    options = SweepOptions(checkpoint=mini, space=str(tmp_path / "space.toml"))
    before = identity(plan(options))
    (tmp_path / "mine.py").write_text(code + "# changed\n")
    after = identity(plan(options))
    assert [name for name in before if before[name] != after[name]] == ["recipes"]


def test_a_budget_ends_the_later_rungs_first(mini, space, monkeypatch):
    """A clock that the cases push on: the first rung is whole in every layer, the second one is cut."""
    now = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])

    def slow(self, handle):
        now[0] += 1.0
        return measure(*handle, "cpu")

    monkeypatch.setattr(LocalExecutor, "result", slow)
    todo, found = swept(mini, space=space, rows=64, halvings=1, budget=17 / 60)
    assert found.layers == (2, 4)
    rows = (~np.isnan(found.recall.values)).sum(-1)
    assert (rows >= 16).all()
    assert 64 in rows
    assert found.measured_cases == 17  # no layer took from the next one's share
    result = document(todo, found, {}, {})
    assert all(record["recall_ci"] for record in result["recipes"])
    # not even one layer's first rung
    now[0] = 0.0
    with pytest.raises(InputError, match="--budget: not enough"):
        swept(mini, space=space, rows=64, halvings=1, budget=4 / 60)
    # one layer, and what was left out is said
    now[0] = 0.0
    _, found = swept(mini, space=space, rows=16, halvings=0, budget=9 / 60)
    assert found.layers == (2,)


def test_the_command(mini, space, tmp_path):
    out = tmp_path / "sweep.json"
    arguments = ["sweep", "--checkpoint", str(mini), "--space", space, "--rows", "32", "--halvings", "1"]
    page = tmp_path / "sweep.html"
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--all", "--json", str(out), "--html", str(page)])
    assert result.exit_code == 0, result.output
    for text in (
        "Pareto front of bytes an entry against recall:", "Pareto front of bytes an entry against needle survival:",
        "qat+e4m3/128/ue8m0", "cheapest format for each layer whose recall lies above 0.95", "16 blocks", "all recipes",
    ):  # fmt: skip
        assert text in result.output or text == "16 blocks"
    found = json.loads(out.read_text())
    assert len(found["recipes"]) == 8
    check_page(page.read_text(), found)
    assert found["recipes"][0]["slots_share"] == pytest.approx(0.0, abs=1e-9)  # e4m3/128 is what slots count against


def check_page(text, found):
    """Well formed where it is drawn, each recipe in the table and at its place in both plots, nothing from outside."""
    from xml.etree import ElementTree

    plots = [ElementTree.fromstring(part.split("</svg>")[0] + "</svg>") for part in text.split("<h2>")[1:-1]
             for part in [part[part.index("<svg"):]]]  # fmt: skip
    assert len(plots) == 2
    for plot in plots:
        circles = plot.findall("circle")
        assert {c.find("title").text.split(": ")[0] for c in circles} == {r["name"] for r in found["recipes"]}
        assert all(0 <= float(c.get("cx")) <= 760 and 0 <= float(c.get("cy")) <= 380 for c in circles)
        assert len(plot.findall("path")) == 1
    by_name = {r["name"]: r["recall"] for r in found["recipes"]}
    heights = {c.find("title").text.split(": ")[0]: float(c.get("cy")) for c in plots[0].findall("circle")}
    order = sorted(by_name, key=by_name.get)
    assert all(heights[a] >= heights[b] for a, b in pairwise(order))
    assert text.count("<tr") == 1 + len(found["recipes"])
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text


def test_slots_are_those_of_memory(mini, space):
    from diffcheck.memory import measure as measure_memory

    todo, found = swept(mini, space=space, rows=16, halvings=0)
    costs = measure_memory(mini, ["e4m3/128/fp32", "e2m1/64/ue8m0"]).costs
    result = {r["name"]: r for r in document(todo, found, {}, {})["recipes"]}
    assert result["e2m1/64/ue8m0"]["slots_share"] == pytest.approx(costs[1].slots, abs=1e-12)
    assert result["e2m1/64/ue8m0"]["bytes_per_token"] == costs[1].token
    assert result["e2m1/64/ue8m0"]["bytes_per_context"] == costs[1].context


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "--objective: 'speed'"),
        ({"floor": 1.5}, "--floor: 1.5"),
        ({"halvings": -1}, "--halvings: -1"),
        ({"budget": 0}, "--budget: 0"),
        ({"rows": 0}, "--rows: 0"),
        ({"texts": 0}, "--texts: 0"),
        ({"resume": True}, "--resume goes on with the records of --run-dir"),
        ({"length": 200}, "a text of 200 tokens makes 50 entries and 64 are selected"),
        ({"request": 0, "length": 400}, "--request chooses one of a trace's requests"),
        ({"trace": "absent.safetensors"}, "absent.safetensors: no such file"),
        ({"layers": [3]}, "layer"),
        ({"space": "absent.toml"}, "absent.toml: no such file"),
    ],
)
def test_bad_options(mini, options, message):
    from pathlib import Path

    if "trace" in options:
        options = {"trace": Path(options["trace"])}
    with pytest.raises(InputError, match=message):
        plan(SweepOptions(checkpoint=mini, **options))


def test_bad_traces(mini, two_requests):
    with pytest.raises(InputError, match="--trace excludes --length"):
        plan(SweepOptions(checkpoint=mini, trace=two_requests, length=400))
    with pytest.raises(InputError, match=r"holds no layer \[4\]"):
        plan(SweepOptions(checkpoint=mini, trace=two_requests, layers=[2, 4]))
    with pytest.raises(InputError, match="has no request 2"):
        plan(SweepOptions(checkpoint=mini, trace=two_requests, request=2))


def test_a_failing_format_is_one_line(mini, tmp_path):
    (tmp_path / "bad.py").write_text(
        "class F:\n def encode(self, x): return 1 / 0\n def decode(self, x): return x\n"
        " def bytes(self, dim): return 8\nf = F()\n"
    )
    (tmp_path / "space.toml").write_text(f'keys = ["{tmp_path}/bad.py:f"]')
    with pytest.raises(InputError, match="encode fails: ZeroDivisionError"):
        swept(mini, space=str(tmp_path / "space.toml"), rows=16, halvings=0, layers=[2])


def test_reference_recipes_lose_nothing(mini, tmp_path):
    (tmp_path / "space.toml").write_text('also = ["reference"]')
    todo, found = swept(mini, space=str(tmp_path / "space.toml"), rows=16, halvings=0)
    assert todo.candidates[0].recipe == Recipe.reference(todo.texts.checkpoint.config)
    assert (found.recall.values == 1).all()
    from rich.console import Console

    render(Console(width=200, file=open(os.devnull, "w")), document(todo, found, {}, {}))  # noqa: SIM115


def test_inputs_made_ahead_of_a_gpu_are_the_same(mini, space):
    """Several threads make made-up texts at once; products may be summed in another order, which is an ulp at most."""
    from dataclasses import replace

    todo = plan(SweepOptions(checkpoint=mini, space=space, length=700, texts=3, rows=8, device="cpu"))
    threads = torch.get_num_threads()
    with search._Reader(replace(todo, device="cuda")) as reader:
        for layer in (2, 4):
            for text in range(3):
                reader.expect(layer, text)
        for layer in (4, 2):
            for text in range(3):
                got, want = reader.take(layer, text), todo.texts.load(layer, text)
                assert (got.key, got.needles, got.order) == (want.key, want.needles, want.order)
                assert torch.allclose(got.x.float(), want.x.float(), rtol=2**-7, atol=1e-6)
    assert torch.get_num_threads() == threads
