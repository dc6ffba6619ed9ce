"""Random small modules train as plain torch trains them, in five layouts, or are refused by name.

A seed is a model (support/random_models.py).  All of them, in all layouts:

    python tests/support/random_models.py --seeds 0:3000

CI runs 150 that have every block, 50 of them in test_random_extras.py, each in two of the five
layouts in turn: a capture takes as long as training in three.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrun.launcher.recipe.compose import load
from support.random_blocks import BLOCKS
from support.random_models import (
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

# of range(EXTRA_FROM)
SOME = (
    18,
    36,
    50,
    69,
    106,
    129,
    174,
    194,
    196,
    204,
    208,
    256,
    285,
    297,
    335,
    345,
    353,
    360,
    363,
    386,
    400,
    413,
    437,
    445,
    452,
    507,
    513,
    519,
    567,
    570,
    607,
    624,
    644,
    678,
    688,
    712,
    724,
    730,
    733,
    753,
    754,
    769,
    775,
    895,
    903,
    905,
    962,
    965,
    967,
    984,
    1039,
    1065,
    1072,
    1073,
    1112,
    1138,
    1162,
    1172,
    1214,
    1277,
    1291,
    1344,
    1348,
    1349,
    1358,
    1422,
    1428,
    1430,
    1435,
    1467,
    1474,
    1491,
    1498,
    1512,
    1513,
    1528,
    1538,
    1549,
    1553,
    1563,
    1592,
    1667,
    1685,
    1690,
    1697,
    1718,
    1720,
    1734,
    1746,
    1767,
    1784,
    1806,
    1829,
    1913,
    1934,
    1939,
    1952,
    1955,
    1962,
    1969,
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
