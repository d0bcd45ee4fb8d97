"""Spaces of recipes: the default one, and those of TOML files.

    base = "reference"                       # a precision or preset; what is not spelled below is its
    keys = ["bf16", "e4m3/128/fp32", "e2m1/32/ue8m0"]
    queries = ["same", "base"]               # "same" as the key, the "base"'s own, or formats
    prefixes = ["", "qat+", "nohad+"]        # in front of both sides
    also = ["sglang-fp8", "k=e3m2,q=e4m3"]   # whole precisions (their base is the reference)
    recipes = ["mine.toml"]                  # recipe files, relative to this one: gates, scores and anything else

Every key with every query and prefix is a recipe; one that is spelled in two ways is measured once. `keys` alone is
enough, and so is `also`.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cases import load_recipe
from ..compare import bytes_per_entry
from ..errors import InputError
from ..grammar import PREFIXES, parse_precision
from ..presets import build
from ..recipe import Recipe
from ..refimpl import IndexerConfig

DEFAULT_KEYS = (
    "bf16", "e4m3/128/fp32", "e4m3/128/ue8m0", "int8/128/fp32", "e2m3/32/ue8m0", "e3m2/32/ue8m0",
    "e2m1/64/ue8m0", "e2m1/32/ue8m0", "e2m1/32/ue8m0:ties=down", "e2m1/16/e4m3",
)  # fmt: skip
DEFAULT_PREFIXES = ("qat+", "", "nohad+")
KEYS = ("base", "keys", "queries", "prefixes", "also", "recipes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A recipe under the name by which it is reported, and the bytes of one of its keys."""

    name: str
    recipe: Recipe = field(repr=False)
    bytes: float


def load_space(text: str, config: IndexerConfig) -> list[Candidate]:
    """The candidates of "default" or of a TOML file, for this checkpoint; InputError says what is wrong."""
    if text == "default":
        return default_space(config)
    path = Path(text)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--space: {text}: no such file, expected default or a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--space: {text}: not readable as TOML ({error})") from None
    unknown = [key for key in raw if key not in KEYS]
    if unknown:
        raise InputError(f"{text}: unknown key {unknown[0]!r}, expected {', '.join(KEYS)}")
    lists = {key: _strings(text, key, raw.get(key, [])) for key in KEYS[1:]}
    base = raw.get("base", "reference")
    if not isinstance(base, str):
        raise InputError(f"{text}: base is {base!r}, expected a precision or preset")
    try:
        recipes = _product(
            build(base, config), lists["keys"], lists["queries"] or ["same"], lists["prefixes"] or [""], config
        )
        recipes += [build(name, config) for name in lists["also"]]
    except InputError as error:
        raise InputError(f"{text}: {error}") from None
    recipes += [load_recipe(path.parent / name, config) for name in lists["recipes"]]
    if not recipes:
        raise InputError(f"{text}: holds no recipe, expected keys = [...], also = [...] or recipes = [...]")
    return candidates(recipes, config)


def default_space(config: IndexerConfig) -> list[Candidate]:
    """40 recipes: ten key formats after the FP4 step (also with reference queries), without it, without Hadamard."""
    reference, dim = Recipe.reference(config), config.index_head_dim
    # of a narrow head a block is at most the whole
    keys = list(dict.fromkeys(_narrowed(key, dim) for key in DEFAULT_KEYS))
    recipes = _product(reference, keys, ["same"], DEFAULT_PREFIXES, config)
    recipes += _product(reference, keys, ["base"], ["qat+"], config)
    return candidates([*recipes, build("int4/32/ue8m0", config)], config)


def _narrowed(key: str, dim: int) -> str:
    element, *rest = key.split("/")
    return "/".join([element, str(min(int(rest[0]), dim)), *rest[1:]]) if rest else key


def candidates(recipes: Sequence[Recipe], config: IndexerConfig) -> list[Candidate]:
    """Those that differ in more than the name, in order; InputError for a name that two of them have."""
    found: dict[Recipe, Candidate] = {}
    names: dict[str, Recipe] = {}
    for recipe in recipes:
        unnamed = recipe.replace(name="")
        if names.setdefault(recipe.name, unnamed) != unnamed:
            raise InputError(f"two recipes are called {recipe.name!r}, expected another name for one")
        if unnamed not in found:
            size = bytes_per_entry(recipe, config.index_head_dim)
            found[unnamed] = Candidate(name=recipe.name, recipe=recipe, bytes=size)
    return list(found.values())


def _product(
    base: Recipe, keys: Sequence[str], queries: Sequence[str], prefixes: Sequence[str], config: IndexerConfig
) -> list[Recipe]:
    wrong = next((p for p in prefixes if _prefixes_left(p)), None)
    if wrong is not None:
        raise InputError(f"prefix {wrong!r}, expected some of {', '.join(PREFIXES)}")
    recipes = []
    for prefix, query, key in itertools.product(prefixes, queries, keys):
        if query == "same":
            text = f"{prefix}{key}"
        elif query == "base":
            if "had+" in prefix:
                raise InputError(f'prefix {prefix!r} with queries = ["base"], expected no rotation of the keys alone')
            text = f"k={prefix}{key}"
        else:
            text = f"k={prefix}{key},q={prefix}{query}"
        recipes.append(parse_precision(text, dim=config.index_head_dim).apply(base))
    return recipes


def _prefixes_left(text: str) -> str:
    while prefix := next((p for p in PREFIXES if text.startswith(p)), ""):
        text = text.removeprefix(prefix)
    return text


def _strings(where: str, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{where}: {key} is {value!r:.80}, expected a list of strings")
    return value
