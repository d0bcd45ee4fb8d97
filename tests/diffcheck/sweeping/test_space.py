"""Spaces: the default one, products, and what a file may not say."""

import pytest

from diffcheck import Recipe
from diffcheck.errors import InputError
from diffcheck.presets import build
from diffcheck.sweeping.space import default_space, load_space


@pytest.fixture(scope="module")
def config(support):
    return support.config()


def space(tmp_path, text, config):
    path = tmp_path / "space.toml"
    path.write_text(text)
    return load_space(str(path), config)


def test_the_default_space_has_forty_recipes_that_all_differ(config):
    found = load_space("default", config)
    assert len(found) == len({c.recipe.replace(name="") for c in found}) == len({c.name for c in found}) == 40
    assert {c.bytes for c in found} == {66, 68, 76, 100, 132, 256}
    assert found == default_space(config)
    for candidate in found:
        assert build(candidate.name, config) == candidate.recipe
        assert candidate.recipe.q_hadamard == candidate.recipe.k_hadamard


def test_the_default_space_of_narrow_heads(support):
    found = load_space("default", support.config(index_head_dim=64, rope_head_dim=32))
    assert "qat+e4m3/64/ue8m0" in {c.name for c in found}
    assert max(c.bytes for c in found) == 128


def test_a_product(tmp_path, config):
    text = """
    base = "vllm-fp8"
    keys = ["bf16", "e2m1/32/ue8m0:floor,ties=down"]
    queries = ["same", "e4m3/128/fp32", "base"]
    prefixes = ["", "qat+"]
    """
    found = {c.name: c.recipe for c in space(tmp_path, text, config)}
    vllm = Recipe.preset("vllm-fp8", config)
    assert len(found) == 12
    assert not any(r.q_hadamard or r.k_hadamard for r in found.values())
    assert found["k=qat+bf16"].q_format == vllm.q_format
    assert found["k=qat+bf16"].k_fp4
    assert not found["k=qat+bf16"].q_fp4
    both = found["k=qat+e2m1/32/ue8m0:floor,ties=down,q=qat+e4m3/128/fp32"]
    assert (str(both.k_format), str(both.q_format)) == ("e2m1/32/ue8m0:floor,ties=down", "e4m3/128/fp32")


def test_whole_precisions_recipe_files_and_doubles(tmp_path, config):
    (tmp_path / "mine.toml").write_text('name = "fp16-scores"\n[replace]\nround_score = "fp16"\n')
    text = 'keys = ["bf16"]\nalso = ["sglang-fp8", "bf16", "fp8"]\nrecipes = ["mine.toml"]'
    found = space(tmp_path, text, config)
    assert [c.name for c in found] == ["bf16", "sglang-fp8", "fp16-scores"]  # fp8 is sglang-fp8, bf16 is there
    assert found[2].recipe.round_score == "fp16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no recipe"),
        ("keys = 3", "keys is 3, expected a list of strings"),
        ('keys = ["bf16", 1]', "expected a list of strings"),
        ('key = ["bf16"]', "unknown key 'key'"),
        ('base = ["bf16"]\nkeys = ["bf16"]', "base is"),
        ('base = "fp9"\nkeys = ["bf16"]', r"space.toml: .*'fp9', column 3"),
        ('keys = ["e4m3/128/fp23"]', r"space.toml: .*column 12"),
        ('keys = ["bf16"]\nprefixes = ["qatt+"]', "prefix 'qatt\\+', expected some of qat\\+"),
        ('keys = ["bf16"]\nqueries = ["base"]\nprefixes = ["nohad+"]', "rotation of the keys alone"),
        ('keys = ["bf16"]\nqueries = ["bf17"]', "column 13"),
        ("keys = [", "not readable as TOML"),
        ('recipes = ["absent.toml"]', "absent.toml: no such file"),
    ],
)
def test_what_is_refused(tmp_path, config, text, message):
    with pytest.raises(InputError, match=message):
        space(tmp_path, text, config)


def test_two_recipes_of_one_name(tmp_path, config):
    (tmp_path / "bf16.toml").write_text("[replace]\nrelu = false\n")
    with pytest.raises(InputError, match="two recipes are called 'bf16'"):
        space(tmp_path, 'keys = ["bf16"]\nrecipes = ["bf16.toml"]', config)
    with pytest.raises(InputError, match=r"no such file, expected default or a TOML file"):
        load_space("defaults", config)
