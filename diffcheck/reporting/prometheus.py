"""Metrics of a run in Prometheus' text format, for the textfile collector of node_exporter.

All are gauges: they say how the newest run came out. Those of a case carry the labels checkpoint, layer, precision,
theta, length and backend; a number that does not exist (no needles, a refused case) has no sample, one that came out as
NaN or infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from .words import HEAD_BINS, TAIL_BIN, Record, is_measured, survival_below

Value = Callable[[Record], float | None]
Samples = list[tuple[dict[str, str], float]]


def _field(name: str) -> Value:
    return lambda case: float("nan") if name in case["nonfinite"] else case.get(name)


CASE_GAUGES: dict[str, tuple[str, Value]] = {
    "jaccard_ratio": ("Mean Jaccard of the selection with the reference's.", _field("jaccard")),
    "jaccard_tied_ratio": ("The same, forgiving ties at the k-th place.", _field("jaccard_tied")),
    "jaccard_kernel_ratio": ("Mean Jaccard with the emulation of the same recipe.", _field("jaccard_kernel")),
    "recall_ratio": ("Mean share of the reference's entries that are selected.", _field("recall_mean")),
    "recall_worst_ratio": ("That share in the worst row.", _field("recall_worst")),
    "survival_head_ratio": (
        "Share still selected of entries of reference rank below 0.75 k.",
        lambda case: survival_below(case, HEAD_BINS),
    ),
    "survival_tail_ratio": (
        "Share still selected of entries of reference rank 0.9 k to k.",
        lambda case: case["survival"][TAIL_BIN]["p"],
    ),
    "needles_reference": ("Needles that the reference selects.", _field("needles_selected_reference")),
    "needles_lost": ("Needles that the reference selects and the case does not.", _field("needles_lost")),
    "needle_rank_median": ("Median rank of the needles, 0 is best.", _field("needle_rank_median")),
    "attention_mass_lost_ratio": ("Share of the attention's weight on dropped entries.", _field("attention_mass_lost")),
    "score_error_ratio": ("Relative L2 error of the scores against the reference.", _field("score_rel_error")),
    "format_error_ratio": ("The part of it that the recipe's choices imply.", _field("format_error")),
    "kernel_error_ratio": ("The part of it beyond them.", _field("kernel_error")),
    "margin_ratio": ("Median margin at the k-th place in units of the score noise.", _field("margin")),
    "topk_wrong_rows": ("Rows whose selection is wrong for their own scores.", _field("topk_wrong_rows")),
    "key_size_bytes": ("Bytes of one key in the cache.", _field("bytes_per_entry")),
    "compared_rows": ("Query rows that see more than k entries.", _field("queries")),
    "case_duration_seconds": ("Time of the case.", _field("seconds")),
}
"""Name without `diffcheck_`, what it says, and how it is read from a measured case."""


def metrics(document: Record) -> str:
    """The metrics of a run's document (or of a merged one)."""
    return "".join(f"{line}\n" for line in _lines(document))


def _lines(document: Record) -> Iterator[str]:
    checkpoint = {"checkpoint": document["checkpoint"]["path"]}
    labelled = [(_labels(case, checkpoint), case) for case in document["cases"]]
    for name, (words, value) in CASE_GAUGES.items():
        found = [(labels, value(case)) for labels, case in labelled if is_measured(case)]
        yield from _gauge(name, words, [(labels, number) for labels, number in found if number is not None])
    yield from _gauge(
        "case_verdict", "1 for the verdict of a case.", [(x | {"verdict": c["verdict"]}, 1) for x, c in labelled]
    )
    yield from _gauge(
        "case_first_stage",
        "1 for the first stage that departs from the reference.",
        [(x | {"stage": c["first_stage"]}, 1) for x, c in labelled if c.get("first_stage")],
    )
    gates = [(checkpoint | {"gate": gate["gate"]}, gate) for gate in document["gates"]]
    yield from _gauge("gate_passed", "1 for a gate that passed.", [(x, int(g["passed"])) for x, g in gates])
    yield from _gauge("gate_measured_cases", "Cases that a gate counted.", [(x, g["measured"]) for x, g in gates])
    yield from _gauge("gate_failed_cases", "Cases that failed a gate.", [(x, len(g["failed"])) for x, g in gates])
    probes: dict[tuple[str, str], int] = {}
    for probe in document["probes"]:
        key = (probe["backend"], str(probe["entries"]))
        probes[key] = max(probe["topk_wrong_rows"], probes.get(key, 0))
    yield from _gauge(
        "probe_wrong_rows",
        "Rows that a selection kernel gets wrong on clustered scores.",
        [(checkpoint | {"backend": backend, "entries": entries}, n) for (backend, entries), n in probes.items()],
    )
    environment = document["environment"]
    info = {
        "version": environment["diffcheck"],
        "python": environment["python"],
        "torch": environment["packages"].get("torch") or "",
        "device": environment["device"],
    }
    status = {"status": document["headline"]["status"]}
    finished = datetime.fromisoformat(document["finished"]).timestamp()
    yield from _gauge("run_status", "1 for fault, failed, differs, same or untested.", [(checkpoint | status, 1)])
    yield from _gauge("run_info", "Versions and machine.", [(checkpoint | info, 1)])
    yield from _gauge("run_cases", "Cases of the run.", [(checkpoint, len(document["cases"]))])
    yield from _gauge("run_duration_seconds", "Time of the run.", [(checkpoint, document["seconds"])])
    yield from _gauge("run_finished_timestamp_seconds", "When it finished, Unix time.", [(checkpoint, finished)])


def _labels(case: Record, checkpoint: dict[str, str]) -> dict[str, str]:
    return checkpoint | {
        "layer": str(case["layer"]),
        "precision": case["precision"],
        "theta": case["theta_setting"],
        "length": str(case["length"]),
        "backend": case["backend"],
    }


def _gauge(name: str, words: str, samples: Samples) -> Iterator[str]:
    if samples:
        yield f"# HELP diffcheck_{name} {words}"
        yield f"# TYPE diffcheck_{name} gauge"
    for labels, value in samples:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"diffcheck_{name}{{{inner}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "NaN" if value != value else repr(value)
