"""Strength at 50 %: the crossing, its interval, and that faults and formats move it the way they must."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from diffcheck import load_layer
from diffcheck.cases import build_cases
from diffcheck.cli import app
from diffcheck.errors import InputError
from diffcheck.needle.marginal import Sweep, evaluate_sweep, rising, strength_at_half, sweep
from diffcheck.needle.marginal_report import parse_strengths
from diffcheck.refimpl import Trace


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=12))
def test_rising_is_scipys_isotonic_regression(pairs):
    values, weights = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    assert rising(values, weights) == pytest.approx(isotonic_regression(values, weights=weights).x, abs=1e-9)


def curve(*shares, trials=100):
    """found bool [strengths, trials] with these shares."""
    return np.arange(trials)[None, :] < np.round(np.array(shares) * trials)[:, None]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0, 0, 1, 1), 0.5),
        ((0, 0.25, 0.75, 1), 0.5),
        ((0, 0.4, 0.6, 1), 0.5),
        ((0, 0.0, 0.8, 1), 0.625),
        ((0.5, 0.6, 0.7, 1), -1.0),
        ((0, 0.6, 0.2, 1), 0 + (0.5 - 0.4) / (1 - 0.4) + 1),
        ((0, 0.5, 0.5, 1), 0.0),
        ((0, 0, 0.2, 0.5), 2.0),
        ((0, 0, 0, 0.4), None),
        ((0.6, 0.7, 1, 1), None),
    ],
)
def test_crossing_by_hand(shares, expected):
    """Strengths -1, 0, 1, 2; the sixth curve falls from 0.6 to 0.2 and is levelled to 0.4 in both."""
    found = curve(*shares)
    got = strength_at_half((-1, 0, 1, 2), found, np.ones_like(found))
    assert got == (None if expected is None else pytest.approx(expected))


def test_needles_that_could_not_be_planted_do_not_count():
    found = curve(0, 0.5, 1)
    planted = np.ones_like(found)
    planted[1, 50:] = False
    assert strength_at_half((0, 1, 2), found, planted) == pytest.approx(0.5), "of those planted at 1 all are selected"
    planted[1] = False
    assert strength_at_half((0, 1, 2), found, planted) == pytest.approx(1.0), "between 0 and 2, nothing known at 1"


def made(shift, trials=60, seed=0):
    """A sweep of trials with thresholds of their own, the deployment's higher by `shift`."""
    strengths = tuple(np.linspace(-1, 2, 31))
    threshold = np.random.default_rng(seed).normal(0.4, 0.2, trials)
    levels = np.array(strengths)[:, None]
    return Sweep(
        strengths=strengths,
        planted=torch.ones(31, trials, dtype=torch.bool),
        selected={
            ("reference", "checkpoint"): torch.from_numpy(levels >= threshold),
            ("fp8", "checkpoint"): torch.from_numpy(levels >= threshold + shift),
        },
    )


def test_a_shift_is_recovered_with_a_narrow_paired_interval():
    reference, fp8 = evaluate_sweep(made(0.3))
    assert reference["shift"] == 0
    assert reference["strength_50"] == pytest.approx(0.4, abs=0.1)
    assert fp8["shift"] == pytest.approx(0.3, abs=0.06)
    low, high = fp8["shift_ci"]
    assert low > 0.2
    assert high - low < fp8["strength_50_ci"][1] - fp8["strength_50_ci"][0], "pairing takes the needles' spread out"


def test_no_crossing_has_no_interval():
    _, lost = evaluate_sweep(made(9.0))
    assert lost["strength_50"] is lost["shift"] is lost["shift_ci"] is None
    assert max(lost["p_selected"]) == 0


def test_on_trained_hidden_states(mini, tmp_path):
    """P goes from 0 to 1 across the k-th place for the reference; without Hadamard on the keys it stays low."""
    config, weights = load_layer(mini, 4)
    trace = Trace.load(mini / "trace.safetensors", layer=4)
    (tmp_path / "q-only.toml").write_text("[replace]\nk_hadamard = false\n")
    cases = build_cases(config, ["fp8"], ["checkpoint"], [tmp_path / "q-only.toml"])
    found = sweep(config, weights, trace["x"][:2000], trace["qr"][:2000], cases, trials=8, strengths=(-0.3, 0.0, 1.0))
    reference, fp8, broken = evaluate_sweep(found)
    assert reference["trials"][0] >= 7
    for record in (reference, fp8):
        assert record["p_selected"][0] == 0
        assert record["p_selected"][-1] == 1
        # -0.1: at strength 0 six of the eight are selected, and the crossing is interpolated from none at -0.3
        assert -0.1 <= record["strength_50"] < 0.6
    assert broken["p_selected"][-1] < 0.5, "chance is 64 of 500 entries"


def test_command(mini, tmp_path, capsys):
    out = tmp_path / "out.json"
    trace = Trace.load(mini / "trace.safetensors", layer=4)
    Trace({"x": trace["x"][:600], "qr": trace["qr"][:600]}, layer=4).save(tmp_path / "short.safetensors")
    arguments = ["marginal", "--checkpoint", mini, "--trace", tmp_path / "short.safetensors", "--layers", "4"]
    arguments += ["--precision", "fp4", "--trials", "4", "--strengths=-0.4,0,1", "--json", out]
    app([str(a) for a in arguments], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "at 50 %" in printed
    records = json.loads(out.read_text())["records"]
    assert [(r["layer"], r["precision"]) for r in records] == [(4, "reference"), (4, "fp4")]
    assert records[1]["strengths"] == [-0.4, 0, 1]
    assert len(records[1]["p_selected"]) == 3


@pytest.mark.parametrize("text", ["", "1", "1,0", "0,0", "a,b", "0,inf"])
def test_bad_strengths(text):
    with pytest.raises(InputError, match="expected at least two rising numbers"):
        parse_strengths([part for part in text.split(",") if part])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "1"], "expected at least 2"),
        (["--length", "300", "--trace", "x"], "exclude each other"),
        (["--length", "200"], "more than index_topk"),
    ],
)
def test_bad_options(mini, arguments, message):
    with pytest.raises(InputError, match=message):
        app(["marginal", "--checkpoint", str(mini), "--layers", "4", *arguments], standalone_mode=False)
