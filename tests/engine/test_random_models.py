"""Random small modules train as plain torch trains them, in five layouts, or are refused by name.

A seed is a model (support/random_models.py).  CI runs SOME seeds; all
2,000: python tests/support/random_models.py --seeds 0:2000.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrun.launcher.recipe import load
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
)

ALL = range(2000)
SOME = (15, 18, 25, 31, 39, 49, 72, 106, 114, 116, 121, 124, 129, 142, 146, 154, 174, 179, 196, 201)
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, len(SOME), AT_ONCE))
def test_random_models_train_as_plain_torch_or_are_refused(first: int) -> None:
    wrong = [
        f"{seed} {each.layout}: {each.kind}: {each.what}"
        for seed in SOME[first : first + AT_ONCE]
        for each in outcomes(model_of(seed), FIVE)
        if each.is_wrong
    ]
    assert not wrong, "\n".join(wrong)


def test_the_seeds_have_every_block() -> None:
    assert set(SOME) <= set(ALL)
    assert {name for seed in ALL for name in model_of(seed).blocks} == set(BLOCKS)


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
