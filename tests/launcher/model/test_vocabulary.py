from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.vocabulary import check_vocabulary
from flowrun.launcher.recipe.compose import load

RECIPE = replace(load(["recipe=gpt_dp"]), data={"_target_": "x", "tokenizer": "bpe/"})


def check(keys: dict[str, Any], ids: Any, model: Any = None) -> None:
    """Check a model of these keys on data with so many ids."""
    recipe = replace(RECIPE, model={"_target_": "m", **keys})
    check_vocabulary(recipe, model or nn.Identity(), SimpleNamespace(vocabulary=ids))


def test_enough_ids_or_none_at_all_are_fine() -> None:
    check({"vocabulary": 320}, 320)
    check({"vocabulary": 512}, 320)
    check({"width": 3}, 320)
    check({"vocabulary": 4}, None)
    check_vocabulary(RECIPE, nn.Identity(), object())


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"vocabulary": 256}, "model.vocabulary"),
        ({"config": {"vocab_size": 256}}, "model.config.vocab_size"),
    ],
)
def test_too_few_ids_are_refused_with_the_number_to_write(keys: Any, where: str) -> None:
    with pytest.raises(RecipeError) as refused:
        check(keys, 8192)
    assert refused.value.where == where
    assert "the tokenizer bpe/ of data.tokenizer has 8,192 ids" in str(refused.value)
    assert f"Write {where}=8192" in str(refused.value)


def test_a_config_of_transformers_counts_too() -> None:
    model = nn.Identity()
    model.config = SimpleNamespace(vocab_size=100)  # type: ignore[assignment]
    with pytest.raises(RecipeError, match="a row for 100 of them"):
        check({}, 320, model)
