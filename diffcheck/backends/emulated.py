"""The emulation: any recipe, in plain torch, on any device."""

from __future__ import annotations

from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl import STAGES, IndexerConfig, Trace


class EmulatedBackend:
    """Runs the stage pipeline; by definition without any kernel error."""

    name: str = "emulated"
    stages: tuple[str, ...] = STAGES

    def unavailable(self, device: str) -> str | None:
        """Never: torch is all it needs."""
        return None

    def refusal(self, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Never: every recipe can be emulated."""
        return None

    def run(self, pipeline: Pipeline, recipe: Recipe) -> Trace:
        """All stages of the recipe."""
        return pipeline.trace(recipe)
