"""Lost attention mass: by hand, its properties, and from a trace to the report."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffcheck import mass as mass_module
from diffcheck.cli import app
from diffcheck.errors import InputError
from diffcheck.inputs.source import choose_queries, load_inputs
from diffcheck.refimpl import IndexerConfig, Trace, save_traces

MASS = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]])


def lost_mass(**arguments):
    return mass_module.lost_mass(mass_module.lost_shares(**arguments))


def test_by_hand():
    """k = 2. Row 0 drops entry 1 (0.3); row 1 drops entries 2 and 3 (0.7); row 2 sees 2 entries and does not count."""
    lost = lost_mass(
        mass=MASS,
        selected=torch.tensor([[0, 2], [0, 1], [-1, -1]]),
        target_selected=torch.tensor([[0, 1], [2, 3], [0, 1]]),
        visible=torch.tensor([3, 4, 2]),
        k=2,
    )
    assert lost.rows == 2
    assert lost.mean == pytest.approx(0.5)
    assert lost.worst == pytest.approx(0.7)
    assert lost.worst_row == 1


def test_rows_without_mass_do_not_count():
    mass = MASS.clone()
    mass[1] = torch.nan
    same = {"visible": torch.tensor([3, 4, 2]), "k": 2, "target_selected": torch.tensor([[0, 1], [2, 3], [0, 1]])}
    lost = lost_mass(mass=mass, selected=torch.tensor([[0, 2], [0, 1], [-1, -1]]), **same)
    assert (lost.rows, lost.worst_row) == (1, 0)
    mass[0] = torch.nan
    assert lost_mass(mass=mass, selected=torch.tensor([[0, 2], [0, 1], [-1, -1]]), **same) is None


@given(st.integers(0, 10_000))
def test_bounds(seed):
    """Nothing is lost of the target's own selection, and all of its mass when nothing of it is kept."""
    rng = torch.Generator().manual_seed(seed)
    mass = torch.rand(3, 12, generator=rng).softmax(1)
    order = torch.rand(3, 12, generator=rng).argsort(1)
    target, other = order[:, :4], order[:, 4:8]
    same = {"mass": mass, "target_selected": target, "visible": torch.full((3,), 12), "k": 4}
    assert lost_mass(selected=target, **same).worst == 0
    everything = lost_mass(selected=other, **same)
    assert everything.mean == pytest.approx(float(mass.gather(1, target).sum(1).mean()), abs=1e-6)
    part = lost_mass(selected=torch.cat((target[:, :2], other[:, :2]), 1), **same)
    assert part.mean == pytest.approx(float(mass.gather(1, target[:, 2:]).sum(1).mean()), abs=1e-6)


@pytest.fixture
def trace(mini, tmp_path):
    """The recorded trace cut to 400 tokens, with a made-up mass for three rows of layer 4: all of it on entry 0."""
    source = Trace.load(mini / "trace.safetensors", layer=4)
    mass = torch.zeros(3, 100)
    mass[:, 0] = 1
    tensors = {"x": source["x"][:400], "qr": source["qr"][:400], "attention_mass": mass}
    tensors["queries"] = torch.tensor([280, 300, 399])
    path = tmp_path / "trace.safetensors"

    def write(**changes):
        kept = {name: t for name, t in (tensors | changes).items() if t is not None}
        save_traces(path, [Trace(kept, layer=4)])
        return path

    return write


def run(mini, path, tmp_path, *arguments):
    out = tmp_path / "out.json"
    command = ["run", "--checkpoint", str(mini), "--trace", str(path), "--layers", "4", "--theta", "checkpoint"]
    app([*command, "--json", str(out), *arguments], standalone_mode=False)
    return json.loads(out.read_text())["cases"]


def test_run_compares_the_rows_that_have_their_mass(mini, trace, tmp_path, capsys):
    reference, broken = run(mini, trace(), tmp_path, "--precision", "reference", "--recipe", recipe(tmp_path))
    assert reference["queries"] == 3
    assert reference["attention_mass_lost"] == 0
    assert broken["attention_mass_rows"] == 3
    lost = broken["attention_mass_lost"]
    assert round(3 * lost) == pytest.approx(3 * lost), "entry 0 is kept or lost in each of the three rows"
    assert "mass" in header(capsys.readouterr().out)


def header(out):
    (line,) = [line for line in out.splitlines() if line.startswith("layer ")]
    return line.split()


def recipe(tmp_path):
    path = tmp_path / "q-only.toml"
    path.write_text("[replace]\nk_hadamard = false\n")
    return str(path)


def test_a_number_of_rows_that_was_asked_for_wins(mini, trace, tmp_path):
    (case,) = run(mini, trace(), tmp_path, "--precision", "fp8", "--queries", "20")
    assert case["queries"] == 20
    chosen = set(choose_queries(400, 64, 20).tolist()) & {280, 300, 399}
    assert 399 in chosen
    assert case["attention_mass_rows"] == len(chosen) < 3, "the other rows chosen have no mass"


def test_without_mass_the_number_is_absent(mini, trace, tmp_path, capsys):
    (case,) = run(mini, trace(attention_mass=None), tmp_path, "--precision", "fp8")
    assert case["attention_mass_lost"] is None
    out = capsys.readouterr().out
    assert "mass" not in header(out)
    assert "attention mass" not in out
    assert case["queries"] > 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": None}, "no tensor layers.4.queries"),
        ({"attention_mass": torch.zeros(3, 99)}, r"has shape \[3, 99\], expected \[3, 100\]"),
        ({"queries": torch.tensor([280, 300, 400])}, r"a position outside 0\.\.399"),
    ],
)
def test_mass_that_does_not_fit(mini, trace, changes, message):
    with pytest.raises(InputError, match=message):
        load_inputs(trace(**changes), IndexerConfig.from_json(mini / "config.json"))
