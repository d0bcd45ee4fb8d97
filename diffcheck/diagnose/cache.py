"""Cache pages as an observation: what is wrong with them, and what of them the deployment had as its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..pipeline import Pipeline
from ..refimpl.compressor import WINDOW
from .census import Breach
from .distance import distance
from .pages import PageReport, read_pages

if TYPE_CHECKING:
    from .engine import Engine


def take_pages(engine: Engine) -> None:
    """Judge the cache pages; the entries that are in order become the deployment's k_quant."""
    e = engine.evidence
    report = read_pages(e, engine.pipeline, engine.declared or engine.reference, lambda: _foreign_keys(engine))
    engine.notes += report.notes
    for cause, value, where, entries in report.faults:
        engine.breaches.append(
            Breach(
                stage="k_cache",
                cause=cause,
                failed=entries,
                rows=e.entries,
                where=where,
                field="pages",
                value=value,
            )
        )
    first = e.start // WINDOW
    if report.keys is None or bool((~report.known[max(first, e.first_known) :]).all()):
        engine.notes.append("pages are not used as keys")
        return
    engine.other_keys = {name: keys[first:] for name, keys in report.others.items()}
    if "k_quant" not in engine.observed:
        keys = torch.where(report.known[:, None], report.keys, 0.0)
        engine.observed["k_quant"] = keys[first:]
        engine.known = report.known
        engine.pipeline = engine.new_pipeline(e.queries[engine.rows], keys[:first])
    else:
        engine.known = torch.arange(e.entries) >= first
        engine.other_keys[report.layout.name if report.layout else ""] = report.keys[first:]
        _reader(engine, report)


def _reader(engine: Engine, report: PageReport) -> None:
    """Whether the keys that were observed are the pages', read in another layout."""
    seen, first = engine.observed["k_quant"].float(), engine.evidence.start // WINDOW
    assert report.keys is not None, "the caller has keys"
    if distance(seen, report.keys[first:]).fits:
        return
    for name, keys in engine.other_keys.items():
        # absurd numbers agree as bits do
        if bool(((seen == keys) | (seen.isnan() & keys.isnan())).float().mean() > 0.99):
            where = f"pages are {report.layout.name if report.layout else ''} and were read as {name}"
            engine.breaches.append(
                Breach(
                    stage="k_cache", cause="page_layout", failed=len(seen), rows=len(seen), where=where,
                    field="pages", value=name,
                )
            )  # fmt: skip
            engine.observed["k_quant"] = report.keys[first:]


def _foreign_keys(engine: Engine) -> list[tuple[int, Tensor]]:
    """Keys that other layers would have: of their own inputs where the trace has them, else of this layer's."""
    e, found = engine.evidence, []
    for layer, weights in e.other_weights():
        for x in [e.other_x[layer]] if layer in e.other_x else [e.x]:
            pipeline = Pipeline(e.config, weights, x, e.qr, start=e.start, state=engine.pipeline.call.state)
            found += [(layer, pipeline.stage(engine.reference, name).float()) for name in ("k_hadamard", "k_rope")]
    return found
