"""The window of tokens that ranks in the layout of a run read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.sampling.window import (
    WindowBatches,
    count_rows,
    next_logits,
    recipe_of_window,
)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (("recipe=gpt_tp",), 1),
        (("recipe=gpt_dp", "placement.axes.data=3"), 3),
        (("recipe=gpt_hybrid", "placement.axes.data=2"), 2),
        (("recipe=gpt_tp", "zero.axis=tensor", "zero.stage=1"), 2),
    ],
)
def test_each_rank_that_divides_the_batch_has_a_row(overrides: tuple[str, ...], rows: int) -> None:
    assert count_rows(load(list(overrides))) == rows


def test_the_layout_stays_and_nothing_is_narrower() -> None:
    recipe = load(["recipe=gpt_hybrid", "precision.dtype=bf16", "view=consistent"])
    found = recipe_of_window(recipe, "tokens_BT", 12)
    assert (found.placements, found.pins, found.zero) == (
        recipe.placements,
        recipe.pins,
        recipe.zero,
    )
    assert (found.precision.dtype, found.train.batch_size, found.data["length"]) == ("fp32", 1, 12)


def test_logits_are_those_after_the_last_token_of_the_first_row() -> None:
    batches = WindowBatches(2, 4)
    batches.ids = [7, 8]
    batch = batches(0, 0, slice(0, 2))
    assert batch["tokens"].tolist() == [[7, 8, 0, 0], [0, 0, 0, 0]]
    logits = torch.arange(24.0).reshape(2, 4, 3)
    logits[1] = torch.inf  # of a row that is not looked at
    assert next_logits(logits, batch).tolist() == logits[0, 1].tolist()
    assert next_logits(SimpleNamespace(logits=logits), batch).tolist() == logits[0, 1].tolist()
