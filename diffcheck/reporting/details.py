"""Every case's numbers, small enough to travel inside a page: columns of short numbers, compressed.

Columns rather than records, because equal neighbours compress well; three significant digits, four for overlaps,
because a page is for reading and the JSON document has the rest.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

from .words import Record, is_measured

PLAIN = (
    "layer", "precision", "theta_setting", "length", "backend", "verdict", "reason", "first_stage", "queries",
    "visible", "jaccard", "jaccard_ci", "jaccard_tied", "jaccard_ideal", "jaccard_kernel", "recall_mean", "recall_p1",
    "recall_worst", "needles", "needles_selected_reference", "needles_lost", "needle_rank_reference", "needle_rank",
    "attention_mass_lost", "attention_mass_lost_worst", "misses", "topk_wrong_rows", "score_rel_error", "format_error",
    "kernel_error", "margin", "bytes_per_entry", "nonfinite",
)  # fmt: skip
"""Fields that are shown as they are."""


def short(value: Any, digits: int = 3) -> Any:
    """The value with floats rounded to significant digits."""
    if isinstance(value, float):
        rounded = float(f"{value:.{digits}g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    if isinstance(value, dict):
        return {name: short(item, digits) for name, item in value.items()}
    return [short(item, digits) for item in value] if isinstance(value, list | tuple) else value


def details(cases: Sequence[Record]) -> dict[str, Any]:
    """Columns of all cases; a case that was not measured has null in most of them."""
    known = [case for case in cases if is_measured(case)]
    bins = sorted({(b["lo"], b["hi"]) for case in known for b in case["by_visible"]})
    example: Record = known[0] if known else {"survival": [], "margins": {"edges": []}, "stages": []}
    columns: dict[str, Any] = {
        name: [short(case.get(name), 4 if name.startswith("jaccard") else 3) for case in cases] for name in PLAIN
    }
    return {
        "columns": columns,
        "start": _worst(cases),
        "survival_bins": [[b["lo"], b["hi"]] for b in example["survival"]],
        "survival": _transposed(cases, [[short(b["p"]) for b in _of(case, "survival")] for case in cases]),
        "visible_bins": [list(b) for b in bins],
        "overlap": _transposed(cases, [_aligned(case, bins) for case in cases]),
        "margin_edges": list(example["margins"]["edges"]),
        "margins": _transposed(cases, [_margins(case) for case in cases]),
        "stage_names": [stage["stage"] for stage in example["stages"]],
        "format": _transposed(cases, [[short(s["format"]) for s in _of(case, "stages")] for case in cases]),
        "kernel": _transposed(cases, [[short(s["kernel"]) for s in _of(case, "stages")] for case in cases]),
    }


def _worst(cases: Sequence[Record]) -> int:
    """Which case to show first: the one with the least overlap, of those that are no what-ifs if there are any."""
    known = [i for i, case in enumerate(cases) if is_measured(case)]
    known = [i for i in known if not cases[i]["what_if"]] or known
    return min(known, key=lambda i: cases[i]["jaccard_tied"], default=0)


def _of(case: Record, name: str) -> list[Record]:
    found: list[Record] = case[name] if is_measured(case) else []
    return found


def _margins(case: Record) -> list[int]:
    return [*case["margins"]["counts"], case["margins"]["noiseless"]] if is_measured(case) else []


def _aligned(case: Record, bins: Sequence[tuple[int, int]]) -> list[float | None]:
    mine = {(b["lo"], b["hi"]): short(b["jaccard_tied"]) for b in _of(case, "by_visible")}
    return [mine.get(b) for b in bins]


def _transposed(cases: Sequence[Record], rows: list[list[Any]]) -> list[list[Any]]:
    """A column for each place, null for a case without."""
    width = max(map(len, rows), default=0)
    return [[row[place] if row else None for row in rows] for place in range(width)]


def packed(found: dict[str, Any]) -> str:
    """The columns as JSON, gzip and base64, byte for byte the same for the same columns."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """What `packed` put away."""
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    return found
