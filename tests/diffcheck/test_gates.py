"""Gates: syntax, which cases count, and that nothing measured is a failure."""

import pytest

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
    assert gate.check([case(**{gate.field: value})], what_if=False).passed is passed


def test_what_if_counts_only_when_asked():
    cases = [case(jaccard=1.0), case(jaccard=0.1, what_if=True)]
    gate = Gate.parse("jaccard>=0.9")
    assert gate.check(cases, what_if=False).passed
    assert not gate.check(cases, what_if=True).passed


def test_lists_must_hold_in_every_element():
    gate = Gate.parse("needle_rank<64")
    assert not gate.check([case(needle_rank=[3, None, 64])], what_if=False).passed
    assert gate.check([case(needle_rank=[3, None, 63])], what_if=False).passed


def test_nothing_measured_fails():
    gate = Gate.parse("jaccard>=0.9")
    result = gate.check([case(jaccard=None), case(verdict="refused")], what_if=False)
    assert result.measured == 0
    assert not result.passed


def test_probes_count_where_they_have_the_field():
    probe = {"probe": "clustered scores", "backend": "mine", "entries": 262144, "topk_wrong_rows": 4}
    result = Gate.parse("topk_wrong_rows==0").check([case(topk_wrong_rows=0), probe], what_if=False)
    assert result.failed == ["probe of mine, 262144 entries: topk_wrong_rows 4"]
    assert Gate.parse("jaccard>=0.5").check([case(jaccard=0.6), probe], what_if=False).passed


def test_nan_fails():
    result = Gate.parse("kernel_error<1").check([case(kernel_error=None, nonfinite=["kernel_error"])], what_if=False)
    assert not result.passed
    assert "NaN" in result.failed[0]
