"""Precisions spelled out: what each spelling means, every built-in format there and back, and where errors point."""

import itertools
import re

import pytest

from diffcheck import Recipe
from diffcheck.errors import InputError
from diffcheck.formats import BF16, E2M1_REFERENCE, ELEMENTS, PLAIN_BYTES, Format
from diffcheck.grammar import Side, default_format, parse_format, parse_precision, parse_storage, split_precisions
from diffcheck.presets import CHANGES, PRECISIONS, build

E4M3 = Format(element="e4m3", block=128, scale="fp32")
E4M3_P = Format(element="e4m3", block=128, scale="ue8m0")


@pytest.fixture(scope="module")
def config(support):
    return support.config()


def test_every_format_is_read_as_it_is_shown():
    options = itertools.product(
        ELEMENTS, (16, 32, 128), ("fp32", "ue8m0", "e4m3"), ("ceil", "floor", "nearest"), ("even", "down"),
        (1e-4, 0.0, E2M1_REFERENCE.amax_floor, 1e-12), (False, True),
    )  # fmt: skip
    count = 0
    for element, block, scale, rule, ties, floor, reciprocal in options:
        fmt = Format(
            element=element, block=block, scale=scale, rule=rule if scale == "ue8m0" else "ceil", ties=ties,
            amax_floor=floor, reciprocal=reciprocal,
        )  # fmt: skip
        assert parse_format(str(fmt)) == fmt
        count += 1
    assert count == 7 * 3 * 3 * 3 * 2 * 4 * 2
    for plain in PLAIN_BYTES:
        assert parse_format(plain) == Format(element=plain)


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("e4m3", E4M3),
        ("int8", Format(element="int8", block=128, scale="fp32")),
        ("e2m3", Format(element="e2m3", block=32, scale="ue8m0")),
        ("e3m2/32/ue8m0", Format(element="e3m2", block=32, scale="ue8m0")),
        ("e2m1/16/e4m3", Format(element="e2m1", block=16, scale="e4m3")),
        ("e2m1/32/ue8m0:ties=down", Format(element="e2m1", block=32, scale="ue8m0", ties="down")),
        ("e4m3/128/ue8m0:reciprocal,nearest", Format(element="e4m3", scale="ue8m0", rule="nearest", reciprocal=True)),
        ("bf16", BF16),
    ],
)
def test_formats(text, fmt):
    assert parse_format(text) == parse_storage(text) == fmt
    assert parse_precision(text).k == parse_precision(text).q == Side(format=fmt)


def test_a_bare_element_means_what_is_stored_usually():
    assert {str(default_format(name)) for name in ELEMENTS} == {
        "e4m3/128/fp32", "e5m2/128/fp32", "int8/128/fp32", "e2m3/32/ue8m0", "e3m2/32/ue8m0", "e2m1/32/ue8m0",
        "int4/32/ue8m0",
    }  # fmt: skip


def test_sides_and_prefixes(config):
    reference = Recipe.reference(config)
    found = build("k=qat+nohad+e4m3/128/ue8m0:floor,ties=down,q=bf16", config)
    fmt = Format(element="e4m3", scale="ue8m0", rule="floor", ties="down")
    assert found.differences(reference) == {"k_format": fmt, "k_hadamard": False, "q_fp4": False}
    assert found.name == "k=qat+nohad+e4m3/128/ue8m0:floor,ties=down,q=bf16"
    assert build("q=bf16,k=qat+nohad+e4m3/128/ue8m0:floor,ties=down", config).replace(name=found.name) == found
    # a side that is not named stays as it was
    assert build("k=e4m3", config).differences(reference) == {"k_format": E4M3, "k_fp4": False}
    assert build("q=qat+e4m3", config).differences(reference) == {"q_format": E4M3}
    assert build("had+qat+bf16", config).differences(reference) == {}
    both = {"q_format": E4M3, "k_format": E4M3, "q_fp4": False, "k_fp4": False}
    assert build("e4m3/128/fp32", config).differences(reference) == both


def test_a_base_keeps_what_is_not_spelled(config):
    vllm = Recipe.preset("vllm-fp8", config)
    found = parse_precision("k=e3m2").apply(vllm)
    assert found.differences(vllm) == {"k_format": Format(element="e3m2", block=32, scale="ue8m0")}
    assert not found.k_hadamard
    assert parse_precision("had+e3m2").apply(vllm).k_hadamard


def test_names_mean_what_they_did(config):
    """`bf16` is a name and a format: the same recipe. Names of presets stay names."""
    assert parse_precision("bf16").apply(Recipe.reference(config)) == build("bf16", config)
    for name in (*PRECISIONS, *CHANGES):
        assert build(name, config).name == name


def test_fp32_is_not_rounded_before_it_is_stored(config):
    reference = Recipe.reference(config)
    changed = build("k=fp32", config).differences(reference)
    rounds = dict.fromkeys(("round_pool", "round_k_norm", "round_k_rope", "round_k_hadamard"), "none")
    assert changed == rounds | {"k_format": Format(element="fp32"), "k_fp4": False}
    assert set(build("q=fp32", config).differences(reference)) == {
        "q_format", "q_fp4", "round_q", "round_q_rope", "round_q_hadamard",
    }  # fmt: skip
    # after the FP4 step nothing is left that a bf16 value could not hold
    assert set(build("k=qat+fp32", config).differences(reference)) == {"k_format"}


