"""`--objective answers`: what the model says when its indexers run a recipe.

A text goes through the whole model once with the reference's indexers, and once for each recipe with the recipe's in
every layer that has one. An *answer* is a position that sees more than k entries and where the reference's most likely
next token is the text's own; it is kept if the recipe's is too. So later layers see what earlier ones really made of
their selection, which no per-layer recall shows. It costs a forward pass for each recipe, so only those are run that
the sweep measured on all rows in some layer. It runs here, not on a cluster.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..capturing.text import load_text_inputs
from ..checkpoint.model import ModelCheckpoint
from ..errors import InputError
from ..journal import Journal
from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerWeights
from ..refimpl.model import LayerWeights, logits, run_model
from ..refimpl.scoring import visible_entries
from ..statistics import resampling_groups
from .ranking import Sample
from .search import Measured, Say, SweepPlan, identity

HEAD_ROWS = 512
"""Rows whose logits exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerText:
    """A model, the ids of a text, and the positions whose next token counts."""

    model: ModelCheckpoint
    tokens: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)

    @property
    def digest(self) -> str:
        """Of the ids."""
        return hashlib.sha256(json.dumps(self.tokens.tolist()).encode()).hexdigest()


def answer_text(checkpoint: Path, *, text: Path | None, tokens: Path | None) -> AnswerText:
    """Check that the whole model and a text for it are there; InputError says what is missing."""
    inputs = load_text_inputs(checkpoint, text=text, tokens=tokens, layers=None)
    model, config = inputs.model, inputs.model.config
    if model.layers_present < config.layers:
        raise InputError(
            f"--objective answers: {model.directory} holds layers 0 to {model.layers_present - 1} whole, "
            f"expected all {config.layers}"
        )
    if not {"head.weight", "norm.weight"} <= set(model.load_head()):
        raise InputError(f"--objective answers: {model.directory} has no head.weight or norm.weight, expected the head")
    ids = torch.tensor(inputs.tokens, dtype=torch.int64)
    positions = torch.arange(len(ids) - 1)
    positions = positions[visible_entries(positions) > config.indexer.index_topk]
    if not len(positions):
        raise InputError(
            f"--objective answers: {len(ids)} tokens, expected more than {4 * config.indexer.index_topk + 4}, "
            "where selection begins"
        )
    return AnswerText(model=model, tokens=ids, positions=positions)


def right_answers(given: AnswerText, recipe: Recipe | None, device: str) -> Tensor:
    """Whether the most likely next token is the text's own: bool [positions]. recipe None: the reference's indexers."""
    config = given.model.config

    def select(layer: int, weights: IndexerWeights, x: Tensor, qr: Tensor) -> Tensor:
        assert recipe is not None, "the reference selects by itself"
        return Pipeline(config.indexer, weights, x, qr).stage(recipe, "topk")

    streams = None
    chosen = None if recipe is None else select
    for result in run_model(config, given.model.load, given.tokens, device=device, select=chosen):
        streams = result.streams
    assert streams is not None, "a model has layers"
    top = LayerWeights(given.model.load_head(), config, "top").to(device)
    rows = given.positions.split(HEAD_ROWS)
    best = torch.cat([logits(config, top, streams[part.to(device)]).argmax(-1).cpu() for part in rows])
    return best == given.tokens[given.positions + 1]


def _run(given: AnswerText, recipe: Recipe | None, device: str) -> list[bool]:
    return [bool(right) for right in right_answers(given, recipe, device)]


def measure_answers(todo: SweepPlan, given: AnswerText, found: Measured, say: Say) -> Sample:
    """Answers kept [recipes, 1, answers], NaN for recipes that were not run; kept in the run directory if any."""
    o = todo.options
    rows = (~np.isnan(found.recall.values)).sum(-1)
    finalists = [c for c in range(len(todo.candidates)) if (rows[c] == rows.max(0)).any()]
    finalists.sort(key=lambda c: -found.recall.estimates[c])
    deadline = np.inf if o.budget is None else time.monotonic() + 60 * o.budget - found.seconds
    journal = Journal.open(o.run_dir, identity=identity(todo), resume=True) if o.run_dir else None
    try:

        def kept(name: str, make: Callable[[], Sequence[bool]]) -> np.ndarray:
            key = f"answers {name}"
            if journal is not None and key in journal.records:
                return np.asarray(journal.records[key], bool)
            record = list(make())
            if journal is not None:
                journal.append(key, record)
            return np.asarray(record, bool)

        had = kept("by the reference's own indexers", partial(_run, given, None, todo.device))
        if not had.any():
            raise InputError("--objective answers: the model predicts no token of this text, expected one it knows")
        values = np.full((len(todo.candidates), 1, int(had.sum())), np.nan)
        for number, c in enumerate(finalists):
            if time.monotonic() >= deadline and number:
                found.notes.append(f"the budget was used up after the answers of {number} of {len(finalists)} recipes")
                break
            candidate = todo.candidates[c]
            right = kept(candidate.name, partial(_run, given, candidate.recipe, todo.device))
            values[c, 0] = right[had]
            say(f"answers {number + 1} of {len(finalists)}: {candidate.name} keeps {values[c].mean():.1%}")
    finally:
        if journal is not None:
            journal.__exit__(None, None, None)
    groups = resampling_groups(len(given.positions))[had]
    return Sample(values=values, groups=np.unique(groups, return_inverse=True)[1])
