"""Gates: conditions on case fields that decide the exit code, e.g. `jaccard_kernel>=0.999`.

A gate names any numeric field of a case. No gate is on by default. What-if cases (a theta that is not the
checkpoint's) count only when asked for. A case without a value for the field (a vacuous case, no needles) does not
count; a gate that found nothing to measure fails, because a check that checked nothing must not pass. Probes of a
selection kernel have the field topk_wrong_rows and count at a gate on it.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

from .errors import InputError

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
_SYNTAX = re.compile(r"\s*([a-z_0-9]+)\s*(>=|<=|==|>|<)\s*([-+0-9.eE]+)\s*")

NUMERIC_FIELDS = (
    "length", "queries", "k", "visible", "visible_min", "discarded", "jaccard", "jaccard_tied", "jaccard_kernel",
    "jaccard_tied_kernel", "jaccard_ideal", "jaccard_tied_ideal", "recall_mean", "recall_p1", "recall_worst",
    "recall_tied", "recall_mean_ideal", "recall_p1_ideal", "recall_worst_ideal", "recall_tied_ideal", "tie_band",
    "needle_rank_reference", "needle_rank", "needle_rank_reference_median", "needle_rank_median", "needles",
    "needles_selected_reference", "needles_lost", "score_rel_error", "score_calc_diff", "score_max_error",
    "format_error", "kernel_error", "kernel_calc_diff", "attention_mass_lost",
    "attention_mass_lost_worst", "topk_wrong_rows", "margin", "bytes_per_entry", "seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition; `text` as the user wrote it."""

    text: str
    field: str
    symbol: str
    bound: float

    @staticmethod
    def parse(text: str) -> Gate:
        """Parse FIELD OP NUMBER; InputError for another syntax or a field that no case has."""
        match = _SYNTAX.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            bound = float(match[3])
        except ValueError:
            raise InputError(f"--gate: {text!r}, expected FIELD OP NUMBER such as jaccard_kernel>=0.999") from None
        if match[1] not in NUMERIC_FIELDS:
            raise InputError(f"--gate: unknown field {match[1]!r}, expected one of {', '.join(NUMERIC_FIELDS)}")
        return Gate(text=text, field=match[1], symbol=match[2], bound=bound)

    def check(self, cases: list[dict[str, Any]], *, what_if: bool) -> GateResult:
        """Check all cases (and probes) that count; a list (several needles) must hold in every element."""
        failed: list[str] = []
        checked: list[dict[str, Any]] = []
        for case in cases:
            if case.get("what_if") and not what_if:
                continue
            if case.get("verdict") == "refused":
                continue
            if "probe" in case:
                name = f"probe of {case['backend']}, {case['entries']} entries"
            else:
                name = f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}"
            where = {"case": name, **{n: case.get(n) for n in ("layer", "precision", "theta_setting")}}
            if self.field in case.get("nonfinite", ()):
                checked.append(where | {"value": None, "passed": False})
                failed.append(f"{name}: {self.field} is NaN or inf")
                continue
            value = case.get(self.field)
            values = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
            if not values:
                continue
            worst = min(values) if self.symbol.startswith(">") else max(values)
            passed = all(_OPERATORS[self.symbol](v, self.bound) for v in values)
            checked.append(where | {"value": worst, "passed": passed})
            if not passed:
                failed.append(f"{name}: {self.field} {worst:.6g}")
        return GateResult(gate=self.text, field=self.field, checked=checked, failed=failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The cases (and probes) that a gate was measured on, with the value of each, and the ones that failed in words."""

    gate: str
    field: str
    checked: list[dict[str, Any]]
    failed: list[str]

    @property
    def measured(self) -> int:
        """On how many cases the gate was measured."""
        return len(self.checked)

    @property
    def passed(self) -> bool:
        """True when at least one case was measured and none failed."""
        return self.measured > 0 and not self.failed

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "gate": self.gate, "field": self.field, "measured": self.measured, "failed": self.failed,
            "passed": self.passed, "checked": self.checked,
        }  # fmt: skip
