"""Two reports of `diffcheck run`, case by case: what moved, whether it can be chance, what is worse than tolerated.

Cases of the same layer, precision and theta are compared. Where both reports had the same inputs, their common query
rows are *paired*: what makes a row hard is common to both and cancels. The mean over rows of the difference then gets
an interval and a p value (`statistics`: bootstrap and sign flips of blocks of neighbouring rows), and since many cases
are looked at at once, p is adjusted by Holm's method over all tests of the comparison. p says whether the difference
would be there in other rows of such a text too; on these rows it is there, whatever p is.

A *regression* is a field that became worse by more than its tolerance, or a case that was measured and no longer is.
It does not ask for p: a run repeats its numbers exactly, so a difference on the same rows has a cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .gates import short
from .refimpl.config_json import load_json
from .statistics import holm, paired_difference, resampling_groups, sign_flip_test

HIGHER_IS_BETTER = (
    "jaccard", "jaccard_tied", "jaccard_kernel", "jaccard_tied_kernel", "jaccard_ideal", "jaccard_tied_ideal",
    "recall_mean", "recall_p1", "recall_worst", "recall_tied", "recall_mean_ideal", "recall_p1_ideal",
    "recall_worst_ideal", "recall_tied_ideal", "margin",
)  # fmt: skip
LOWER_IS_BETTER = (
    "needles_lost", "needle_rank_median", "attention_mass_lost", "attention_mass_lost_worst", "topk_wrong_rows",
    "score_rel_error", "score_calc_diff", "score_max_error", "format_error", "kernel_error", "kernel_calc_diff",
    "bytes_per_entry", "seconds",
)  # fmt: skip
DEFAULT_TOLERANCE = {
    "needles_lost": 0.0, "attention_mass_lost": 0.005, "jaccard_tied": 0.005, "jaccard_kernel": 0.001,
    "topk_wrong_rows": 0.0,
}  # fmt: skip
"""By how much a field may become worse unless a file or the command line says otherwise."""
TESTED = ("jaccard_tied", "attention_mass_lost")
"""Fields whose difference in each row is tested."""
LEVEL = 0.05
"""Adjusted p values below it are marked."""
SAME = 1e-6
"""Relative difference up to which a number did not move: other machines add up in another order."""
SCHEMA_VERSION = 1
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run's JSON document and what to call it."""

    name: str
    document: Record


def read_report(path: Path) -> Report:
    """A report that `diffcheck run --json` wrote; InputError for anything else."""
    found = load_json(path, "a report of `diffcheck run --json`")
    if (
        not isinstance(found, dict)
        or found.get("schema_version") != SCHEMA_VERSION
        or not isinstance(cases := found.get("cases"), list)
        or not all(isinstance(c, dict) and {"layer", "precision", "theta_setting", "verdict"} <= set(c) for c in cases)
    ):
        raise InputError(f"{path}: is no report of `diffcheck run --json`, schema_version {SCHEMA_VERSION}")
    twice = [key for key, count in Counter(map(_key, cases)).items() if count > 1]
    if twice:
        layer, precision, theta = twice[0]
        raise InputError(f"{path}: holds layer {layer} {precision} theta {theta} twice, expected the report of one run")
    return Report(name=str(path), document=found)


def tolerances(*, file: Mapping[str, float], command_line: Iterable[str]) -> dict[str, float]:
    """By how much each field may become worse: command line before file before defaults. InputError for bad ones."""
    asked: dict[str, float] = {}
    for text in command_line:
        name, equals, number = text.partition("=")
        try:
            asked[name.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"--tolerance: {text!r}, expected FIELD=NUMBER such as jaccard_tied=0.01")
    for where, given in (("tolerance", file), ("--tolerance", asked)):
        for name, value in given.items():
            if name not in HIGHER_IS_BETTER + LOWER_IS_BETTER:
                known = ", ".join(HIGHER_IS_BETTER + LOWER_IS_BETTER)
                raise InputError(f"{where}: {name!r} has no better and worse, expected one of {known}")
            if not 0 <= value < float("inf"):
                raise InputError(f"{where}: {name} is {value:g}, expected a finite number of at least 0")
    return DEFAULT_TOLERANCE | dict(file) | asked


