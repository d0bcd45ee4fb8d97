"""The JSON document of a run: what `diffcheck run --json` writes, and what every other report is made from."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from ..gates import GateResult
from ..packages import installed_version
from ..recipe import Recipe, plain
from ..run import Outcome, Plan
from ..version import __version__
from .schema import SCHEMA_VERSION
from .words import PROXY_MARK, headline, summary


def environment(device: str) -> dict[str, Any]:
    """Versions and machine, for the JSON document."""
    return {
        "diffcheck": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in ("torch", "triton", "safetensors", "numpy")},
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def about(device: str) -> dict[str, Any]:
    """What every document of this package's own measurements begins with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(device),
        "command": sys.argv[1:],
    }


def document(todo: Plan, outcome: Outcome, gates: list[GateResult]) -> dict[str, Any]:
    """The whole run as JSON values (schema_version 1; `diffcheck schema run` prints its schema)."""
    config = todo.checkpoint.config
    reference = Recipe.reference(config)
    recipes = {
        f"{case.precision} @ {case.theta.label}": {
            "replaced": {name: plain(value) for name, value in case.recipe.differences(reference).items()},
            "fields": case.recipe.to_json(),
        }
        for case in todo.cases
    }
    found: dict[str, Any] = about(todo.device) | {
        "checkpoint": {
            "path": str(todo.checkpoint.directory),
            "config": {name: plain(getattr(config, name)) for name in config.sources if hasattr(config, name)},
            "sources": dict(config.sources),
            "absent_layers": list(todo.checkpoint.absent_layers),
        },
        "inputs": {
            "source": todo.source,
            "proxy": PROXY_MARK in todo.source,
            "length": todo.length,
            "seed": todo.options.seed,
            "needles": {str(layer): needles for layer, needles in outcome.needles.items()},
        },
        "partial": outcome.partial,
        "layers": {str(layer): shared for layer, shared in outcome.layers.items()},
        "notes": todo.notes + outcome.notes,
        "reference": reference.to_json(),
        "recipes": recipes,
        "cases": outcome.cases,
        "gates": [g.to_json() for g in gates],
        "probes": outcome.probes,
        "stage_evaluations": {"asked": outcome.stages_asked, "computed": outcome.stages_computed},
        "seconds": outcome.seconds,
    }
    return found | {"headline": headline(found), "summary": summary(found)}
