"""Needle tests on text: a forward pass for each length and depth, and in each layer where the needle ranks.

A needle is *found* by a token of its question in a layer when one of the needle's entries is selected in that row. The
deployment *loses* it in a layer when some token of the question finds it under the reference and none does under the
deployment's recipe. `kept` is finer: of all (layer, needle, question token) that find it under the reference, the share
that still do. A row that sees no more than k entries finds everything, so it counts nowhere. A long needle has many
entries and is hit by chance easily, which is why the chance stands beside.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .. import ranks
from ..capturing.forward import Captured, capture_forward
from ..cases import Case
from ..checkpoint.model import ModelCheckpoint
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl.scoring import visible_entries
from .build import NeedleTest, Placed, build_text

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One length and depth: where the needles lie, and a record for each layer and precision, the reference's first.

    A record: layer, precision, theta_setting, and for each needle lists over the tokens of its question: rank (best of
    its entries, 0 is best), selected; `counted`, whether the row sees more than k entries; `chance`, see `summarise`.
    """

    length: int
    depth: float
    placed: tuple[Placed, ...]
    records: list[dict[str, Any]] = field(default_factory=list)


def run_grid(
    model: ModelCheckpoint,
    layers: Sequence[int],
    test: NeedleTest,
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    run_dir: Path | None = None,
    say: Say = lambda line: None,
) -> Iterator[Cell]:
    """Run every length and depth. run_dir keeps finished layers of each cell, so that an interrupted grid goes on."""
    texts = [(length, depth, *build_text(test, length, depth)) for length in test.lengths for depth in test.depths]
    for number, (length, depth, ids, placed) in enumerate(texts):
        say(f"text {number + 1} of {len(texts)}: {length} tokens, needle at depth {depth:g}")
        where = Path(tempfile.mkdtemp(prefix="diffcheck-")) if run_dir is None else run_dir / f"{length}-{depth:g}"
        try:
            rows = torch.cat([torch.arange(p.question[0], p.question[1] + 1) for p in placed])
            wanted = Captured(layers=tuple(layers), queries=rows)
            capture_forward(model, ids, wanted, where, device=device, say=say)
            cell = Cell(length=length, depth=depth, placed=placed)
            for layer in layers:
                tensors = load_file(where / f"layer-{layer:04d}.safetensors")
                cell.records.extend(_layer_records(model, layer, tensors, placed, cases, device))
            yield cell
        finally:
            if run_dir is None:
                shutil.rmtree(where, ignore_errors=True)


def _layer_records(
    model: ModelCheckpoint,
    layer: int,
    tensors: dict[str, torch.Tensor],
    placed: Sequence[Placed],
    cases: Sequence[Case],
    device: str,
) -> Iterator[dict[str, Any]]:
    config = model.config.indexer
    weights = model.checkpoint.load(layer).to(device)
    rows = tensors["queries"]
    pipeline = Pipeline(config, weights, tensors["x"].to(device), tensors["qr"].to(device), queries=rows.to(device))
    visible = visible_entries(pipeline.queries)
    reference = Recipe.reference(config)
    asked = [("reference", "checkpoint", reference)]
    asked += [(c.precision, c.theta.label, c.recipe) for c in cases if c.recipe.differences(reference)]
    for precision, theta, recipe in asked:
        scores, selected = pipeline.stage(recipe, "scores"), pipeline.stage(recipe, "topk")
        found, first = [], 0
        for place in placed:
            count = place.question[1] - place.question[0] + 1
            part = slice(first, first + count)
            first += count
            span = ranks.needle_entries(*place.needle)
            span = range(span.start, min(span.stop, scores.shape[1]))
            result = ranks.needles(
                scores=scores[part], selected=selected[part], visible=visible[part], spans=[span] * count
            )
            counted = (visible[part] > config.index_topk).tolist()
            # drawn with replacement, which is close while a needle is small among the entries
            chance = [1 - (1 - config.index_topk / max(v, 1)) ** len(span) for v in visible[part].tolist()]
            found.append({"rank": result.ranks, "selected": result.selected, "counted": counted, "chance": chance})
        yield {"layer": layer, "precision": precision, "theta_setting": theta, "needles": found}


def summarise(cell: Cell) -> list[dict[str, Any]]:
    """For each precision of a cell: `kept` (None: nothing to keep), how many (layer, needle) it `lost` of `found`.

    `chance` is the share of question tokens that k entries drawn blindly would make find the needle: what `kept` means
    only shows above it.
    """
    reference = {r["layer"]: r["needles"] for r in cell.records if _is_reference(r)}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in cell.records:
        key = (record["precision"], record["theta_setting"])
        total = found.setdefault(
            key, {"tokens": 0, "kept": 0, "found": 0, "lost": 0, "lost_layers": [], "rows": 0, "hit": 0.0}
        )
        for ours, theirs in zip(record["needles"], reference[record["layer"]], strict=True):
            had = [c and s for c, s in zip(theirs["counted"], theirs["selected"], strict=True)]
            keeps = [h and s for h, s in zip(had, ours["selected"], strict=True)]
            total["rows"] += sum(theirs["counted"])
            total["hit"] += sum(p for p, c in zip(theirs["chance"], theirs["counted"], strict=True) if c)
            total["tokens"] += sum(had)
            total["kept"] += sum(keeps)
            total["found"] += any(had)
            counted = zip(ours["counted"], ours["selected"], strict=True)
            if any(had) and not any(c and s for c, s in counted):
                total["lost"] += 1
                total["lost_layers"].append(record["layer"])
    return [
        {
            "length": cell.length,
            "depth": cell.depth,
            "precision": precision,
            "theta_setting": theta,
            "vacuous": not total["rows"],
            "kept": total["kept"] / total["tokens"] if total["tokens"] else None,
            "chance": total["hit"] / total["rows"] if total["rows"] else None,
            "tokens": total["tokens"],
            "found": total["found"],
            "lost": total["lost"],
            "lost_layers": sorted(set(total["lost_layers"])),
        }
        for (precision, theta), total in found.items()
    ]


def _is_reference(record: dict[str, Any]) -> bool:
    return (record["precision"], record["theta_setting"]) == ("reference", "checkpoint")
