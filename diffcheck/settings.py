"""The settings of a project: `diffcheck.toml`, or the table [tool.diffcheck] of pyproject.toml.

    gates = ["jaccard_kernel >= 0.999", "topk_wrong_rows == 0"]      # every case
    gate_what_if = false                                             # whether they count what-if thetas

    [tolerance]                                                      # of `run --baseline` and `compare`
    jaccard_tied = 0.01

    [[rule]]                                                         # cases of some precisions or layers only
    precision = "sglang-*"                                           # a name or glob, or a list of them
    layers = "2, 4-10, 3?"                                           # numbers, ranges, globs; or a list of numbers
    gates = ["jaccard_tied >= 0.8"]

The first file found from the working directory upwards counts, `diffcheck.toml` before pyproject.toml in each
directory.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .errors import InputError
from .gates import Gate

FILE, PROJECT_FILE, TABLE = "diffcheck.toml", "pyproject.toml", "diffcheck"
_LAYERS = re.compile(r"(\d+)\s*-\s*(\d+)|[0-9*?\[\]!]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Gates, where they come from, and the cases that they are for: None is all of them."""

    gates: tuple[Gate, ...]
    source: str
    precisions: tuple[str, ...] | None = None
    layers: tuple[str, ...] | None = None

    def covers(self, case: dict[str, Any]) -> bool:
        """Whether a case, or a probe (which has no precision and no layer), is one of those."""
        if "probe" in case:
            return self.precisions is None and self.layers is None
        return (self.precisions is None or any(fnmatchcase(case["precision"], glob) for glob in self.precisions)) and (
            self.layers is None or any(_is_layer(part, case["layer"]) for part in self.layers)
        )


def _is_layer(part: str, layer: int) -> bool:
    match = _LAYERS.fullmatch(part)
    assert match is not None, "checked when it was read"
    if match[1] is not None:
        return int(match[1]) <= layer <= int(match[2])
    return fnmatchcase(str(layer), part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a file says; `path` is None where there is none."""

    path: Path | None = None
    rules: tuple[Rule, ...] = ()
    gate_what_if: bool = False
    tolerance: dict[str, float] = field(default_factory=dict)


def find_settings(explicit: Path | None, start: Path | None = None) -> Settings:
    """The settings of the file given, or of the first one found from `start` (the working directory) upwards."""
    if explicit is not None:
        table = _read(explicit, needed=True)
        return _settings(explicit, table or {})
    here = (start or Path.cwd()).resolve()
    for directory in (here, *here.parents):
        for path in (directory / FILE, directory / PROJECT_FILE):
            if path.is_file() and (table := _read(path, needed=False)) is not None:
                return _settings(path, table)
    return Settings()


def _read(path: Path, *, needed: bool) -> dict[str, Any] | None:
    """A file's table; None for a pyproject.toml without one."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == PROJECT_FILE and not needed and f"tool.{TABLE}" not in text:
            return None  # nor is it any business of ours whether it can be parsed
        table: Any = tomllib.loads(text)
    except FileNotFoundError:
        raise InputError(f"--config: {path}: no such file, expected {FILE} or {PROJECT_FILE}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not readable as TOML ({error})") from None
    if path.name == PROJECT_FILE:
        table = table.get("tool", {}).get(TABLE)
        if table is None and needed:
            raise InputError(f"--config: {path}: has no table [tool.{TABLE}]")
    if table is not None and not isinstance(table, dict):
        raise InputError(f"{path}: tool.{TABLE} is {table!r}, expected a table")
    return table


def _settings(path: Path, table: dict[str, Any]) -> Settings:
    _known(path, "", table, ("gates", "gate_what_if", "tolerance", "rule"))
    what_if, tolerance, rules = table.get("gate_what_if", False), table.get("tolerance", {}), table.get("rule", [])
    if not isinstance(what_if, bool):
        raise InputError(f"{path}: gate_what_if is {what_if!r}, expected true or false")
    if not isinstance(tolerance, dict) or not all(_is_number(value) for value in tolerance.values()):
        raise InputError(f"{path}: tolerance is {tolerance!r}, expected a table of numbers by field")
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise InputError(f"{path}: rule is {rules!r}, expected tables [[rule]]")
    general = Rule(gates=_gates(path, "gates", table.get("gates", [])), source=path.name)
    return Settings(
        path=path,
        rules=(general, *(_rule(path, number, rule) for number, rule in enumerate(rules, 1))),
        gate_what_if=what_if,
        tolerance={name: float(value) for name, value in tolerance.items()},
    )


def _rule(path: Path, number: int, table: dict[str, Any]) -> Rule:
    name = f"rule {number}"
    _known(path, f"{name}: ", table, ("precision", "layers", "gates"))
    if "gates" not in table or not {"precision", "layers"} & set(table):
        raise InputError(f"{path}: {name}: expected gates, and precision or layers that they are for")
    precisions = _parts(path, f"{name}: precision", table.get("precision"))
    layers = _parts(path, f"{name}: layers", table.get("layers"))
    for part in layers or ():
        match = _LAYERS.fullmatch(part)
        if match is None or (match[1] is not None and int(match[1]) > int(match[2])):
            raise InputError(f"{path}: {name}: layers has {part!r}, expected a number, a range 4-10, or a glob 3?")
    where = [f"{key} {', '.join(parts)}" for key, parts in (("precision", precisions), ("layers", layers)) if parts]
    return Rule(
        gates=_gates(path, f"{name}: gates", table["gates"]),
        source=f"{path.name}, {name}: {'; '.join(where)}",
        precisions=precisions,
        layers=layers,
    )


def _known(path: Path, where: str, table: dict[str, Any], keys: tuple[str, ...]) -> None:
    unknown = next((key for key in table if key not in keys), None)
    if unknown is not None:
        raise InputError(f"{path}: {where}unknown key {unknown!r}, expected one of {', '.join(keys)}")


def _gates(path: Path, where: str, texts: Any) -> tuple[Gate, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: {where} is {texts!r}, expected a list of conditions")
    return Gate.parse_all(texts, where=f"{path}: {where}")


def _parts(path: Path, where: str, value: Any) -> tuple[str, ...] | None:
    """Parts of a comma separated string, or of a list of strings and numbers."""
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) or (type(item) is int and item >= 0) for item in items):
        raise InputError(f"{path}: {where} is {value!r}, expected names or numbers")
    parts = tuple(part.strip() for item in items for part in str(item).split(",") if part.strip())
    if not parts:
        raise InputError(f"{path}: {where} is {value!r}, expected names or numbers")
    return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
