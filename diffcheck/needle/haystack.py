"""Filler text for needle tests: sentences drawn from a seed, so nothing has to be shipped or downloaded.

Dull on purpose, and never a number in it: a needle with a code or a name stands out as it would in a real document.
"""

from __future__ import annotations

import random

_ADJECTIVES = ("quiet", "grey", "narrow", "early", "broken", "heavy", "distant", "plain", "cold", "wooden", "small")
_NOUNS = ("harbour", "ladder", "meadow", "engine", "letter", "garden", "kettle", "bridge", "lantern", "ledger", "river")
_VERBS = ("follows", "crosses", "repairs", "carries", "borrows", "measures", "paints", "remembers", "closes", "sells")
_PLACES = ("near the mill", "behind the station", "by the canal", "in the old town", "under the hill", "at the gate")
_TIMES = ("every morning", "before the rain", "at dusk", "without a word", "for no reason", "once more", "in silence")


def filler(sentences: int, seed: int = 0) -> str:
    """That many sentences of filler, the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for _ in range(sentences):
        adjective, other = rng.sample(_ADJECTIVES, 2)
        subject, thing = rng.sample(_NOUNS, 2)
        verb, place, time = rng.choice(_VERBS), rng.choice(_PLACES), rng.choice(_TIMES)
        made.append(f"The {adjective} {subject} {place} {verb} the {other} {thing} {time}.")
    return " ".join(made)
