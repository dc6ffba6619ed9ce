"""Random small modules train as plain torch trains them, in five layouts, or are refused by name.

A seed is a model (support/nets/random_models.py).  All of them, in all layouts:

    python tests/support/nets/random_models.py --seeds 0:3000

CI runs 28 of those that were tried, which have every block; in test_random_extras.py 15 with more
of torch.  Each is in two of the five layouts in turn: a capture takes as long as training in three.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrun.launcher.recipe.compose import load
from support.nets.random_blocks import BLOCKS
from support.nets.random_models import (
    FIVE,
    LAYOUTS,
    Reference,
    inside,
    model_of,
    outcomes,
    recipe_in,
    with_pins,
    written,
    wrong_ones,
)

# of range(EXTRA_FROM); few that have every block
SOME = (
    36,
    50,
    174,
    204,
    345,
    363,
    386,
    400,
    437,
    445,
    452,
    507,
    607,
    624,
    724,
    733,
    967,
    1277,
    1435,
    1474,
    1491,
    1498,
    1513,
    1697,
    1767,
    1784,
    1806,
    1829,
)
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, len(SOME), AT_ONCE))
def test_random_models_train_as_plain_torch_or_are_refused(first: int) -> None:
    wrong = wrong_ones(SOME[first : first + AT_ONCE])
    assert not wrong, "\n".join(wrong)


def test_the_seeds_have_every_block() -> None:
    assert {name for seed in SOME for name in model_of(seed).blocks} == set(BLOCKS)


def test_a_seed_makes_the_same_model_each_time() -> None:
    assert model_of(7) == model_of(7) != model_of(8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recipes_are_those_that_the_command_composes(layout: str, tmp_path: Path) -> None:
    model = with_pins(model_of(7))
    with inside(written(model, tmp_path)):
        composed = load(["recipe=recipe.yaml", "engine.cache=false", *LAYOUTS[layout]])
    assert recipe_in(model, layout) == composed


def test_layouts_planned_from_one_capture_train_as_those_captured_each() -> None:
    assert outcomes(model_of(7), FIVE) == outcomes(model_of(7), FIVE, shares=False)


def test_a_learning_rate_that_is_a_thousandth_off_is_seen() -> None:
    model = model_of(7)
    model.recipe["optim"]["lr"] *= 1.001
    other = Reference(model).trained
    assert Reference(model_of(7)).difference(other)


def test_a_loss_that_diverges_makes_much_of_the_rounding_of_a_rate() -> None:
    reference = Reference(with_pins(model_of(1488)))
    assert reference.trained.losses[-1] > 1e6
    exact, rounded = reference.trained.losses, reference.moved.losses
    assert abs(rounded[-1] - exact[-1]) > 3e-6 * exact[-1]
    assert [o.kind for o in outcomes(model_of(1488), ["single"])] == ["equal"]
