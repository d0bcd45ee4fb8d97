"""Made-up inputs for a run without a trace: unfriendly hidden states with planted needles.

Strong needles hide exactly the faults that matter, so unless asked otherwise the needles have several strengths, most
of them close to the k-th place.
"""

from __future__ import annotations

from ..refimpl import IndexerConfig, IndexerWeights, InputError
from .hidden import synthetic_hidden
from .needles import DEFAULT_STRENGTHS, NeedlePlan, Planter, Unreachable, default_needles
from .source import LayerInputs, Needle

DEFAULT_STRENGTH = 0.25
"""Strength of a needle of which only the depth was given."""
LINES = 16
"""How often the gradient may be taken anew while planting: one straight line often cannot reach a strong target."""


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
    depths; those of them that cannot reach their strength are left out with a note. Below index_topk * 4 tokens
    nothing can be planted. InputError if the one needle asked for cannot be had.
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
    planter = Planter(config, weights, x, qr)
    needles, notes = [], []
    for plan in plans:
        try:
            n = planter.plant(query=plan.query, depth=plan.depth, strength=plan.strength, lines=LINES)
        except Unreachable as error:
            if depth is not None:
                raise
            notes.append(f"needle left out: {error}")
            continue
        needles.append(Needle(query=n.query, first_token=n.first_token, last_token=n.last_token))
        notes.append(
            f"needle in tokens {n.first_token}..{n.last_token} for query {n.query}: strength {n.strength:g}, "
            f"reached {n.reached:.4f}, ideal rank {n.rank}"
        )
    return LayerInputs(x=planter.x, qr=qr, needles=tuple(needles), notes=tuple(notes))


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
