"""assert_stage_close: the rule at its edges, and what its messages name."""

import math

import pytest
import torch

from diffcheck.testing import assert_stage_close

WANT = torch.full((20, 100), 1.0).bfloat16()  # 2000 elements; one bf16 ulp above 1 is 2^-7
ULP = 2.0**-7


def changed(count, ulps):
    got = WANT.clone()
    got.view(-1)[:count] = 1 + ulps * ULP
    return got


def message(got, want=WANT, **options):
    with pytest.raises(AssertionError) as caught:
        assert_stage_close(got, want, stage="k_norm", **options)
    return str(caught.value)


@pytest.mark.parametrize(("count", "ulps", "close"), [(100, 1, True), (101, 1, False), (20, 2, True), (21, 2, False)])
def test_five_per_cent_unequal_and_one_per_cent_off_by_more_than_an_ulp(count, ulps, close, capsys):
    if close:
        assert_stage_close(changed(count, ulps), WANT, stage="k_norm")
        assert capsys.readouterr().out.startswith(f"k_norm: {count / 2000:.3%} of 2000 elements unequal, ")
    else:
        assert "allowed: 5% and 1%" in message(changed(count, ulps))


def test_it_is_rounded_to_the_expected_dtype_first():
    assert_stage_close(WANT.float() + 0.4 * ULP, WANT)
    assert "100.000% of 2000 elements unequal" in message(WANT.float() + 0.6 * ULP)
    assert "100.000% by more than one float32 ulp" in message(WANT.float() + 1e-6, WANT.float())


def test_a_relative_error_instead():
    got = WANT.float() * 1.001
    assert_stage_close(got, WANT.float(), rel=1.01e-3)
    text = message(got, WANT.float(), rel=0.99e-3)
    assert "relative error 0.001; allowed: relative error 0.00099" in text
    assert_stage_close(torch.zeros(2, 2), torch.zeros(2, 2), rel=0.0)
    assert "relative error inf" in message(torch.ones(2, 2), torch.zeros(2, 2), rel=1.0)
    assert "relative error nan" in message(torch.full((2, 2), math.nan), torch.ones(2, 2), rel=1.0)


def test_first_and_worst_and_where():
    got = WANT.clone()
    got[3:8, 64:] = 1 + 4 * ULP
    got[5, 70] = 3.0
    assert message(got).splitlines() == [
        "k_norm: 9.000% of 2000 elements unequal, 9.000% by more than one bfloat16 ulp, relative error 0.0457; "
        "allowed: 5% and 1%",
        "  first at [3, 64]: got 1.03125, expected 1 (4 ulp)",
        "  worst at [5, 70]: got 3, expected 1 (256 ulp)",
        "  rows 3 to 7 (5 of 20) hold all of them",
        "  columns 64 to 99 (36 of 100) hold all of them",
    ]


def test_nan_and_infinity():
    special = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]])
    assert_stage_close(special, special)
    for column, value in ((0, 1.0), (1, 1.0), (1, -math.inf), (3, math.nan), (3, math.inf)):
        got = special.clone()
        got[0, column] = value
        text = message(got, special)
        assert f"worst at [0, {column}]" in text
    got = WANT.clone()
    got.view(-1)[:21] = math.nan
    assert "1.050% by more than one bfloat16 ulp" in message(got)


def test_only_visible_scores():
    want = torch.ones(3, 8)
    got = want.clone()
    got[0, 2:] = math.nan
    got[2] = 9.0
    assert_stage_close(got, want, visible=torch.tensor([2, 8, 0]))
    assert "rows 0 to 0 (1 of 3)" in message(got, want, visible=torch.tensor([3, 8, 0]))


def test_shapes_and_types():
    assert message(WANT[:5]) == "k_norm: shape [5, 100], expected [20, 100]"
    with pytest.raises(ValueError, match="expected floats"):
        assert_stage_close(WANT.int(), WANT)
    with pytest.raises(ValueError, match=r"visible \[3\] for \[20, 100\]"):
        assert_stage_close(WANT, WANT, visible=torch.zeros(3))


def test_three_dimensions():
    want = torch.ones(4, 2, 16).bfloat16()
    got = want.clone()
    got[1, 1, 8:] = 2
    text = message(got, want)
    assert "first at [1, 1, 8]: got 2, expected 1 (128 ulp)" in text
    assert "columns 8 to 15 (8 of 16)" in text
