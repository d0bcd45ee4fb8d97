"""Every fault of the harnesses is named, nothing harmless is flagged; rates over more seeds and lengths: table.py.

What is observed alternates between faults, so that each kind of evidence meets each kind of fault somewhere.
"""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

from diffcheck import Recipe
from diffcheck.checkpoint.inspect import inspect_checkpoint
from diffcheck.diagnose import diagnose
from diffcheck.pipeline import Pipeline
from diffcheck.presets import CHANGES
from diffcheck.refimpl import Trace

_spec = importlib.util.spec_from_file_location(
    "pipeline_faults", Path(__file__).parents[3] / "fixtures" / "faults" / "pipeline_faults.py"
)
if "pipeline_faults" not in sys.modules:
    sys.modules["pipeline_faults"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["pipeline_faults"])
HARNESS = sys.modules["pipeline_faults"]
FAULTS, BENIGN, EVIDENCE = HARNESS.FAULTS, HARNESS.BENIGN, HARNESS.EVIDENCE
WEAK = {"query one token on", "eps 1e-3", "ape in bf16", "gates in bf16", "scores in bf16"}
"""Faults that move too few entries of so short a text to be told apart from indices alone."""
WHICH = dict(zip([f.name for f in FAULTS], itertools.cycle(["all", "ends", "scores", "topk", "ends"]), strict=False))
GEOMETRY = dict(zip([f.name for f in FAULTS], itertools.cycle(["trained", "made-up"]), strict=False))

GEOMETRY["gates in bf16"] = "made-up"  # with 32 heads the gate's constant is a power of two


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_first(geometries, tmp_path, fault):
    setup = geometries[GEOMETRY[fault.name]]
    evidence = "ends" if fault.name in WEAK else WHICH[fault.name]
    path = tmp_path / "trace.safetensors"
    HARNESS.write(path, setup, fault.recipe(setup.config), EVIDENCE[evidence], rows=32)
    found = diagnose(setup.checkpoint, path, recipe=fault.declared).findings
    assert [f.cause for f in found] == [fault.cause]
    (finding,) = found
    assert finding.explained > 0.99
    assert finding.runner_up_explained is None or finding.runner_up_explained <= finding.explained
    assert finding.layer == setup.layer
    changed = fault.recipe(setup.config).differences(Recipe.preset(fault.declared, setup.config))
    if finding.field in changed:
        assert finding.value == changed[finding.field]
    assert finding.sentence.startswith(f"layer {setup.layer}: first wrong stage {finding.stage} (")


@pytest.mark.parametrize("evidence", ["scores", "topk"])
def test_a_theta_in_no_list_at_a_long_text(tmp_path, evidence):
    """Where all that is left is narrow valleys, close pairs of query and key lead to it."""
    setup = HARNESS.trained(1501, 2)
    path = tmp_path / "trace.safetensors"
    recipe = Recipe.reference(setup.config).replace(theta=27500.0)
    HARNESS.write(path, setup, recipe, EVIDENCE[evidence], rows=48)
    (finding,) = diagnose(setup.checkpoint, path, recipe="reference").findings
    assert (finding.cause, finding.field) == ("theta", "theta")
    assert finding.value == pytest.approx(27500.0, rel=1e-3)


@pytest.mark.parametrize("case", BENIGN, ids=lambda case: case.name)
@pytest.mark.parametrize("evidence", ["all", "topk"])
def test_what_is_harmless_is_not_flagged(geometries, tmp_path, case, evidence):
    setup = geometries["trained"]
    path = tmp_path / "trace.safetensors"
    recipe = Recipe.preset(case.runs, setup.config).replace(**case.changes)
    HARNESS.write(path, setup, recipe, EVIDENCE[evidence], rows=32, change=case.change)
    for declared in (case.declared, None):
        assert [f.sentence for f in diagnose(setup.checkpoint, path, recipe=declared).findings] == []


@pytest.mark.parametrize("preset", ["reference", "bf16", *CHANGES])
def test_presets_are_no_faults(geometries, tmp_path, preset):
    """Declared or not; undeclared, another recipe is information."""
    setup = geometries["made-up"]
    path = tmp_path / "trace.safetensors"
    HARNESS.write(path, setup, Recipe.preset(preset, setup.config), EVIDENCE["ends"], rows=32)
    assert diagnose(setup.checkpoint, path, recipe=preset).findings == []
    found = diagnose(setup.checkpoint, path)
    assert found.findings == []
    if preset != "reference":
        assert any(note.startswith(f"runs {preset}'s recipe") for note in found.layers[0].notes)


def test_an_undeclared_preset_excuses_no_structure(geometries, tmp_path):
    setup = geometries["trained"]
    path = tmp_path / "trace.safetensors"
    recipe = Recipe.preset("vllm-fp8", setup.config).replace(theta=40000.0)
    for evidence in ("ends", "scores"):
        HARNESS.write(path, setup, recipe, EVIDENCE[evidence], rows=32)
        (finding,) = diagnose(setup.checkpoint, path).findings
        assert (finding.cause, finding.field, finding.value) == ("theta", "theta", 40000.0)


@pytest.mark.parametrize(
    ("changes", "causes"),
    [
        ({"theta": 40000.0, "relu": False}, {"theta", "relu"}),
        ({"ape": False, "k_hadamard": False}, {"ape", "hadamard_k"}),
        ({"q_slice": "first", "overlap": False}, {"slice", "overlap"}),
        ({"k_position": "last", "mask_shift": 3}, {"position", "mask"}),
    ],
)
@pytest.mark.parametrize("evidence", ["ends", "scores"])
def test_two_faults_are_both_named(geometries, tmp_path, changes, causes, evidence):
    setup = geometries["trained"]
    path = tmp_path / "trace.safetensors"
    HARNESS.write(path, setup, Recipe.reference(setup.config).replace(**changes), EVIDENCE[evidence], rows=32)
    assert {f.cause for f in diagnose(setup.checkpoint, path, recipe="reference").findings} == causes


