"""One document out of several: runs at several lengths, or on several machines, beside one another in one report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError
from .schema import SCHEMA_VERSION
from .words import Record, headline, summary

CASE_KEY = ("layer", "precision", "theta_setting", "length", "backend")
NEEDED = (
    "cases", "gates", "probes", "notes", "recipes", "reference", "inputs", "checkpoint", "environment", "finished",
    "partial", "layers", "command", "seconds", "headline", "summary", "stage_evaluations",
)  # fmt: skip
NEEDED_OF_A_CASE = ("layer", "precision", "theta_setting", "what_if", "verdict", "length")
NEEDED_OF_A_MEASURED_CASE = ("by_visible", "margins", "stages", "survival", "jaccard_kernel")


def read_document(path: Path) -> Record:
    """The document in a JSON file; InputError for a file that no `diffcheck run --json` of this schema wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise InputError(f"{path}: {reason}, expected what `diffcheck run --json` wrote") from None
    if not isinstance(found, dict) or not isinstance(found.get("cases"), list):
        raise InputError(f"{path}: has no cases, expected what `diffcheck run --json` wrote")
    if found.get("schema_version") != SCHEMA_VERSION:
        version = found.get("schema_version")
        raise InputError(f"{path}: schema_version is {version!r}, expected {SCHEMA_VERSION}")
    missing = [name for name in NEEDED if name not in found]
    for case in found["cases"]:
        missing += [name for name in NEEDED_OF_A_CASE if name not in case]
        if case.get("jaccard_tied") is not None:
            missing += [name for name in NEEDED_OF_A_MEASURED_CASE if name not in case]
    if missing:
        raise InputError(f"{path}: lacks {missing[0]}, expected the fields that `diffcheck schema run` prints")
    return found


def merge(documents: Sequence[Record]) -> Record:
    """All cases of the documents as one; what belongs to a run is the first one's, with a note where others differ.

    A precision that ran on several backends becomes one precision for each, "fp8 on triton". InputError where two
    documents hold the same case, or select another number of entries.
    """
    first = documents[0]
    if len(documents) == 1:
        return first
    topk = {document["checkpoint"]["config"]["index_topk"] for document in documents}
    if len(topk) > 1:
        raise InputError(f"reports select {' and '.join(map(str, sorted(topk)))} entries, expected one checkpoint")
    everything = [case for document in documents for case in document["cases"]]
    keys = [tuple(case[name] for name in CASE_KEY) for case in everything]
    for key, count in Counter(keys).items():
        if count > 1:
            what = ", ".join(f"{name} {value}" for name, value in zip(CASE_KEY, key, strict=True))
            raise InputError(f"two reports hold {what}, expected each case once")
    if len({key[:-1] for key in keys}) < len(keys):
        everything = [case | {"precision": f"{case['precision']} on {case['backend']}"} for case in everything]
    found = first | {
        "cases": everything,
        "gates": _gates([gate for document in documents for gate in document["gates"]]),
        "probes": [probe for document in documents for probe in document["probes"]],
        "notes": list(dict.fromkeys(note for document in documents for note in document["notes"])),
        "recipes": {name: recipe for document in documents for name, recipe in document["recipes"].items()},
        "partial": any(document["partial"] for document in documents),
        "seconds": sum(document["seconds"] for document in documents),
        "finished": max(document["finished"] for document in documents),
        "stage_evaluations": {
            name: sum(document["stage_evaluations"][name] for document in documents) for name in ("asked", "computed")
        },
        "inputs": first["inputs"]
        | {
            "source": "; ".join(dict.fromkeys(document["inputs"]["source"] for document in documents)),
            "proxy": any(document["inputs"]["proxy"] for document in documents),
            "length": max(document["inputs"]["length"] for document in documents),
        },
    }
    found.pop("baseline", None)  # a run's own, not that of all
    for name in ("environment", "checkpoint"):
        if any(document[name] != first[name] for document in documents):
            found["notes"].append(f"the reports differ in {name}: shown is that of the first")
    return found | {"headline": headline(found), "summary": summary(found)}


def _gates(gates: Sequence[Record]) -> list[Record]:
    """A gate that several runs had, as one."""
    found: dict[str, Record] = {}
    for gate in gates:
        before = found.get(gate["gate"])
        found[gate["gate"]] = (
            gate
            if before is None
            else before
            | {
                "measured": before["measured"] + gate["measured"],
                "failed": before["failed"] + gate["failed"],
                "checked": before["checked"] + gate["checked"],
                "passed": before["passed"] and gate["passed"],
            }
        )
    return list(found.values())
