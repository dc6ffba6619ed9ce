"""parallel=auto on shipped recipes: never above what inference finds, and it says how good it is.
All recipes, in their own size: `python docs/how_to/auto.py`.
"""

import pytest

from flowrun.engine.passes.search.search_sbp import note
from support.plans.searches import search_of

ROUNDING = 1e-11  # of a sum of some thousand costs, added in another order
QUICK = {  # recipe -> keys that make it smaller still
    "convnet_dp": (),
    "gpt_hybrid": (),
    "gpt_zero": ("model.depth=1",),
    "insightface_hybrid": (),
    "mlp_hybrid": (),
    "wide_deep": (),
    "wide_mlp": (),
}
MORE = {
    "gpt2_1d": (),
    "gpt2_2d": ("model.depth=1",),
    "gpt_sequence_parallel": ("model.depth=1",),
    "resnet_dp": (),
}
CASES = [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)]


@pytest.mark.parametrize("pins", [True, False], ids=["pins kept", "pins ignored"])
@pytest.mark.parametrize("recipe", CASES)
def test_a_searched_layout_costs_no_more_than_an_inferred_one(recipe: str, pins: bool) -> None:
    found = search_of(recipe, *{**QUICK, **MORE}[recipe], pins=pins)
    assert found.inferred is not None
    seconds, held = found.network.cost(found.inferred)
    assert found.found.cost <= (seconds + found.byte_s * held) * (1 + ROUNDING)
    assert found.found.proof in note(found)
