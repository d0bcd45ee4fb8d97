"""Kernel calls on made-up tensors, for faults that ordinary hidden states may never show.

A top-k that sorts scores into coarse bins is right until more scores than its buffer holds share the bin of the k-th
one. Real scores can be that close together; random ones are not. So the probe makes scores that are: a large common
offset with little spread, at a width below and one above where such kernels change their method.
"""

from __future__ import annotations

from typing import Any

import torch

from .invariants import MEANING, check_selection

ROWS = 4
WIDTHS = (12_000, 262_144)
OFFSET, SPREAD = 100.0, 0.5


def probe_topk(kernels: Any, k: int, device: str, *, seed: int = 0) -> list[dict[str, Any]]:
    """Run a top-k step on clustered scores of each of WIDTHS; one record a width, with the invariants that fail."""
    records = []
    for entries in WIDTHS:
        generator = torch.Generator().manual_seed(seed)
        scores = (OFFSET + SPREAD * torch.randn(ROWS, entries, generator=generator)).to(device)
        visible = torch.full((ROWS,), entries, dtype=torch.int32, device=device)
        selected = kernels.topk(scores.clone(), visible, k)
        check = check_selection(selected, scores, visible, k, again=[kernels.topk(scores.clone(), visible, k)])
        record = {"probe": "clustered scores", "backend": kernels.name, "rows": ROWS, "entries": entries, "k": k}
        records.append(record | check.to_json() | {"topk_wrong_rows": check.wrong_rows})
    return records


def describe(record: dict[str, Any]) -> str:
    """One line on a probe."""
    name = f"{record['backend']} top-k, {record['rows']} x {record['entries']} {record['probe']}, k {record['k']}"
    if not record["causes"]:
        return f"{name}: right"
    meaning = "; ".join(MEANING[cause] for cause in record["causes"])
    wrong = record["wrong_values"]
    return f"{name}: WRONG, {meaning} ({wrong} of {record['rows'] * record['k']} values)"
