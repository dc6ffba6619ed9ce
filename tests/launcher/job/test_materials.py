from dataclasses import replace

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.materials import make_materials
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe

WRAPPED = {
    "data": lambda mixture: mixture,
    "data.source": lambda mixture: {
        "_target_": "flowrun.launcher.data.corpus.masked.Masked",
        "source": mixture,
        "vocabulary": 256,
        "mask": 0,
    },
}


def mixture(fraction: float, held_out: float, place: str = "data") -> Recipe:
    """A recipe on a mixture that says by itself what it holds out, at a place of `data`."""
    source = {"_target_": "flowrun.launcher.data.corpus.text.Text", "length": 8, "max_bytes": 4000}
    data = {
        "_target_": "flowrun.launcher.data.mixture.DataMixture",
        "sources": {"a": source, "b": source},
        "held_out": held_out,
    }
    keys = ["model.depth=1", "model.width=16", "model.heads=2", f"eval.fraction={fraction}"]
    return replace(load(["recipe=gpt_dp", *keys]), data=WRAPPED[place](data))


@pytest.mark.parametrize("place", WRAPPED)
@pytest.mark.parametrize("held_out", [0.0, 0.05])
def test_a_mixture_that_holds_out_other_samples_is_refused(place: str, held_out: float) -> None:
    with pytest.raises(RecipeError, match="some that are evaluated would be trained on") as refused:
        make_materials(mixture(0.3, held_out, place), values=False)
    assert refused.value.where == f"{place}.held_out"


def test_a_mixture_that_holds_out_the_same_is_fine() -> None:
    made = make_materials(mixture(0.3, 0.3), values=False)
    assert made.sampler.held_out == made.data.order.held_out > 0