@pytest.mark.parametrize(
    "kernel", ["drops winners", "loses slots", "zeros past an offset", "reads unwritten rows", "all-zero rows"]
)
def test_broken_kernels(broken_kernel, tmp_path, kernel):
    setup = HARNESS.trained(1100, 1)
    spoil, _, cause = broken_kernel.KERNELS[kernel]
    trace = setup.pipeline(setup.queries(48)).trace(Recipe.reference(setup.config))
    path = tmp_path / "trace.safetensors"
    Trace(
        {n: t for n, t in spoil(trace).items() if n in (*EVIDENCE["ends"], "x", "qr", "queries")}, layer=setup.layer
    ).save(path)
    assert [f.cause for f in diagnose(setup.checkpoint, path, recipe="reference").findings] == [cause]


def test_winners_are_dropped_although_no_score_was_seen(geometries, broken_kernel, tmp_path):
    setup = geometries["trained"]
    trace = setup.pipeline(setup.queries(48)).trace(Recipe.reference(setup.config))
    spoilt = broken_kernel.drops_winners(trace)["topk"]
    path = tmp_path / "trace.safetensors"
    tensors = {"x": trace["x"], "qr": trace["qr"], "queries": trace["queries"], "observed_topk": spoilt}
    Trace(tensors, layer=setup.layer).save(path)
    assert [f.cause for f in diagnose(setup.checkpoint, path, recipe="reference").findings] == ["topk_drop"]


def test_entries_of_another_request(pipeline_faults, broken_kernel, tmp_path):
    first, second = pipeline_faults.trained(440, 1), pipeline_faults.trained(640, 2)
    traces = [s.pipeline(s.queries(32)).trace(Recipe.reference(s.config)) for s in (first, second)]
    path = tmp_path / "trace.safetensors"
    broken_kernel.cross_request(*traces, 4).save(path)
    found = diagnose(first.checkpoint, path, recipe="reference").findings
    assert [f.cause for f in found] == ["cross_request"]


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "bf16"])
@pytest.mark.parametrize(
    "writer",
    [
        "right",
        "token-interleaved",
        "16x16 tiled",
        "permuted in pages",
        "zeros past an offset",
        "rows never written",
        "stale page",
    ],
)
def test_pages(page_writer, tmp_path, name, writer):
    if name == "bf16" and writer == "token-interleaved":
        pytest.skip("bf16 entries have no scale to interleave")
    setup = HARNESS.trained(1100, 1)
    preset = {"e4m3": "vllm-fp8", "e2m1": "vllm-mxfp4", "bf16": "reference"}[name]
    recipe = Recipe.preset(preset, setup.config)
    pipeline = setup.pipeline(setup.queries(24))
    keys = pipeline.stage(recipe, "k_quant" if name == "bf16" else "k_hadamard")
    pages, table = page_writer.pages_of(keys, name, seed=3)
    expected = []
    if writer != "right":
        spoil, _, cause = page_writer.WRITERS[writer]
        pages, expected = spoil(pages, table, name, torch.Generator().manual_seed(1)), [cause]
    if writer == "zeros past an offset" and int(table.max()) < len(pages) - 3:
        pytest.skip("no page of this text lies there")
    path = tmp_path / "trace.safetensors"
    tensors = {"x": setup.x, "qr": setup.qr, "queries": pipeline.queries, "pages": pages, "block_table": table}
    Trace(tensors, layer=setup.layer).save(path)
    for declared in (preset, None):
        found = diagnose(setup.checkpoint, path, recipe=declared)
        assert [f.cause for f in found.findings] == expected
    if writer in ("right", "token-interleaved", "16x16 tiled"):
        order = "planar" if writer == "right" else writer
        assert any(f"pages: {name} {order}," in note for note in found.layers[0].notes)


def test_pages_of_another_layer(pipeline_faults, page_writer, tmp_path):
    setup = pipeline_faults.trained(640, 1)
    foreign = pipeline_faults.trained(640, 1, layer=2)
    recipe = Recipe.preset("vllm-fp8", setup.config)
    keys = Pipeline(foreign.config, foreign.weights, foreign.x, foreign.qr).stage(recipe, "k_hadamard")
    pages, table = page_writer.pages_of(keys, "e4m3", seed=1)
    path = tmp_path / "trace.safetensors"
    from diffcheck.refimpl import save_traces

    mine = {"x": setup.x, "qr": setup.qr, "pages": pages, "block_table": table}
    save_traces(path, [Trace(mine, layer=4), Trace({"x": foreign.x, "qr": foreign.qr}, layer=2)])
    found = [f for f in diagnose(setup.checkpoint, path, recipe="vllm-fp8").findings if f.layer == 4]
    assert [(f.cause, f.value) for f in found] == [("foreign_layer", "2")]


@pytest.mark.parametrize(
    "name", ["scale bytes as numbers", "default index_topk", "missing tensor", "unmapped tensor", "missing shard"]
)
def test_loader_faults(directories, mini, tmp_path, name):
    import shutil

    spoil, number = directories.DIRECTORIES[name]
    directory = tmp_path / "checkpoint"
    shutil.copytree(mini, directory)
    assert inspect_checkpoint(directory).findings == ()
    spoil(directory)
    found = inspect_checkpoint(directory).to_json()["findings"]
    assert number in {f["fault"] for f in found}
    assert all(f["cause"] in ("scale_bytes", "k", "unknown") for f in found)
