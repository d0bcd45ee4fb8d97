"""Gates: conditions on case fields that decide the exit code, e.g. `jaccard_kernel>=0.999`.

A gate names any numeric field of a case. What-if cases (a theta that is not the checkpoint's) count only when asked
for. A case without a value for the field (a vacuous case, no needles) does not count; a gate that found nothing to
measure fails, because a check that checked nothing must not pass, and so does every gate on a case that failed. Probes
of a selection kernel have the field topk_wrong_rows and count at a gate on it.

Which gates apply to a case is the matter of `gate_rules`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
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


RECOMMENDED = "recommended"
"""A name for the gates that follow from lost answers (docs/calibration.md)."""
RECOMMENDED_GATES = {"jaccard_kernel>=0.999": True, "recall_mean>=0.8": True, "attention_mass_lost<=0.05": False}
"""Those gates, and whether every run can measure them: attention masses need a forward pass on a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition; `text` as the user wrote it. needed: it fails where there was nothing to measure."""

    text: str
    field: str
    symbol: str
    bound: float
    needed: bool = True

    @staticmethod
    def parse_all(texts: Iterable[str], *, where: str = "--gate") -> tuple[Gate, ...]:
        """Parse conditions, of which `recommended` stands for several; InputError as `parse`."""
        gates: list[Gate] = []
        for text in texts:
            if text.strip() == RECOMMENDED:
                gates += (replace(Gate.parse(one), needed=needed) for one, needed in RECOMMENDED_GATES.items())
            else:
                gates.append(Gate.parse(text, where=where))
        return tuple(gates)

    @staticmethod
    def parse(text: str, *, where: str = "--gate") -> Gate:
        """Parse FIELD OP NUMBER; InputError for another syntax or a field that no case has. `where` names the place."""
        match = _SYNTAX.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            bound = float(match[3])
        except ValueError:
            wanted = f"expected FIELD OP NUMBER such as jaccard_kernel>=0.999, or {RECOMMENDED}"
            raise InputError(f"{where}: {text!r}, {wanted}") from None
        if match[1] not in NUMERIC_FIELDS:
            raise InputError(f"{where}: unknown field {match[1]!r}, expected one of {', '.join(NUMERIC_FIELDS)}")
        return Gate(text=text, field=match[1], symbol=match[2], bound=bound)

    def replaces(self, other: Gate) -> bool:
        """Whether both bound the same field from the same side, so that only one of them can be meant."""
        sides = {self.symbol[0], other.symbol[0]}
        return self.field == other.field and (len(sides) == 1 or "=" in sides)

    def check(self, cases: Sequence[dict[str, Any]], source: str) -> GateResult:
        """Check these cases (and probes); a list (several needles) must hold in every element."""
        failed: list[str] = []
        checked: list[dict[str, Any]] = []
        seen: list[float] = []
        for case in cases:
            if case.get("verdict") == "refused":
                continue
            if "probe" in case:
                name = f"probe of {case['backend']}, {case['entries']} entries"
            else:
                name = f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}"
            where = {"case": name, **{n: case.get(n) for n in ("layer", "precision", "theta_setting")}}
            unknown = None
            if case.get("verdict") == "failed":
                unknown = case["reason"]
            elif self.field in case.get("nonfinite", ()):
                unknown = f"{self.field} is NaN or inf"
            if unknown is not None:
                checked.append(where | {"value": None, "passed": False, "reason": unknown})
                failed.append(f"{name}: {unknown}")
                continue
            value = case.get(self.field)
            values = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
            if not values:
                continue
            seen += values
            worst = min(values) if self.symbol.startswith(">") else max(values)
            passed = all(_OPERATORS[self.symbol](v, self.bound) for v in values)
            checked.append(where | {"value": worst, "passed": passed, "reason": None})
            if not passed:
                failed.append(f"{name}: {self.field} {worst:.6g}")
        known = all(entry["value"] is not None for entry in checked)
        passing = self._passing(seen) if failed and known else None
        return GateResult(
            gate=self.text, field=self.field, source=source, checked=checked, failed=failed, passing=passing
        )

    def _passing(self, values: list[float]) -> str | None:
        """The tightest gate of this kind, to four digits, that all values pass."""
        if self.symbol == "==":
            return f"{self.field}=={values[0]!r}" if len(set(values)) == 1 else None
        if self.symbol.startswith(">"):
            return f"{self.field}>={short(min(values), ROUND_FLOOR)}"
        return f"{self.field}<={short(max(values), ROUND_CEILING)}"


def short(value: float, rounding: str) -> str:
    """A finite value to four digits, or exactly if it is a whole number, rounded to one side."""
    if value == int(value):
        return str(int(value))
    return format(Context(prec=4, rounding=rounding).create_decimal(Decimal(value)).normalize(), "g")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The cases (and probes) that a gate was measured on, with the value of each, and the ones that failed in words.

    source: where the gate is from. passing: for a failed gate the one that would have passed, None where none would.
    """

    gate: str
    field: str
    source: str
    checked: list[dict[str, Any]]
    failed: list[str]
    passing: str | None

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
            "gate": self.gate, "field": self.field, "source": self.source, "measured": self.measured,
            "failed": self.failed, "passed": self.passed, "passing": self.passing, "checked": self.checked,
        }  # fmt: skip
