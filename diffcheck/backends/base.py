"""The contracts: kernels provide steps, a backend runs a recipe.

A deployment's indexer is four steps, each usually one kernel:

    keys     projections kv, gate -> cache pages (pool, norm, RoPE, Hadamard, quantise, store)
    queries  projected q, gates   -> codes and folded gates (RoPE, Hadamard, quantise)
    logits   codes and pages      -> scores fp32 [rows, E], read through a block table
    topk     scores               -> selected entries

`Kernels` is what a package offers: some or all of the steps. `Backend` is what a run uses: it executes a whole recipe.
What cannot be run exactly is refused with a reason, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..custom import CustomFormat
from ..formats import Format
from ..pipeline import Pipeline
from ..recipe import EMULATED_ONLY, Recipe
from ..refimpl import IndexerConfig, Trace

STEPS = ("keys", "queries", "logits", "topk")
"""The steps in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCache:
    """Index keys of one request in pages: uint8 [P, page bytes], in the format `fmt` of `kernels.PAGE_FORMATS`.

    block_table: int32 [1, pages of the request]; slots: int64 [E], where each entry lies. Page ids are shuffled.
    """

    pages: Tensor
    block_table: Tensor
    slots: Tensor
    fmt: str


def shown(value: Any) -> str:
    """A recipe field's value in a message; a format by its short form."""
    return str(value) if isinstance(value, Format | CustomFormat) else repr(value)


def fixed_refusal(recipe: Recipe, fixed: Mapping[str, Any], who: str = "the kernel") -> str | None:
    """The first field in which the recipe has another value than `who` has built in; None if it has all of them."""
    for field, value in (EMULATED_ONLY | dict(fixed)).items():
        ours = getattr(recipe, field)
        if ours != value:
            return f"{field} is {shown(ours)} and {who} only has {shown(value)}"
    return None


class Kernels(Protocol):
    """Steps that one package provides, with a method for each name in `steps` (and no other needed):

    store_keys(pipeline, recipe) -> KeyCache; quantise_queries(pipeline, recipe) -> QuantisedQuery;
    paged_logits(query, cache, visible int32 [rows]) -> fp32 [rows, E], -inf at and beyond `visible`;
    topk(scores fp32 [rows, E], visible int32 [rows], k) -> int64 [rows, min(k, E)], -1 in empty places.
    """

    @property
    def name(self) -> str:
        """Name in reports."""

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps it has, of STEPS."""

    def unavailable(self, device: str) -> str | None:
        """Why these kernels cannot run on `device` ("cpu" or "cuda") here, with the remedy; None if they can."""

    def version(self) -> str | None:
        """Version of the package; None where it is not installed."""

    def refusal(self, step: str, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Why this step cannot run this recipe exactly; None if it can."""


class Backend(Protocol):
    """Executes recipes on one layer and returns the stages that it can show."""

    @property
    def name(self) -> str:
        """Name on the command line and in reports."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages in the traces it returns."""

    def unavailable(self, device: str) -> str | None:
        """Why this backend cannot run on `device` ("cpu" or "cuda") here, with the remedy; None if it can."""

    def version(self) -> str | None:
        """Version of what does the work; None where it is not installed."""

    def refusal(self, recipe: Recipe, config: IndexerConfig) -> str | None:
        """Why this backend cannot run this recipe exactly; None if it can."""

    def run(self, pipeline: Pipeline, recipe: Recipe) -> Trace:
        """Run the recipe on the pipeline's layer, inputs and query rows."""
