import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.place.settle import layouts_on_fewer
from flowrun.launcher.recipe.compose import load


def searched(*ranks: int) -> list[tuple[str, ...]]:
    """Overrides that let a search place so many ranks."""
    return [("auto.placement=true", f"auto.ranks={n}") for n in ranks]


def test_the_axis_that_divides_the_batch_shrinks_before_a_search_places_the_ranks() -> None:
    recipe = load(
        ["recipe=gpt_hybrid", "placement.axes={data: 3, tensor: 2}", "placement.stages=1"]
    )
    expected = [("placement.axes.data=2",), *searched(5, 4, 3)]
    assert list(layouts_on_fewer(recipe, least=3)) == expected


def test_without_an_axis_that_divides_the_batch_a_search_places_the_ranks() -> None:
    assert list(layouts_on_fewer(load(["recipe=gpt_hybrid"]), least=3)) == searched(3)
    assert list(layouts_on_fewer(load(["recipe=gpt_hybrid"]), least=4)) == []


@pytest.mark.parametrize("key", ["launch.min_ranks=2", "train.snapshot_every=5"])
def test_keys_of_restarts_need_restarts(key: str) -> None:
    with pytest.raises(RecipeError, match=r"launch\.restarts is 0"):
        load(["recipe=gpt_hybrid", key])


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([], "train.save_every is 0"),
        (
            ["train.save_every=2", "launch.nnodes=2", "launch.rdzv_endpoint=a:1"],
            "only the ranks of one host",
        ),
    ],
    ids=["no checkpoint", "two hosts"],
)
def test_a_rollback_needs_checkpoints_and_one_host(keys: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load(["recipe=gpt_hybrid", "train.on_nonfinite=rollback", *keys])


@pytest.mark.parametrize("nodes", ["2", "2:2"])
def test_snapshots_are_for_one_host(nodes: str) -> None:
    keys = ("launch.rdzv_endpoint=a:1", "launch.restarts=1", "train.snapshot_every=5")
    with pytest.raises(RecipeError, match="needs one host") as refused:
        load(["recipe=gpt_hybrid", f"launch.nnodes={nodes}", *keys])
    assert "train.save_every" in str(refused.value)


def test_the_mirrored_view_keeps_its_ranks() -> None:
    keys = ("view=mirrored", "launch.restarts=1")
    with pytest.raises(RecipeError, match="fewer ranks would train something else"):
        load(["recipe=convnet_dp", *keys, "launch.min_ranks=1"])
