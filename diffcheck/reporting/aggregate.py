"""Many cases as one: what a page shows of a precision over all layers, from the cases' own binned numbers.

Shares are pooled with their counts as weights, errors are the largest of any layer. A case that was not measured
(vacuous, refused) adds nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .words import HEAD_BINS, TAIL_BIN, Record, is_measured, survival_below

VERDICTS = ("failed", "kernel", "config", "format", "same", "vacuous", "refused")
"""From worst to not measured."""


def select(cases: Sequence[Record], **wanted: Any) -> list[Record]:
    """The cases whose fields have these values."""
    return [case for case in cases if all(case[name] == value for name, value in wanted.items())]


def measured(cases: Sequence[Record]) -> list[Record]:
    """The cases that have metrics."""
    return [case for case in cases if is_measured(case)]


def pooled_survival(cases: Sequence[Record]) -> list[tuple[float, float, float | None, int]]:
    """(lo, hi, share still selected, entries) of each survival bin, in units of k, over all cases."""
    found = []
    for bins in zip(*(case["survival"] for case in measured(cases)), strict=True):
        known = [b for b in bins if b["p"] is not None]
        total = sum(b["n"] for b in known)
        share = sum(b["p"] * b["n"] for b in known) / total if total else None
        found.append((bins[0]["lo"], bins[0]["hi"], share, total))
    return found


def pooled_overlap(cases: Sequence[Record]) -> list[tuple[int, int, float, int]]:
    """(lo, hi, mean tie-tolerant Jaccard, rows) of each bin of entries that a row sees, over all cases."""
    sums: dict[tuple[int, int], tuple[float, int]] = {}
    for b in (b for case in measured(cases) for b in case["by_visible"]):
        total, rows = sums.get((b["lo"], b["hi"]), (0.0, 0))
        sums[b["lo"], b["hi"]] = total + b["jaccard_tied"] * b["queries"], rows + b["queries"]
    return [(lo, hi, total / rows, rows) for (lo, hi), (total, rows) in sorted(sums.items())]


def pooled_margins(cases: Sequence[Record]) -> tuple[list[float], list[int], int]:
    """(edges, rows in each bin, rows whose scores have no noise) over all cases."""
    all_margins = [case["margins"] for case in measured(cases)]
    if not all_margins:
        return [], [], 0
    counts = [sum(n) for n in zip(*(m["counts"] for m in all_margins), strict=True)]
    return list(all_margins[0]["edges"]), counts, sum(m["noiseless"] for m in all_margins)


def needle_ranks(cases: Sequence[Record], field: str = "needle_rank") -> list[int | None]:
    """Ranks of all needles of all cases; None for one that its query cannot see."""
    found: list[int | None] = []
    for case in measured(cases):
        value = case[field]
        found += value if isinstance(value, list) else [value] if case["needles"] else []
    return found


def share_below(ranks: Sequence[int | None], limits: Sequence[float]) -> list[float]:
    """Share of all needles whose rank is below each limit."""
    known = sorted(rank for rank in ranks if rank is not None)
    return [bisect.bisect_left(known, limit) / len(ranks) for limit in limits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One stage over several layers: the largest format and kernel errors, and the layers where it is the first."""

    stage: str
    format: float | None
    kernel: float | None
    first_in: int


def ladder(cases: Sequence[Record]) -> list[Rung]:
    """The stages in pipeline order; the selection itself has no error and only says where it is the first."""
    known = measured(cases)
    rungs = []
    for stages in zip(*(case["stages"] for case in known), strict=True):
        name = stages[0]["stage"]
        first = sum(case["first_stage"] == name for case in known)
        rungs.append(Rung(stage=name, format=_most(stages, "format"), kernel=_most(stages, "kernel"), first_in=first))
    if known:
        first = sum(case["first_stage"] == "topk" for case in known)
        rungs.append(Rung(stage="topk", format=None, kernel=None, first_in=first))
    return rungs


def _most(records: Sequence[Record], name: str) -> float | None:
    return max((r[name] for r in records if r[name] is not None), default=None)


def _least(values: Sequence[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One precision at one theta and length over all layers: the worst of each number."""

    precision: str
    theta: str
    length: int
    layers: int
    verdict: str
    needles_lost: int
    needles_selected_reference: int
    attention_mass_lost: float | None
    head: float | None
    tail: float | None
    jaccard_tied: float | None
    jaccard_tied_mean: float | None
    jaccard_kernel: float | None
    score_rel_error: float | None
    format_error: float | None
    kernel_error: float | None
    first_stage: str | None


def groups(cases: Sequence[Record]) -> list[Group]:
    """All groups in the order of the cases."""
    found = []
    for precision, theta, length in dict.fromkeys((c["precision"], c["theta_setting"], c["length"]) for c in cases):
        mine = select(cases, precision=precision, theta_setting=theta, length=length)
        known = measured(mine)
        verdicts = {case["verdict"] for case in mine}
        tied = [case["jaccard_tied"] for case in known]
        firsts = [rung for rung in ladder(mine) if rung.first_in]
        lost, had = (sum(c[n] or 0 for c in known) for n in ("needles_lost", "needles_selected_reference"))
        found.append(
            Group(
                precision=precision, theta=theta, length=length, layers=len(mine),
                verdict=next((v for v in VERDICTS if v in verdicts), min(verdicts)),
                needles_lost=lost, needles_selected_reference=had,
                attention_mass_lost=_most(known, "attention_mass_lost"),
                head=_least([survival_below(c, HEAD_BINS) for c in known]),
                tail=_least([c["survival"][TAIL_BIN]["p"] for c in known]),
                jaccard_tied=_least(tied), jaccard_tied_mean=sum(tied) / len(tied) if tied else None,
                jaccard_kernel=_least([c["jaccard_kernel"] for c in known]),
                score_rel_error=_most(known, "score_rel_error"), format_error=_most(known, "format_error"),
                kernel_error=_most(known, "kernel_error"), first_stage=firsts[0].stage if firsts else None,
            )
        )  # fmt: skip
    return found


def by_length(cases: Sequence[Record]) -> list[tuple[int, float]]:
    """(tokens, mean tie-tolerant Jaccard over layers) of each length that was measured."""
    known = sorted(measured(cases), key=lambda case: case["length"])
    found = []
    for length, some in itertools.groupby(known, key=lambda case: case["length"]):
        values = [case["jaccard_tied"] for case in some]
        found.append((int(length), sum(values) / len(values)))
    return found
