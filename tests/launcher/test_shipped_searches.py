"""parallel=auto on the shipped recipes: never above what inference and greedy choice find, and it
says how good it is.
"""

from __future__ import annotations

import pytest

from flowrun.engine.passes.search_sbp import note
from support.searches import search_of
from support.small_recipes import RECIPES, small_job


@pytest.mark.parametrize("pins", [True, False], ids=["pins kept", "pins ignored"])
@pytest.mark.parametrize("recipe", [file.stem for file in RECIPES])
def test_a_searched_layout_costs_no_more_than_others(recipe: str, pins: bool) -> None:
    job = small_job(RECIPES[0].with_name(f"{recipe}.yaml"))
    if not job.strategy.axes:
        pytest.skip("it has no axis to choose on")
    found = search_of(recipe, pins=pins)
    assert set(found.starts) == {"greedy", "inferred"}
    for choice in found.starts.values():
        seconds, held = found.network.cost(choice)
        assert found.found.cost <= seconds + found.byte_s * held
    assert "proved least" in note(found) or "above the least" in note(found)
