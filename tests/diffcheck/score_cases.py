"""Scores with ties and NaN and selections of any kind, for the tests of metrics and of ranks.

Not importable by name (pytest runs in importlib mode): the `score_cases` fixture hands this module out.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

INF, NAN = math.inf, math.nan


@dataclass
class Case:
    """Small tensors in which most scores tie, nearly tie in bf16, or are NaN."""

    selected: Tensor
    target_selected: Tensor
    scores: Tensor
    other: Tensor
    visible: Tensor
    k: int

    @classmethod
    def draw(cls, seed: int) -> Self:
        rng = np.random.default_rng(seed)
        n, entries, k = rng.integers(1, 7), int(rng.integers(1, 14)), int(rng.integers(1, 7))
        # steps of half a bf16 ulp above 1 and of a whole one below
        scores = (256 + rng.integers(-5, 9, (2, n, entries))) / 256
        scores[rng.random(scores.shape) < rng.choice([0, 0.1, 0.6])] = NAN
        visible = rng.integers(0, entries + 1, n)
        scores[:, np.arange(entries) >= visible[:, None]] = -INF
        dtype = [torch.float32, torch.float64][int(rng.integers(2))]
        return cls(
            selected=torch.from_numpy(rng.integers(-1, entries, (n, int(rng.integers(1, 9))))),
            target_selected=torch.from_numpy(rng.integers(-1, entries, (n, k))).int(),
            scores=torch.from_numpy(scores[0]).to(dtype),
            other=torch.from_numpy(scores[1]).to(dtype),
            visible=torch.from_numpy(visible).int(),
            k=k,
        )

    def rows(self) -> range:
        return range(len(self.visible))

    def counted(self) -> list[int]:
        return [row for row in self.rows() if int(self.visible[row]) > self.k]

    def seen(self, row: int) -> list[float]:
        """The row's visible scores, NaN as -inf."""
        return [-INF if math.isnan(x) else x for x in self.scores[row, : int(self.visible[row])].tolist()]

    def tau(self, row: int) -> float:
        ordered = sorted(self.seen(row), reverse=True)
        return ordered[self.k - 1] if len(ordered) >= self.k else -INF

    def own(self, row: int) -> set[int]:
        """What the row selected."""
        return {i for i in self.selected[row].tolist() if i != -1}

    def target(self, row: int) -> set[int]:
        return {i for i in self.target_selected[row].tolist() if i != -1}
