"""Theta settings, case lists and recipe files."""

import pytest

from diffcheck.cases import ThetaSetting, build_cases, load_recipe
from diffcheck.formats import Format
from diffcheck.recipe import Recipe
from diffcheck.refimpl import V4_FLASH, InputError


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "abc", "", "10000:yarn", "10000:", "checkpoint:noyarn"])
def test_bad_theta(text):
    with pytest.raises(InputError, match="--theta"):
        ThetaSetting.parse(text)


def test_theta_replaces_both_sides_and_keeps_yarn():
    recipe = Recipe.reference(V4_FLASH)
    changed = ThetaSetting.parse("1e4").apply(recipe)
    assert (changed.q_theta, changed.k_theta) == (10000.0, 10000.0)
    assert changed.q_yarn == changed.k_yarn == V4_FLASH.yarn
    bare = ThetaSetting.parse("40000:noyarn").apply(recipe)
    assert (bare.k_theta, bare.q_yarn, bare.k_yarn) == (40000.0, None, None)


def test_cases_are_the_product_and_know_what_is_a_what_if():
    cases = build_cases(V4_FLASH, ["reference", "fp8", "fp8"], ["checkpoint", "160000", "10000"], [])
    assert [(c.precision, c.theta.label, c.what_if) for c in cases] == [
        ("reference", "checkpoint", False),
        ("reference", "160000", False),
        ("reference", "10000", True),
        ("fp8", "checkpoint", False),
        ("fp8", "160000", False),
        ("fp8", "10000", True),
    ]


def test_unknown_precision_names_the_known_ones():
    with pytest.raises(InputError, match=r"fp9.*sglang-fp8"):
        build_cases(V4_FLASH, ["fp9"], ["checkpoint"], [])


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_recipe_file(tmp_path):
    path = write(
        tmp_path,
        """
        base = "sglang-fp8"
        [replace]
        theta = 40000
        k_hadamard = false
        k_format = { element = "e2m1", block = 16, scale = "e4m3" }
        """,
    )
    recipe = load_recipe(path, V4_FLASH)
    base = Recipe.preset("sglang-fp8", V4_FLASH)
    assert recipe.name == "mine"
    assert recipe.differences(base) == {
        "q_theta": 40000.0,
        "k_theta": 40000.0,
        "k_hadamard": False,
        "k_format": Format(element="e2m1", block=16, scale="e4m3"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not readable as TOML"),
        ("bass = 1", "unknown key 'bass'"),
        ('base = "fp9"', "unknown precision"),
        ("[replace]\nhadamrad = true", "unknown recipe field 'hadamrad'"),
        ("[replace]\nhadamard = 1", "hadamard is 1, expected a value like True"),
        ('[replace]\npairing = "odd"', "expected one of"),
        ("[replace]\ntheta = -1", "expected > 0"),
        ('[replace]\nk_format = "e9m9"', "format 'e9m9', column 2 \\('9'\\): expected one of e4m3"),
        ('[replace]\nk_format = { element = "e4m3", size = 3 }', "expected a table with keys"),
        ('[replace]\nk_format = "e4m3/96/fp32"', "k_format is e4m3/96/fp32, expected a block that divides"),
        ('[replace]\nfp4_format = { element = "e2m1", block = 48, scale = "ue8m0" }', "q_fp4_format is e2m1/48/ue8m0"),
        ("[replace]\nyarn = { factor = 2 }", "lacks 'beta_fast'"),
        ("[replace]\nk = true", "expected a value like 512"),
    ],
)
def test_bad_recipe_file(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as error:
        load_recipe(write(tmp_path, text), V4_FLASH)
    assert "\n" not in str(error.value)


def test_recipe_file_name_must_be_new(tmp_path):
    path = write(tmp_path, 'name = "fp8"')
    with pytest.raises(InputError, match="is taken"):
        build_cases(V4_FLASH, ["fp8"], ["checkpoint"], [path])


def test_absent_recipe_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_recipe(tmp_path / "none.toml", V4_FLASH)
