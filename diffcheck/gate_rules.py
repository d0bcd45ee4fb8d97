"""Which gates apply to which case: those of a project's file, then the command line's.

The rules stand in a row, weakest first: the file's own gates, each [[rule]] of the file in its order, the command
line. Of the gates of one case that bound the same field from the same side, those of the last rule that covers
the case count and the earlier ones are replaced. `==` bounds both sides. So a file can loosen a gate for one
precision, and a command line can overrule the file for one run.

A gate of a rule for some precisions or layers is left alone by a run that has none of them; any other gate that
measured nothing fails, but for those of `recommended` that need a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .gates import Gate, GateResult
from .settings import Rule, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A gate that applies to a case, the rule that it is from, and the weaker ones that it replaces there."""

    rule: Rule
    gate: Gate
    instead_of: tuple[Applied, ...]

    @property
    def words(self) -> str:
        """The gate and where it and those that it replaces are from."""
        gone = "".join(f"; instead of {old.gate.text}, {old.rule.source}" for old in self.instead_of)
        return f"{self.gate.text}  ({self.rule.source}{gone})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePlan:
    """All rules, weakest first, and whether gates count what-if cases."""

    rules: tuple[Rule, ...]
    what_if: bool

    @staticmethod
    def of(command_line: Sequence[str], settings: Settings, *, what_if: bool) -> GatePlan:
        """The gates of a run; InputError for bad syntax or an unknown field."""
        asked = Rule(gates=Gate.parse_all(command_line), source="command line")
        return GatePlan(rules=(*settings.rules, asked), what_if=what_if or settings.gate_what_if)

    def applying(self, case: dict[str, Any]) -> list[Applied]:
        """The gates of a case (or probe)."""
        found: list[Applied] = []
        for rule in self.rules:
            if rule.covers(case):
                weaker = found
                found = [old for old in weaker if not any(gate.replaces(old.gate) for gate in rule.gates)]
                for gate in rule.gates:
                    gone = tuple(old for old in weaker if gate.replaces(old.gate))
                    found.append(Applied(rule=rule, gate=gate, instead_of=gone))
        return found

    def check(self, cases: Sequence[dict[str, Any]], probes: Sequence[dict[str, Any]] = ()) -> list[GateResult]:
        """Results of all gates that apply somewhere, or that apply to all cases and found none."""
        counting = [*cases, *probes] if self.what_if else [*(c for c in cases if not c["what_if"]), *probes]
        applying = [(case, self.applying(case)) for case in counting]
        results = []
        for rule in self.rules:
            general = rule.precisions is None and rule.layers is None
            for gate in rule.gates:
                covered = [case for case, found in applying if any(a.rule is rule and a.gate is gate for a in found)]
                result = gate.check(covered, rule.source)
                if result.measured or (gate.needed and (covered or (general and not counting))):
                    results.append(result)
        return results

    def explain(self, cases: Iterable[dict[str, Any]]) -> list[str]:
        """For each case the gates that apply and where each comes from."""
        lines: list[str] = []
        for case in cases:
            lines.append(f"layer {case['layer']} {case['precision']} theta {case['theta_setting']}")
            if case["what_if"] and not self.what_if:
                lines[-1] += ": a what-if, gates do not count it (--gate-what-if)"
                continue
            found = self.applying(case)
            lines += [f"  {applied.words}" for applied in found]
            if not found:
                lines[-1] += ": no gate"
        return lines
