"""Trace files: what is written comes back, what cannot be read is refused with a reason.

All comparisons are of equal bits.
"""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from diffcheck import Recipe, evaluate
from diffcheck.refimpl import (
    KEY_STAGES,
    QUERY_STAGES,
    STAGES,
    InputError,
    Trace,
    load_traces,
    run_indexer,
    save_traces,
)


@pytest.fixture(scope="module")
def trace(support):
    cfg = support.config()
    return run_indexer(cfg, support.weights(cfg), *support.inputs(cfg, 22), queries=torch.tensor([21, 5]))


def test_round_trip(support, trace, tmp_path):
    trace.save(tmp_path / "t.safetensors")
    back = Trace.load(tmp_path / "t.safetensors")
    assert set(back) == set(trace) == {*STAGES, "x", "qr", "queries"}
    for name, tensor in trace.items():
        support.assert_same_bits(back[name], tensor, name)
    assert back.queries.tolist() == [21, 5]
    assert (back.layer, back.start, back.state, back.shared) == (0, 0, None, {})
    assert back.metadata["schema"] == "diffcheck-trace-1"


def test_the_layout_on_disk(trace, tmp_path):
    layer = Trace(dict(trace), layer=7, metadata={"model": "m"}, shared={"needle_queries": torch.tensor([1])})
    layer.save(tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert set(file.keys()) == {f"layers.7.{name}" for name in trace} | {"needle_queries"}
        assert file.metadata() == {"schema": "diffcheck-trace-1", "start_position": "0", "model": "m"}


def test_several_layers_and_what_they_share(support, trace, tmp_path):
    path = tmp_path / "t.safetensors"
    shared = {"needle_queries": torch.tensor([5, 21]), "somebody's own": torch.ones(2)}
    layers = [
        Trace({**trace, "x": trace["x"] + n, "unheard_of": torch.tensor([n])}, layer=n, start=8, shared=shared)
        for n in (2, 40)
    ]
    save_traces(path, layers)
    back = load_traces(path)
    assert sorted(back) == [2, 40]
    for n, layer in back.items():
        assert layer.layer == n
        assert layer.start == 8
        assert layer.entry_start == 2
        assert set(layer.shared) == set(shared)
        assert layer["unheard_of"].tolist() == [n]
        support.assert_same_bits(layer["x"], trace["x"] + n, "x")
    assert list(load_traces(path, [40])) == [40]
    assert Trace.load(path, 2).layer == 2
    with pytest.raises(InputError, match=r"holds layers \[2, 40\]"):
        Trace.load(path)
    with pytest.raises(InputError, match=r"no layer \[3\].*holds \[2, 40\]"):
        Trace.load(path, 3)


def test_layers_of_one_file_start_together(trace, tmp_path):
    with pytest.raises(AssertionError, match="one position"):
        save_traces(tmp_path / "t", [Trace(dict(trace)), Trace(dict(trace), start=4)])


@pytest.mark.parametrize("name", ["ideal", "vllm-fp8", "transformers", "sglang-fp8"])
def test_stages_that_a_recipe_skips_can_be_saved(support, tmp_path, name):
    """They are one tensor under two names, which safetensors refuses."""
    cfg = support.config()
    got = evaluate(Recipe.preset(name, cfg), cfg, support.weights(cfg), *support.inputs(cfg, 9))
    got.save(tmp_path / "t.safetensors")
    back = Trace.load(tmp_path / "t.safetensors")
    for stage in STAGES:
        support.assert_same_bits(back[stage], got[stage], stage)


def test_views_and_special_types_are_saved(support, tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "x": base[:2],
        "qr": base[2:],
        "q": base.T,
        "pages": torch.arange(5, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scores": torch.tensor([-torch.inf, torch.nan, -0.0]).bfloat16(),
        "topk": torch.empty(0, 3, dtype=torch.int64),
        "gate": torch.empty(0, 3),
    }
    Trace(tensors).save(tmp_path / "t.safetensors")
    back = Trace.load(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        support.assert_same_bits(back[name], tensor.contiguous(), name)


def test_queries_default_to_all_tokens_from_the_start():
    assert Trace({"x": torch.zeros(3, 4)}, start=10).queries.tolist() == [10, 11, 12]
    assert Trace({"x": torch.zeros(3, 4), "queries": torch.tensor([11], dtype=torch.int32)}, start=10).queries.equal(
        torch.tensor([11])
    )


def test_a_trace_is_a_mapping():
    trace = Trace({"x": torch.zeros(3, 4)}, layer=3)
    assert list(trace) == ["x"]
    assert len(trace) == 1
    assert "q" not in trace
    assert "layer=3" in repr(trace)
    assert "x [3, 4]" in repr(trace)
    with pytest.raises(KeyError):
        trace["q"]


def test_stage_names():
    assert (
        *("q", "q_rope", "q_hadamard", "q_quant", "pool", "k_norm", "k_rope", "k_hadamard", "k_quant"),
        *("gate", "scores", "topk"),
    ) == STAGES
    assert set(QUERY_STAGES) | set(KEY_STAGES) == set(STAGES)
    assert not set(QUERY_STAGES) & set(KEY_STAGES)


def write(path, metadata, names=("layers.0.x",)):
    save_file({name: torch.zeros(2, 2) for name in names}, path, metadata=metadata)


def test_what_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    with pytest.raises(InputError, match="no such file"):
        Trace.load(path)
    with pytest.raises(InputError, match="no such file"):
        Trace.load(tmp_path)
    for content in (b"", b"not safetensors", b"\xff" * 8, b"\x10" + b"\0" * 7 + b'{"a": 1}'):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not readable as safetensors"):
            Trace.load(path)
    write(path, {"schema": "diffcheck-trace-2"})
    with pytest.raises(InputError, match="schema is 'diffcheck-trace-2', expected 'diffcheck-trace-1'"):
        Trace.load(path)
    write(path, None)
    with pytest.raises(InputError, match="schema is None"):
        Trace.load(path)
    for start in ("-4", "x", "1.5", ""):
        write(path, {"schema": "diffcheck-trace-1", "start_position": start})
        with pytest.raises(InputError, match="start_position is"):
            Trace.load(path)
    write(path, {"schema": "diffcheck-trace-1"}, names=("layer.0.x", "layers.x.x", "x"))
    with pytest.raises(InputError, match="no layer"):
        Trace.load(path)


def test_a_truncated_file_is_refused(trace, tmp_path):
    path = tmp_path / "t.safetensors"
    trace.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="not readable as safetensors"):
        Trace.load(path)


def test_a_file_holds_one_trace_a_layer(trace, tmp_path):
    with pytest.raises(AssertionError, match="one trace a layer"):
        save_traces(tmp_path / "two.safetensors", [trace, trace])
