"""Made-up inputs for a run without a trace: unfriendly hidden states with planted needles.

Strong needles hide exactly the faults that matter, so unless asked otherwise the needles have several strengths, most
of them close to the k-th place.
"""

from __future__ import annotations

from ..refimpl import IndexerConfig, IndexerWeights, InputError
from .hidden import synthetic_hidden
from .needles import DEFAULT_STRENGTHS, NeedlePlan, default_needles, plant_needles
from .source import LayerInputs, Needle

DEFAULT_STRENGTH = 0.25
"""Strength of a needle of which only the depth was given."""


def synthetic_inputs(
    config: IndexerConfig,
    weights: IndexerWeights,
    *,
    length: int,
    seed: int,
    depth: float | None = None,
    strength: float | None = None,
) -> LayerInputs:
    """Hidden states of `length` tokens for one layer, with needles planted.

    With a depth (0 to 1 over the visible entries of the last token) there is one needle, else several over all
    depths. Below index_topk * 4 tokens nothing can be planted; InputError if a needle was asked for all the same.
    """
    check_needle_options(config, length, depth, strength)
    x, qr = synthetic_hidden(config, length=length, seed=seed)
    if length // 4 <= config.index_topk:
        return LayerInputs(x=x, qr=qr)
    if depth is None:
        strengths = DEFAULT_STRENGTHS if strength is None else (strength,)
        plans = default_needles(length, config.index_topk, strengths=strengths)
    else:
        wanted = DEFAULT_STRENGTH if strength is None else strength
        plans = (NeedlePlan(query=length - 1, depth=depth, strength=wanted),)
    x, planted = plant_needles(config, weights, x, qr, plans)
    needles = tuple(Needle(query=n.query, first_token=n.first_token, last_token=n.last_token) for n in planted)
    return LayerInputs(x=x, qr=qr, needles=needles)


def check_needle_options(config: IndexerConfig, length: int, depth: float | None, strength: float | None) -> None:
    """Raise InputError for a depth outside 0..1, or a needle where everything is selected anyway."""
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"--needle-depth: {depth}, expected 0 to 1")
    if (depth is not None or strength is not None) and length // 4 <= config.index_topk:
        raise InputError(
            f"--needle-depth and --needle-strength: {length} tokens make {length // 4} entries and "
            f"{config.index_topk} are selected, so no needle can be lost; "
            f"expected --length above {4 * config.index_topk + 3}"
        )