WRONG = [
    # (text, the column that is wrong, what stands there, what was expected)
    ("e4m4/128/fp32", 4, "'4'", "e4m3"),
    ("E4M3", 1, "'E'", "e4m3"),
    ("e4m3x", 5, "'x'", "e4m3"),
    ("fp6", 3, "'6'", "fp16, fp32, fp8, fp4"),
    ("sglang-fp9", 10, "'9'", "sglang-fp8"),
    ("", 1, "the end", "e4m3"),
    ("e4m3 /128/fp32", 5, "' '", "'/'"),
    ("e4m3/12x/fp32", 8, "'x'", "a digit, or '/'"),
    ("e4m3//fp32", 6, "'/'", "the number of values"),
    ("e4m3/100/fp32", 6, "'1'", "a block that divides 128"),
    ("e4m3/0/fp32", 6, "'0'", "a block that divides 128"),
    ("e4m3/128", 9, "the end", "'/' and the type of the scale"),
    ("e4m3/128/", 10, "the end", "a type of scale"),
    ("e4m3/128/ue8m1", 14, "'1'", "ue8m0"),
    ("e4m3/128/fp32:", 15, "the end", "floor="),
    ("e4m3/128/fp32:tie=even", 18, "'='", "ties="),
    ("e4m3/128/fp32:ties=odd", 20, "'o'", "even, down"),
    ("e4m3/128/fp32:floor=x", 21, "'x'", "a number"),
    ("e4m3/128/fp32:floor=-1", 21, "'-'", "a number"),
    ("e4m3/128/fp32:ties=down,ties=even", 25, "'t'", "another option"),
    ("e4m3/128/fp32,ties=down", 14, "','", "the end"),
    ("bf16/32/fp32", 5, "'/'", "the end"),
    ("sglang-fp8/128/fp32", 11, "'/'", "the end"),
    ("qat+qat+bf16", 5, "'q'", "a prefix that is not there yet"),
    ("had+nohad+bf16", 5, "'n'", "a prefix that is not there yet"),
    ("qat+", 5, "the end", "e4m3"),
    ("qat+reference", 5, "'r'", "e4m3"),
    ("k=", 3, "the end", "e4m3"),
    ("k=bf16,x=bf16", 8, "'x'", "k=, q="),
    ("k=bf16,k=bf16", 8, "'k'", "the other side"),
    ("k=bf16,q=bf16,k=bf16", 15, "'k'", "the end"),
    ("k=bf16;q=bf16", 7, "';'", "','"),
    ("k=e4m3/128/fp32:ties=down,q=e2m1/32/ue8m0:ties=dwn", 49, "'w'", "down"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "column", "there", "expected"), WRONG)
def test_errors_point_at_the_wrong_character(config, text, column, there, expected):
    with pytest.raises(InputError) as error:
        build(text, config)
    message = str(error.value)
    assert f"{text!r}, column {column} ({there}): expected " in message
    assert expected in message.split("expected ", 1)[1]
    assert "\n" not in message


def test_a_block_must_divide_the_head_dim(support):
    with pytest.raises(InputError, match=r"column 6 \('1'\): expected a block that divides 64"):
        build("e4m3/128/fp32", support.config(index_head_dim=64))
    assert build("e4m3/64/fp32", support.config(index_head_dim=64)).k_format.block == 64


def test_split_knows_what_continues_a_precision():
    found = split_precisions(
        "bf16, k=e4m3/128/ue8m0:floor,ties=down,q=bf16,k=bf16,q=e2m1,q=bf16,k=fp32,e2m1/32/ue8m0:nearest,floor=0 ,fp8,"
    )
    assert found == [
        "bf16", "k=e4m3/128/ue8m0:floor,ties=down,q=bf16", "k=bf16,q=e2m1", "q=bf16,k=fp32",
        "e2m1/32/ue8m0:nearest,floor=0", "fp8",
    ]  # fmt: skip
    # a comma that continues nothing ends the precision, and the rest is refused by itself
    assert split_precisions("bf16,ties=down") == ["bf16", "ties=down"]
    assert split_precisions("bf16,q=e2m1,q=fp16") == ["bf16", "q=e2m1", "q=fp16"]
    assert split_precisions(" , ") == []


def test_split_gives_back_any_list_of_precisions():
    sides = [str(Format(element="e2m1", block=32, scale="ue8m0", ties="down", rule="floor")), "qat+e4m3/128/ue8m0"]
    every = [*sides, *(f"k={a},q={b}" for a in sides for b in sides), "reference", "sglang-fp8"]
    for first, second in itertools.product(every, every):
        assert split_precisions(f"{first},{second}") == [first, second]


def test_short_forms_stay_short():
    assert str(parse_precision("qat+e4m3").k) == "qat+e4m3/128/fp32"
    assert str(parse_precision("nohad+qat+bf16").k) == "qat+nohad+bf16"
    assert re.fullmatch(r"had\+e4m3/128/fp32", str(parse_precision("had+e4m3").k))
