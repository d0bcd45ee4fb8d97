"""The contract of a backend."""

from __future__ import annotations

from typing import Protocol

from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import IndexerConfig, Trace


class Backend(Protocol):
    """Executes recipes on one layer and returns the stages that it can show."""

    name: str
    stages: tuple[str, ...]
    """Names of the stages in the traces it returns."""

    def unavailable(self, device: str) -> str | None:
        """Why this backend cannot run on `device` ("cpu" or "cuda") here, with the remedy; None if it can."""

    def refusal(self, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Why this backend cannot run this recipe exactly; None if it can."""

    def run(self, pipeline: Pipeline, recipe: Recipe) -> Trace:
        """Run the recipe on the pipeline's layer, inputs and query rows."""
