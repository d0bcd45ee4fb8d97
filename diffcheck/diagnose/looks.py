"""What the engine looks at a recipe with: a stage's distance, the shares of it, and the rows it is taken on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..pipeline import Pipeline
from ..recipe import Recipe
from ..refimpl.compressor import WINDOW
from .arms import Arm
from .distance import Distance

WIDE_ROWS = 256
"""Query rows that are compared at most."""


@dataclass(frozen=True, slots=True)
class StageLook:
    """Computes a stage under a recipe and compares it; what is computed is forgotten again unless held."""

    pipeline: Pipeline
    stage: str
    compare: Callable[[Tensor], Distance]

    def __call__(self, recipe: Recipe) -> Distance:
        """The distance that is left."""
        with self.pipeline.scratch():
            return self.compare(self.pipeline.stage(recipe, self.stage))

    def hold(self, recipe: Recipe) -> None:
        """Keep the stages of this recipe."""
        self.pipeline.stage(recipe, self.stage)


def digits(tensor: Tensor) -> int:
    """Digits of a tensor's type, the leading one counted."""
    return {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}[tensor.dtype]


def share(before: float, after: float) -> float:
    """Share of `before` that is explained when `after` is left; 0 at least."""
    return max(0.0, 1 - after / before) if before > 0 else 0.0


def restored(recipe: Recipe, old: Recipe, arm: Arm) -> Recipe:
    """The recipe with an arm's fields as they were."""
    return recipe.replace(**{name: getattr(old, name) for name, _ in arm.changes})


def wide_rows(queries: Tensor, k: int) -> Tensor:
    """Indices of at most WIDE_ROWS query rows, three quarters of them such that selection matters, where there are.

    Rows are drawn at random within equal strides, so that every remainder of the position by four occurs.
    """
    if len(queries) <= WIDE_ROWS:
        return torch.arange(len(queries))
    generator = torch.Generator().manual_seed(0)

    def spread(rows: Tensor, count: int) -> Tensor:
        if len(rows) <= count:
            return rows
        edges = torch.arange(count + 1) * len(rows) // count
        inside = (torch.rand(count, generator=generator) * (edges[1:] - edges[:-1])).long()
        return rows[edges[:-1] + inside]

    selective = (queries + 1) // WINDOW > k
    most, few = (torch.nonzero(mask).flatten() for mask in (selective, ~selective))
    chosen = spread(few, WIDE_ROWS // 4)
    return torch.cat((chosen, spread(most, WIDE_ROWS - len(chosen)))).sort().values
