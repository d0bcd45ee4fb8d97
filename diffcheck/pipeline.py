"""Runs recipes on one layer, computing each distinct stage once.

A stage's result is determined by its own fields, the compute type, and the results it read; that chain is its key. So
a sweep over precisions and thetas recomputes only what a change can reach: with another theta the projections, the
pool and the gates are shared, with another key format everything up to `k_hadamard` is.

Query-side stages are computed in blocks of rows, so that the temporaries stay within a budget; key-side stages have
one row per four tokens and are computed whole.

Stages that somebody observed can stand in for computed ones (`observe`): what reads them is then computed from the
observation, so that each stage of a deployment is judged on what the deployment itself fed it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .recipe import Recipe
from .refimpl import IndexerConfig, IndexerState, IndexerWeights, Trace, dequantise_weight
from .refimpl.compressor import PoolState
from .refimpl.indexer import check_inputs, query_block
from .refimpl.linear import exact_matmul
from .refimpl.trace import STAGES
from .stages import GRAPH, INTERNAL, Call, gate_with_ape

Key = tuple[object, ...]


class Pipeline:
    """One layer and its inputs, on which any number of recipes can be evaluated; results are shared.

    Arguments are those of `run_indexer`.
    """

    def __init__(
        self,
        config: IndexerConfig,
        weights: IndexerWeights,
        x: Tensor,
        qr: Tensor,
        *,
        start: int = 0,
        state: IndexerState | None = None,
        queries: Tensor | None = None,
    ) -> None:
        weights.check(config)
        rows, state = check_inputs(config, x, qr, start, state, queries)
        self.call = Call(
            config=config,
            weights=weights,
            wq_b=dequantise_weight(weights.wq_b, weights.wq_b_scale, config.weight_block),
            x=x,
            qr=qr,
            start=start,
            state=state,
            rows=rows,
        )
        entries = (start + x.shape[0]) // 4
        self._blocks = rows.split(query_block(config, entries))
        self._cache: dict[Key, Tensor] = {}
        self._key_cache: dict[Key, Tensor] = {}
        self._observed: dict[str, tuple[Tensor, Key]] = {}
        self._asked: set[tuple[str, Recipe, Recipe | None]] = set()
        self._forgotten = 0

    @property
    def queries(self) -> Tensor:
        """Absolute token positions of the query rows."""
        return self.call.rows + self.call.start

    def observe(self, name: str, tensor: Tensor) -> None:
        """Let whatever reads stage `name` read this tensor from now on; the stage itself is still computed if asked."""
        # a name's second observation must not be mistaken for its first
        self._observed[name] = (tensor, ("observed", name, object()))

    @property
    def observed_names(self) -> frozenset[str]:
        """Stages that were observed so far."""
        return frozenset(self._observed)

    def seen(self, name: str) -> Tensor:
        """What was observed of a stage; KeyError where nothing was."""
        return self._observed[name][0]

    def narrowed(self, rows: Tensor) -> Pipeline:
        """The same layer with some of the query rows only (indices into `queries`); key-side stages are shared."""
        other = copy.copy(self)
        other.call = dataclasses.replace(self.call, rows=self.call.rows[rows])
        entries = (self.call.start + self.call.x.shape[0]) // 4
        other._blocks = other.call.rows.split(query_block(self.call.config, entries))
        other._cache, other._asked = {}, set()
        other._observed = {
            name: (tensor[rows], ("observed", name, object())) if GRAPH[name].query_side else (tensor, key)
            for name, (tensor, key) in self._observed.items()
        }
        return other

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Forget at the end what was computed inside, the input projections aside: for a search over many recipes."""
        before = [(cache, set(cache)) for cache in (self._cache, self._key_cache)]
        try:
            yield
        finally:
            for cache, kept in before:
                for key in [key for key in cache if key not in kept and key[0] not in INTERNAL]:
                    del cache[key]

    def forget(self) -> None:
        """Drop everything that was computed; what is asked for again is computed again."""
        self._forgotten += len(self._cache) + len(self._key_cache)
        self._cache.clear()
        self._key_cache.clear()

    def stage(self, recipe: Recipe, name: str, given: Recipe | None = None) -> Tensor:
        """One stage of a recipe; with `given`, computed on that recipe's preceding stages instead of its own."""
        with torch.no_grad(), exact_matmul():
            return self._stage(recipe, name, given)[0]

    def _stage(self, recipe: Recipe, name: str, given: Recipe | None = None) -> tuple[Tensor, Key]:
        self._asked.add((name, recipe, given))
        stage = GRAPH[name]
        found = {
            n: self._observed[n]
            if n in self._observed
            else self._stage(recipe if n in INTERNAL else given or recipe, n)
            for n in stage.inputs
        }
        fields = (getattr(recipe, field) for field in ("compute", *stage.fields))
        key: Key = (name, *fields, *(key for _, key in found.values()))
        cache = self._cache if stage.query_side else self._key_cache
        if key not in cache:
            cache[key] = self._compute(name, recipe, {n: tensor for n, (tensor, _) in found.items()})
        return cache[key], key

    def _compute(self, name: str, recipe: Recipe, inputs: Mapping[str, Tensor]) -> Tensor:
        stage = GRAPH[name]
        if not stage.query_side or len(self._blocks) == 1:
            return stage.function(self.call, recipe, dict(inputs), self.call.rows)
        parts, first = [], 0
        for rows in self._blocks:
            here = slice(first, first + len(rows))
            part = {n: t[here] if GRAPH[n].query_side else t for n, t in inputs.items()}
            parts.append(stage.function(self.call, recipe, part, rows))
            first += len(rows)
        return torch.cat(parts)

    def trace(self, recipe: Recipe) -> Trace:
        """All stages of a recipe, with its inputs and the state to go on from."""
        with torch.no_grad(), exact_matmul():
            tensors = {name: self._stage(recipe, name)[0] for name in STAGES}
            state = self._next_state(recipe, tensors["k_quant"])
        tensors |= {"x": self.call.x, "qr": self.call.qr, "queries": self.queries}
        return Trace(tensors, start=self.call.start, state=state)

    def _next_state(self, recipe: Recipe, k_quant: Tensor) -> IndexerState:
        call = self.call
        kv, gate = self._stage(recipe, "kv_gate")[0].chunk(2, dim=1)
        pool: PoolState = call.state.pool.then(kv, gate_with_ape(call, recipe, gate))[2]
        keys = torch.cat((call.state.keys.to(k_quant.dtype), k_quant))
        return IndexerState(position=call.start + call.x.shape[0], pool=pool, keys=keys)

    def savings(self) -> tuple[int, int]:
        """(stages that the recipes seen so far have, counting each stage of each recipe once; stages computed)."""
        computed = self._forgotten + len(self._cache) + len(self._key_cache)
        return len(self._asked), min(len(self._asked), computed)


def evaluate(
    recipe: Recipe,
    config: IndexerConfig,
    weights: IndexerWeights,
    x: Tensor,
    qr: Tensor,
    *,
    start: int = 0,
    state: IndexerState | None = None,
    queries: Tensor | None = None,
) -> Trace:
    """Run one recipe on T tokens of one layer; arguments and result as for `run_indexer`.

    Stage dtypes follow the recipe. With `Recipe.reference(config)` every stage equals `run_indexer` bit for bit.
    """
    return Pipeline(config, weights, x, qr, start=start, state=state, queries=queries).trace(recipe)