def check_comparable(before: Report, cases: Sequence[Record], name: str) -> None:
    """InputError unless a case that `before` measured is one of `cases`, which are called `name`."""
    mine = {_key(case) for case in cases}
    common = [case for case in before.document["cases"] if _key(case) in mine]
    if not common:
        raise InputError(
            f"{before.name} and {name}: no case in common, expected the same layer, precision and theta in both "
            f"({_listed(before.document['cases'])} against {_listed(cases)})"
        )
    if not any(_is_measured(case) for case in common):
        raise InputError(f"{before.name}: measured no case of {name}, expected numbers to compare with")


def _listed(cases: Sequence[Record]) -> str:
    layers = ",".join(map(str, sorted({case["layer"] for case in cases})))
    precisions, thetas = (",".join(dict.fromkeys(c[n] for c in cases)) for n in ("precision", "theta_setting"))
    return f"layers {layers or 'none'}, precisions {precisions or 'none'}, thetas {thetas or 'none'}"


def compare_reports(before: Report, after: Report, *, tolerance: Mapping[str, float], what_if: bool) -> Record:
    """What moved from one report to the other as plain values; InputError where nothing can be compared.

    what_if: whether cases of a theta that is not the checkpoint's can be regressions.
    """
    check_comparable(before, after.document["cases"], after.name)
    old, new = ({_key(c): c for c in report.document["cases"]} for report in (before, after))
    layers = dict.fromkeys(case["layer"] for key, case in old.items() if key in new)
    pairs = {layer: _pairing(before, after, layer) for layer in layers}
    cases, regressions = [], []
    for key in (key for key in old if key in new):
        a, b = old[key], new[key]
        cases.append(_moved(a, b, pairs[a["layer"]]))
        if what_if or not b.get("what_if"):
            regressions += _regressions(a, b, tolerance)
    tests = [test for case in cases for test in case["tests"]]
    for test, adjusted in zip(tests, holm([test["p"] for test in tests]).tolist(), strict=True):
        test["p_holm"] = adjusted
    return {
        "schema_version": SCHEMA_VERSION,
        "before": before.name,
        "after": after.name,
        "notes": _differences(before, after, pairs),
        "tolerance": dict(tolerance),
        "what_if": what_if,
        "level": LEVEL,
        "cases": cases,
        "only_before": [_name(case) for key, case in old.items() if key not in new],
        "only_after": [_name(case) for key, case in new.items() if key not in old],
        "regressions": regressions,
    }


def _key(case: Record) -> tuple[int, str, str]:
    return case["layer"], case["precision"], case["theta_setting"]


def _name(case: Record) -> str:
    return f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}"


def _is_measured(case: Record) -> bool:
    return case.get("jaccard_tied") is not None


def _pairing(before: Report, after: Report, layer: int) -> tuple[list[int], list[int]] | None:
    """Numbers of the common rows of a layer in each report; None where the inputs are not the same."""
    a, b = (report.document.get("layers", {}).get(str(layer)) for report in (before, after))
    if a is None or b is None or a["inputs"] != b["inputs"]:
        return None
    place = {position: row for row, position in enumerate(b["rows"])}
    rows = [(row, place[position]) for row, position in enumerate(a["rows"]) if position in place]
    return [row for row, _ in rows], [row for _, row in rows]


def _moved(a: Record, b: Record, pairing: tuple[list[int], list[int]] | None) -> Record:
    """One case: fields that moved, and tests of the paired rows."""
    fields = {
        name: {"before": a.get(name), "after": b.get(name)}
        for name in HIGHER_IS_BETTER + LOWER_IS_BETTER
        if name != "seconds" and _differs(a.get(name), b.get(name))
    }
    tests = []
    if pairing is not None:
        tests = [test for name in TESTED if (test := _test(a, b, name, pairing)) is not None]
    return {
        **{name: b[name] for name in ("layer", "precision", "theta_setting")},
        "what_if": bool(b.get("what_if")),
        "moved": bool(fields) or any(a.get(n) != b.get(n) for n in ("verdict", "first_stage")),
        "verdict": {"before": a["verdict"], "after": b["verdict"]},
        "fields": fields,
        "tests": tests,
    }


