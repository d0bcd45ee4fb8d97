"""A sweep on a GPU: the CPU's numbers, and the speed of the formats that have a kernel."""

import numpy as np
import pytest

from diffcheck.fixture import write_checkpoint
from diffcheck.grammar import parse_format
from diffcheck.sweeping import speed
from diffcheck.sweeping.result import document
from diffcheck.sweeping.search import SweepOptions, execute, plan

SPACE = 'also = ["qat+e4m3/128/ue8m0", "e4m3/128/fp32", "e2m1/32/ue8m0", "k=bf16,q=e4m3", "int8", "bf16"]'


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return str(path)


def quiet(line):
    pass


@pytest.mark.gpu
def test_the_device_hardly_shows(tmp_path, space):
    """Products are summed in another order there, so an entry at the k-th place may change; a lossless recipe's not."""
    write_checkpoint(tmp_path / "made", like="mini")
    found = {}
    for device in ("cpu", "cuda"):
        todo = plan(SweepOptions(checkpoint=tmp_path / "made", space=space, rows=64, halvings=0, device=device))
        found[device] = execute(todo, quiet).recall.values
    assert (found["cuda"][0] == 1).all()
    assert np.abs(found["cuda"] - found["cpu"]).mean() < 0.005


@pytest.mark.gpu
def test_speed_of_what_has_a_kernel(tmp_path, space):
    write_checkpoint(tmp_path / "flash", like="mini", index_n_heads=64, layers=[2])
    todo = plan(SweepOptions(checkpoint=tmp_path / "flash", space=space, rows=16, halvings=0, device="cuda"))
    speeds = speed.logits_speeds(todo)
    assert set(speeds) == {"qat+e4m3/128/ue8m0", "e4m3/128/fp32", "e2m1/32/ue8m0", "k=bf16,q=e4m3"}
    assert all(record["ms"] > 0 and record["error"] < 5e-6 for record in speeds.values())
    assert speeds["qat+e4m3/128/ue8m0"] == speeds["e4m3/128/fp32"]
    record = {r["name"]: r for r in document(todo, execute(todo, quiet), {}, speeds)["recipes"]}
    assert record["e2m1/32/ue8m0"]["logits"]["layout"] == "e2m1"
    assert record["int8"]["logits"] is None


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("e4m3/128/fp32", "e4m3"),
        ("e4m3/128/ue8m0:nearest", "e4m3"),
        ("e4m3/32/ue8m0", None),
        ("e2m1/32/ue8m0:ties=down", "e2m1"),
        ("e2m1/16/e4m3", None),
        ("bf16", "bf16"),
        ("fp16", None),
        ("int8", None),
    ],
)
def test_layouts(text, layout):
    assert speed.layout(parse_format(text)) == layout
    assert speed.layout(None) is None


def test_a_wrong_result_has_no_speed(tmp_path, space, monkeypatch):
    """What `diffcheck bench` says of a wrong result reaches the sweep's table as a word, never as a time."""
    write_checkpoint(tmp_path / "flash", like="mini", index_n_heads=64, layers=[2])
    todo = plan(SweepOptions(checkpoint=tmp_path / "flash", space=space, rows=16, halvings=0, device="cpu"))
    asked = []

    def fake(names, shapes, formats):
        asked.append((names, shapes, formats))
        yield {"device": "a GPU", "copy_tb_s": 4.0}
        yield {"shape": shapes[0], "format": "e4m3", "backend": "triton", "ms": 0.5, "tb_s": 3.0, "error": 1e-9}
        yield {"shape": shapes[0], "format": "e2m1", "backend": "triton", "wrong": True, "error": 0.1}
        yield {"shape": shapes[0], "format": "bf16", "backend": "triton", "refused": "no"}

    monkeypatch.setattr(speed, "bench", fake)
    speeds = speed.logits_speeds(todo)
    assert asked == [(["triton"], ["decode:64x256"], ["bf16", "e2m1", "e4m3"])]
    assert speeds["e4m3/128/fp32"]["ms"] == 0.5
    assert speeds["e2m1/32/ue8m0"] == {
        "layout": "e2m1", "shape": "decode:64x256", "backend": "triton", "ms": None, "reason": "wrong",
    }  # fmt: skip
    assert speeds["k=bf16,q=e4m3"]["reason"] == "refused"
    assert "bf16" not in speeds  # bf16 queries are not what engines have, so no time stands for them
