"""Numbers that the search refines: the roundest one that leaves hardly more than the best."""

import math
from types import SimpleNamespace

import pytest

from diffcheck import Recipe, load_layer
from diffcheck.diagnose.arms import Arm
from diffcheck.diagnose.search import rank


@pytest.mark.parametrize(
    ("best", "rest", "expected"),
    [
        (40010.0, 15.0, 40000.0),  # listed, and as good as any within the noise of the rest
        (41234.0, 15.0, 41000.0),
        (41000.0, 0.0, 41000.0),
        (41234.0, 0.01, 41240.0),
        (41234.0, 0.0, pytest.approx(41234.0, rel=1e-4)),  # as far as the golden section goes
    ],
)
def test_the_roundest_value_that_does_as_well(mini, best, rest, expected):
    """A valley whose ground lies at `best` and leaves `rest`."""
    config, _ = load_layer(str(mini), 4)

    def look(recipe):
        return SimpleNamespace(total=rest + 1e4 * math.log(recipe.q_theta / best) ** 2)

    look.hold = lambda recipe: None
    arm = Arm(field="theta", value=40000.0, changes=(("q_theta", 40000.0), ("k_theta", 40000.0)))
    ranked = rank(look, Recipe.reference(config), [arm], lambda recipe, arm: [], 1e6)
    assert ranked[0].arm.value == expected
    assert [r.left for r in ranked] == sorted(r.left for r in ranked)
