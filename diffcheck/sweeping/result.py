"""The result of a sweep as plain values: every recipe with its numbers, the fronts, and a format for each layer."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import InputError
from ..memory import measure as measure_memory
from ..recipe import Recipe, plain
from ..refimpl.compressor import WINDOW
from .ranking import Sample, as_list, cheapest_per_layer, cheapest_uniform, pareto, wilson
from .search import Measured, SweepPlan

CONTEXT = 524_288
BASELINE = "e4m3/128/fp32"


def document(todo: SweepPlan, found: Measured, extra: dict[str, Sample], speeds: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON values (schema_version 1). extra: samples by objective that `found` does not hold."""
    samples = {"recall": found.recall, "needle": found.needles} | extra
    costs = [c.bytes for c in todo.candidates]
    fronts = {name: _front(todo, sample, costs) for name, sample in samples.items() if sample is not None}
    chosen = samples[todo.options.objective]
    assert chosen is not None, "plan and sweep refuse an objective without a measurement"
    return {
        "schema_version": 1,
        "command": sys.argv[1:],
        "checkpoint": str(todo.texts.checkpoint.directory),
        "inputs": {
            "source": todo.texts.source,
            "texts": todo.texts.count,
            "lengths": list(todo.texts.lengths),
            "rows": len(found.where),
            "resampled": _groups(todo, found.recall),
        },
        "objective": todo.options.objective,
        "floor": todo.options.floor,
        "layers": list(found.layers),
        "rungs": todo.sizes,
        "recipes": _recipes(todo, found, samples, costs, speeds),
        "fronts": fronts,
        "mixed": _mixed(todo, found, costs),
        "cases": {"measured": found.measured_cases, "kept": found.kept_cases},
        "notes": found.notes,
        "seconds": found.seconds,
    }


def _groups(todo: SweepPlan, sample: Sample) -> str:
    several = sample.group_count == todo.texts.count and todo.texts.count > 1
    return f"{sample.group_count} {'texts' if several else 'blocks of consecutive query rows'}"


def _recipes(
    todo: SweepPlan, found: Measured, samples: dict[str, Sample | None], costs: list[float], speeds: dict[str, Any]
) -> list[dict[str, Any]]:
    recall, reference = found.recall, Recipe.reference(todo.texts.checkpoint.config)
    chances = {name: sample.chances(costs) for name, sample in samples.items() if sample is not None}
    order = np.argsort(-np.nan_to_num(recall.estimates, nan=-1.0), kind="stable").tolist()
    slots = _slots(todo)
    records = []
    for i, candidate in enumerate(todo.candidates):
        layers, rows = recall.by_layer[i], recall.values[i]
        worst_layer, worst_row = int(np.nanargmin(layers)), np.unravel_index(np.nanargmin(rows), rows.shape)
        text, position = found.where[int(worst_row[1])]
        record = {
            "name": candidate.name,
            "bytes_per_entry": candidate.bytes,
            "bytes_per_token": candidate.bytes / WINDOW * len(todo.texts.checkpoint.config.indexer_layers),
            "bytes_per_context": candidate.bytes / WINDOW * len(todo.texts.checkpoint.config.indexer_layers) * CONTEXT,
            "slots_share": slots.get(candidate.name),
            "replaced": {n: plain(v) for n, v in candidate.recipe.differences(reference).items()},
            "rows_measured": [int((~np.isnan(layer)).sum()) for layer in rows],
            "rank": order.index(i) + 1,
            "recall": float(recall.estimates[i]),
            "recall_ci": as_list(recall.interval(i)),
            "recall_plain": float(found.plain.estimates[i]),
            "recall_by_layer": {str(n): float(v) for n, v in zip(found.layers, layers, strict=True)},
            "recall_by_layer_ci": {
                str(n): as_list(recall.layer_interval(i, j)) for j, n in enumerate(found.layers)
            },
            "worst_layer": {"layer": found.layers[worst_layer], "recall": float(layers[worst_layer])},
            "worst_row": {
                "layer": found.layers[int(worst_row[0])], "text": text, "query": position,
                "recall": float(rows[worst_row]),
            },
            "probability_best": {name: float(values[i]) for name, values in chances.items()},
            "logits": speeds.get(candidate.name),
        }  # fmt: skip
        for name, sample in samples.items():
            if name != "recall" and sample is not None:
                record |= _share(name, sample, i)
        records.append(record)
    return records


def _share(name: str, sample: Sample, recipe: int) -> dict[str, Any]:
    """A share of things that were kept, such as needles: of single ones by Wilson, of texts by resampling."""
    known = sample.values[recipe][~np.isnan(sample.values[recipe])]
    if not known.size:
        return {f"{name}_kept": None, f"{name}_count": 0, f"{name}_share": None, f"{name}_ci": None}
    single = sample.group_count == sample.values.shape[-1]
    interval = wilson(int(known.sum()), known.size) if single else sample.interval(recipe)
    return {
        f"{name}_kept": int(known.sum()),
        f"{name}_count": int(known.size),
        f"{name}_share": float(known.mean()),
        f"{name}_ci": as_list(interval),
    }


def _front(todo: SweepPlan, sample: Sample, costs: list[float]) -> list[dict[str, Any]]:
    """The Pareto front by rising bytes; of each, what it gains over the one before, paired."""
    front, steps = pareto(costs, sample.estimates), []
    for place, i in enumerate(front):
        cheaper = next((j for j in reversed(front[:place]) if costs[j] < costs[i]), None)
        gain = None if cheaper is None else sample.difference(i, cheaper)
        steps.append(
            {
                "name": todo.candidates[i].name,
                "gain": None if gain is None else gain[0],
                "gain_ci": None if gain is None else as_list(gain[1]),
                "over": None if cheaper is None else todo.candidates[cheaper].name,
            }
        )
    return steps


def _slots(todo: SweepPlan) -> dict[str, float]:
    """Share of cache slots gained against e4m3 with fp32 scales; nothing where the config lacks the rest of the model.

    Two recipes with keys of equal size have equal shares, so each size is counted once.
    """
    directory = todo.texts.checkpoint.directory
    try:
        base = measure_memory(directory, [BASELINE]).costs[0]
    except InputError:
        return {}
    rest = base.kv_token - base.token
    layers = len(todo.texts.checkpoint.config.indexer_layers)
    return {c.name: base.kv_token / (rest + layers * c.bytes / WINDOW) - 1 for c in todo.candidates}


def _mixed(todo: SweepPlan, found: Measured, costs: list[float]) -> dict[str, Any]:
    """The cheapest format for each layer, beside the cheapest one for all of them."""
    floor = todo.options.floor
    mixed = cheapest_per_layer(found.recall, costs, floor)
    uniform = cheapest_uniform(found.recall, costs, floor)
    return {
        "by_layer": {
            str(layer): todo.candidates[choice].name for layer, choice in zip(found.layers, mixed.choice, strict=True)
        },
        "below_floor": [found.layers[layer] for layer in mixed.below],
        "bytes_per_entry": mixed.bytes,
        "bytes_per_context": mixed.bytes / WINDOW * len(found.layers) * CONTEXT,
        "recall": mixed.estimate,
        "uniform": None
        if uniform is None
        else {
            "name": todo.candidates[uniform].name,
            "bytes_per_entry": costs[uniform],
            "recall": float(found.recall.estimates[uniform]),
        },
    }
