"""Which cases a run has: every precision at every RoPE theta, each one a Recipe.

A theta setting is "checkpoint", a number (YaRN kept), or "NUMBER:noyarn". It replaces theta on the deployment's
queries *and* keys; the reference keeps the checkpoint's. Such a case is a what-if: it shows what a wrong setting would
look like, and does not count at gates unless asked to.

A recipe file adds a precision of its own:

    name = "hadamard-on-queries-only"   # default: the file's name
    base = "reference"                  # a precision, also a spelled one (`grammar`); default reference
    [replace]
    k_hadamard = false
    k_format = "e4m3/128/ue8m0"     # or { element = "e4m3", block = 128, scale = "ue8m0" }
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .digests import digest
from .errors import InputError
from .formats import Format
from .grammar import parse_format, parse_storage
from .presets import build
from .recipe import TWO_SIDED, Recipe
from .refimpl import IndexerConfig, Yarn

DEFAULT_PRECISIONS = ("reference", "bf16", "fp8", "fp4")
DEFAULT_THETAS = ("checkpoint", "10000", "40000")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThetaSetting:
    """A RoPE-theta setting: `value` None means the checkpoint's."""

    label: str
    value: float | None
    yarn: bool = True

    @staticmethod
    def parse(text: str) -> ThetaSetting:
        """Parse "checkpoint", "NUMBER" or "NUMBER:noyarn"; InputError otherwise."""
        if text == "checkpoint":
            return ThetaSetting(label=text, value=None)
        number, _, option = text.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0) or option not in ("", "noyarn") or (":" in text and not option):
            raise InputError(f"--theta: {text!r}, expected checkpoint, a number > 0, or NUMBER:noyarn")
        return ThetaSetting(label=text, value=value, yarn=not option)

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe under this setting."""
        if self.value is None:
            return recipe
        changed = recipe.replace(theta=self.value)
        return changed if self.yarn else changed.replace(yarn=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One recipe to compare with the reference; `what_if` marks a theta that is not the checkpoint's."""

    precision: str
    theta: ThetaSetting
    recipe: Recipe = field(repr=False)
    what_if: bool

    @property
    def key(self) -> str:
        """Name of the case in a run directory; two cases with the same one have equal recipes."""
        return f"{self.precision} {self.theta.label} {digest(json.dumps(self.recipe.to_json()))}"


def build_cases(
    config: IndexerConfig, precisions: list[str], thetas: list[str], recipe_files: list[Path]
) -> list[Case]:
    """All cases, thetas within precisions; InputError for an unknown name, a bad theta or a bad recipe file."""
    recipes = {name: build(name, config) for name in dict.fromkeys(precisions)}
    for path in recipe_files:
        recipe = load_recipe(path, config)
        if recipe.name in recipes:
            raise InputError(f"{path}: name {recipe.name!r} is taken by another precision, expected a new name")
        recipes[recipe.name] = recipe
    settings = [ThetaSetting.parse(text) for text in dict.fromkeys(thetas)]
    if not recipes or not settings:
        raise InputError("nothing to compare, expected at least one precision and one theta")
    cases = []
    for name, recipe in recipes.items():
        for setting in settings:
            changed = setting.apply(recipe)
            what_if = bool(changed.differences(recipe))
            cases.append(Case(precision=name, theta=setting, recipe=changed, what_if=what_if))
    return cases


def load_recipe(path: Path, config: IndexerConfig) -> Recipe:
    """The recipe of a TOML file (see the module docstring); InputError says which key is wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected a recipe (TOML)") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not readable as TOML ({error})") from None
    unknown = set(raw) - {"name", "base", "replace"}
    if unknown:
        raise InputError(f"{path}: unknown key {sorted(unknown)[0]!r}, expected name, base or [replace]")
    base, name, changes = raw.get("base", "reference"), raw.get("name", path.stem), raw.get("replace", {})
    if not isinstance(base, str) or not isinstance(name, str) or not isinstance(changes, dict):
        raise InputError(f"{path}: name and base must be strings and replace a table")
    recipe = build(base, config)
    try:
        made = recipe.replace(name=name, **{key: field_value(recipe, key, value) for key, value in changes.items()})
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    for key in ("q_format", "k_format", "q_fp4_format", "k_fp4_format"):
        fmt, dim = getattr(made, key), config.index_head_dim
        if isinstance(fmt, Format) and not fmt.plain and dim % fmt.block:
            raise InputError(f"{path}: {key} is {fmt}, expected a block that divides the head dim {dim}")
    return made


def field_value(recipe: Recipe, name: str, value: Any) -> Any:
    """A TOML value as a recipe field's value; ValueError if it does not fit the kind of the field's current value."""
    side = "q_" + name if name in TWO_SIDED else name
    if side not in recipe.field_names():
        raise ValueError(f"unknown recipe field {name!r}, expected one of {', '.join(recipe.field_names())}")
    if side.endswith("_format"):
        if value == "none" and not side.endswith("fp4_format"):
            return None
        if isinstance(value, str):
            return parse_format(value) if side.endswith("fp4_format") else parse_storage(value)
        return Format(**_keywords(Format, name, value))
    if side.endswith("_yarn"):
        return None if value is False else Yarn(**_keywords(Yarn, name, value))
    current = getattr(recipe, side)
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(current):
        raise ValueError(f"{name} is {value!r}, expected a value like {current!r}")
    if side in ("q_theta", "k_theta", "q_mscale", "k_mscale", "eps", "k", "rope_dims") and not value > 0:
        raise ValueError(f"{name} is {value!r}, expected > 0")
    return value


def _keywords(kind: type, name: str, value: Any) -> dict[str, Any]:
    fields = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(value, dict) or set(value) - set(fields):
        raise ValueError(f"{name} is {value!r}, expected a table with keys among {fields}")
    missing = [f for f in fields if kind is Yarn and f not in value]
    if missing or (kind is Format and "element" not in value):
        raise ValueError(f"{name} lacks {(missing or ['element'])[0]!r}")
    return value
