"""Where x and qr come from: seeded synthetic hidden states, planted needles, and recorded traces.

- `hidden`: `synthetic_hidden`, hidden states that are as unfriendly as real ones;
- `needles`: `plant_needle`, one window of tokens made to score what you ask for (`ideal` has the scores);
- `source`: `load_inputs`, the x, qr and needles of a trace file, and `choose_queries`.
"""

from .hidden import synthetic_hidden
from .needles import (
    NeedlePlan,
    PlantedNeedle,
    Planter,
    Unreachable,
    default_needles,
    plant_needle,
    plant_needles,
)
from .source import DEFAULT_NEEDLE_TOKENS, LayerInputs, Needle, choose_queries, load_inputs

__all__ = [
    "DEFAULT_NEEDLE_TOKENS",
    "LayerInputs",
    "Needle",
    "NeedlePlan",
    "PlantedNeedle",
    "Planter",
    "Unreachable",
    "choose_queries",
    "default_needles",
    "load_inputs",
    "plant_needle",
    "plant_needles",
    "synthetic_hidden",
]
