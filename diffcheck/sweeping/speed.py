"""Measured speed of the logits for the formats that have a kernel, for a sweep on a GPU.

What decides the time is the page layout and the type of the queries, not how values were rounded before they were
stored: so `e4m3/128/fp32` and `qat+e4m3/128/ue8m0` share a time. It is that of this project's decode kernel on random
codes, as `diffcheck bench` takes it: accuracy first, and no time for a wrong result.
"""

from __future__ import annotations

from typing import Any

from ..bench import bench
from ..bench.shapes import DIM, HEADS
from ..custom import Storage
from ..errors import EnvironmentMissing
from ..formats import Format
from ..refimpl.compressor import WINDOW
from .search import SweepPlan

REQUESTS, BACKEND = 64, "triton"
QUERIES = {"e4m3": "e4m3", "bf16": "e4m3", "e2m1": "e2m1"}
"""Queries that are timed with each key layout: what engines have."""


def layout(fmt: Storage | None) -> str | None:
    """The page layout that holds a format; None where no kernel reads one."""
    if not isinstance(fmt, Format):
        return None
    if fmt.element == "bf16":
        return "bf16"
    known = {"e4m3": (128, ("fp32", "ue8m0")), "e2m1": (32, ("ue8m0",))}
    block, scales = known.get(fmt.element, (0, ()))
    return fmt.element if fmt.block == block and fmt.scale in scales else None


def logits_speeds(todo: SweepPlan) -> dict[str, dict[str, Any]]:
    """By recipe: the layout, shape and backend, and either `ms` and `tb_s`, or the `reason` why there are none."""
    config, entries = todo.texts.checkpoint.config, max(todo.texts.lengths) // WINDOW
    if (config.index_n_heads, config.index_head_dim) != (HEADS, DIM):
        return {}
    pairs = {c.name: (layout(c.recipe.q_format), layout(c.recipe.k_format)) for c in todo.candidates}
    timed = {name: k for name, (q, k) in pairs.items() if k is not None and q == QUERIES[k]}
    if not timed:
        return {}
    shape, found = f"decode:{REQUESTS}x{entries}", dict[str, dict[str, Any]]()
    try:
        for record in bench([BACKEND], [shape], sorted(set(timed.values()))):
            if record.get("backend") == BACKEND:
                found[record["format"]] = _speed(record)
    except EnvironmentMissing:
        return {}
    about = {"shape": shape, "backend": BACKEND}
    return {name: {"layout": k, **about, **found[k]} for name, k in timed.items() if k in found}


def _speed(record: dict[str, Any]) -> dict[str, Any]:
    if "ms" in record:
        return {"ms": record["ms"], "tb_s": record["tb_s"], "error": record["error"]}
    return {"ms": None, "reason": next(why for why in ("wrong", "refused", "failed") if why in record)}
