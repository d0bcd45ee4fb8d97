"""Gates: syntax, which cases count, and that nothing measured is a failure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcheck.errors import InputError
from diffcheck.gates import Gate


def case(**fields):
    return {
        "layer": 2,
        "precision": "fp8",
        "theta_setting": "checkpoint",
        "what_if": False,
        "verdict": "format",
        "nonfinite": [],
    } | fields


@pytest.mark.parametrize("text", ["jaccard", "jaccard>=", "jaccard => 1", "jaccard>=x", ">=1", "jaccard>=1 2"])
def test_bad_syntax(text):
    with pytest.raises(InputError, match="FIELD OP NUMBER"):
        Gate.parse(text)


def test_unknown_field():
    with pytest.raises(InputError, match="unknown field 'jacard'"):
        Gate.parse("jacard>=0.9")


@pytest.mark.parametrize(
    ("text", "value", "passed"),
    [
        ("jaccard>=0.9", 0.9, True),
        ("jaccard>0.9", 0.9, False),
        ("jaccard<=0.9", 0.9, True),
        ("jaccard<0.9", 0.9, False),
        ("needles_lost == 0", 0, True),
        ("needles_lost == 0", 1, False),
        ("kernel_error<1e-5", 2e-5, False),
    ],
)
def test_comparison(text, value, passed):
    gate = Gate.parse(text)
    assert gate.check([case(**{gate.field: value})], "here").passed is passed


def test_lists_must_hold_in_every_element():
    gate = Gate.parse("needle_rank<64")
    assert not gate.check([case(needle_rank=[3, None, 64])], "here").passed
    assert gate.check([case(needle_rank=[3, None, 63])], "here").passed


def test_nothing_measured_fails():
    gate = Gate.parse("jaccard>=0.9")
    result = gate.check([case(jaccard=None), case(verdict="refused")], "here")
    assert result.measured == 0
    assert not result.passed


def test_probes_count_where_they_have_the_field():
    probe = {"probe": "clustered scores", "backend": "mine", "entries": 262144, "topk_wrong_rows": 4}
    result = Gate.parse("topk_wrong_rows==0").check([case(topk_wrong_rows=0), probe], "here")
    assert result.failed == ["probe of mine, 262144 entries: topk_wrong_rows 4"]
    assert Gate.parse("jaccard>=0.5").check([case(jaccard=0.6), probe], "here").passed


def test_nan_fails():
    result = Gate.parse("kernel_error<1").check([case(kernel_error=None, nonfinite=["kernel_error"])], "here")
    assert not result.passed
    assert "NaN" in result.failed[0]


# ------------------------------------------------------------------------------------ the gate that would have passed


@pytest.mark.parametrize(
    ("text", "values", "passing"),
    [
        ("jaccard>=0.9", [0.87654, 0.95], "jaccard>=0.8765"),
        ("jaccard>0.9", [0.9], "jaccard>=0.9"),
        ("kernel_error<=1e-5", [2.00001e-05, 1e-6], "kernel_error<=0.00002001"),
        ("kernel_error<1e-9", [1.23456e-08], "kernel_error<=1.235e-8"),
        ("needles_lost<=0", [3, 12345], "needles_lost<=12345"),
        ("needles_lost==0", [3, 3], "needles_lost==3"),
        ("needles_lost==0", [3, 0], None),
        ("margin>=1", [-0.00012344], "margin>=-0.0001235"),
    ],
)
def test_the_gate_that_would_have_passed(text, values, passing):
    gate = Gate.parse(text)
    cases = [case(**{gate.field: value}) for value in values]
    result = gate.check(cases, "here")
    assert not result.passed
    assert result.passing == passing
    if passing:
        assert Gate.parse(passing).check(cases, "here").passed


@given(st.lists(st.floats(0, 1), min_size=1), st.sampled_from(["jaccard>=1.1", "jaccard<=-0.1", "jaccard>7"]))
def test_it_passes_for_any_values(values, text):
    cases = [case(jaccard=value) for value in values]
    passing = Gate.parse(text).check(cases, "here").passing
    assert Gate.parse(passing).check(cases, "here").passed


def test_nothing_would_have_passed_a_nan_or_a_failed_case():
    gate = Gate.parse("kernel_error<1")
    for broken in (case(nonfinite=["kernel_error"]), case(verdict="failed", reason="out of memory")):
        result = gate.check([case(kernel_error=2.0), broken], "here")
        assert len(result.failed) == result.measured == 2
        assert result.passing is None
    assert gate.check([case(kernel_error=0.5)], "here").passing is None, "it did pass"


def test_a_failed_case_fails_every_gate():
    result = Gate.parse("jaccard>=0").check([case(jaccard=1.0), case(verdict="failed", reason="no memory")], "here")
    assert result.failed == ["layer 2 fp8 theta checkpoint: no memory"]