def _differs(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > SAME * max(abs(a), abs(b))


def _test(a: Record, b: Record, name: str, pairing: tuple[list[int], list[int]]) -> Record | None:
    """Interval and p of a field's difference over the paired rows; None where either report lacks the rows."""
    rows = [case.get("rows", {}).get(name) for case in (a, b)]
    if rows[0] is None or rows[1] is None:
        return None
    first, second = (
        np.array([row[i] if row[i] is not None else np.nan for i in places])
        for row, places in zip(rows, pairing, strict=True)
    )
    known = ~np.isnan(first) & ~np.isnan(second)
    if not known.any():
        return None
    groups = resampling_groups(int(known.sum()))
    interval = paired_difference(first=second[known], second=first[known], groups=groups)
    flips = sign_flip_test(second[known] - first[known], groups=groups)
    assert interval is not None, "there is a row"
    return {
        "field": name, "rows": int(known.sum()), "blocks": flips.groups, "difference": interval.estimate,
        "ci": interval.ci, "p": flips.p, "smallest_p": flips.smallest,
    }  # fmt: skip


def _regressions(a: Record, b: Record, tolerance: Mapping[str, float]) -> list[Record]:
    if not _is_measured(a):
        return []
    name = {"case": _name(b)}
    if not _is_measured(b):
        reason = f" ({b['reason']})" if b.get("reason") else ""
        return [name | _regression("verdict", a["verdict"], b["verdict"] + reason)]
    found = []
    for field, allowed in tolerance.items():
        old, new = a.get(field), b.get(field)
        if old is None:
            continue
        if new is None:
            found.append(name | _regression(field, old, None))
            continue
        worse = old - new if field in HIGHER_IS_BETTER else new - old
        if worse > allowed and _differs(worse, allowed):
            found.append(name | _regression(field, old, new, worse=worse, tolerance=allowed))
    return found


def _regression(
    field: str, before: Any, after: Any, *, worse: float | None = None, tolerance: float | None = None
) -> Record:
    passing = None if worse is None else f"{field}={short(worse, ROUND_CEILING)}"
    return {
        "field": field, "before": before, "after": after, "worse": worse, "tolerance": tolerance, "passing": passing
    }  # fmt: skip


def _differences(before: Report, after: Report, pairs: Mapping[int, tuple[list[int], list[int]] | None]) -> list[str]:
    """In what else than their numbers the two reports differ."""
    a, b = before.document, after.document
    notes = [f"{report.name} is of an interrupted run" for report in (before, after) if report.document.get("partial")]
    notes += _changes("", _environment(a), _environment(b))
    notes += _changes(
        "checkpoint: ", a.get("checkpoint", {}).get("config", {}), b.get("checkpoint", {}).get("config", {})
    )
    layers = [
        (layer, a["layers"][layer], b["layers"][layer]) for layer in a.get("layers", {}) if layer in b.get("layers", {})
    ]
    other = [layer for layer, x, y in layers if int(layer) in pairs and x["weights"] != y["weights"]]
    if other:
        notes.append(f"layer {', '.join(other)}: other weights")
    unpaired = [str(layer) for layer, pairing in pairs.items() if pairing is None]
    if unpaired:
        known = {layer for layer, _, _ in layers}
        here, absent = ([layer for layer in unpaired if (layer in known) is there] for there in (True, False))
        if here:
            notes.append(f"layer {', '.join(here)}: other inputs, so rows are not paired and nothing is tested")
        if absent:
            notes.append(f"layer {', '.join(absent)}: no rows in one of the reports, so nothing is tested")
    for layer, x, y in layers:
        pairing = pairs.get(int(layer))
        if pairing is not None and x["rows"] != y["rows"]:
            notes.append(
                f"layer {layer}: {len(pairing[0])} query rows in common of {len(x['rows'])} and {len(y['rows'])}; "
                "only these are tested"
            )
    recipes = a.get("recipes", {})
    for name, recipe in b.get("recipes", {}).items():
        if name in recipes:
            notes += _changes(f"{name}: ", recipes[name]["fields"], recipe["fields"])
    backends = {(c["backend"], d["backend"]) for c, d in _common(a, b) if c.get("backend") != d.get("backend")}
    return notes + [f"backend {old} -> {new}" for old, new in sorted(backends)]


def _common(a: Record, b: Record) -> list[tuple[Record, Record]]:
    new = {_key(case): case for case in b["cases"]}
    return [(case, new[_key(case)]) for case in a["cases"] if _key(case) in new]


def _environment(document: Record) -> Record:
    found = document.get("environment", {})
    inputs = document.get("inputs", {})
    return {
        "diffcheck": found.get("diffcheck"), "torch": found.get("packages", {}).get("torch"),
        "device": found.get("device"), "inputs": inputs.get("source"), "tokens": inputs.get("length"),
    }  # fmt: skip


def _changes(where: str, a: Record, b: Record) -> list[str]:
    return [
        f"{where}{name} {a.get(name)} -> {b.get(name)}"
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]
