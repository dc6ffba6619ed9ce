import pytest

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import S
from flowrun.engine.passes.update.shard_optimizer import shard_optimizer
from flowrun.engine.strategy import Pin, Strategy, Zero
from support.plans.graph_text import SGD, TWO_LAYERS, graph_of, one_axis, rewritten, through

A = ("a.weight", "momentum_buffer/a.weight")  # 32 elements
B_WEIGHT = ("b.weight", "momentum_buffer/b.weight")  # 16 elements


def zero(stage: int, least: int = 20, parts: int = 2) -> Strategy:
    """ZeRO on the data axis, for weights of at least so many elements."""
    return one_axis("data", parts, zero=Zero("data", stage, least))


def homes(graph: LogicalGraph) -> dict[str, str]:
    """Name of a variable -> its SBP on the axis."""
    return {v.name: str(v.nd_sbp[0]) for v in graph.variables}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_large_weight_and_its_state_are_split_a_small_one_stays_whole(stage: int) -> None:
    graph = rewritten(through(shard_optimizer), zero(stage))
    assert homes(graph) == {**dict.fromkeys(A, "S(0)"), **dict.fromkeys(B_WEIGHT, "B")}
    assert graph.notes == (
        f"ZeRO {stage} on data: 1 parameters sharded, "
        "1 stay B (small, or no dim divides): b.weight",
    )


def test_the_first_dim_that_divides_is_split() -> None:
    """With 7 hidden features over 2 ranks: of (7, 4) the second dim, of (2, 7) the first."""
    odd = TWO_LAYERS.replace("[8, 4]", "[7, 4]").replace("[2, 8]", "[2, 7]")
    actual = homes(rewritten(through(shard_optimizer), zero(1, least=1), graph_of(odd)))
    assert (actual["a.weight"], actual["b.weight"]) == ("S(1)", "S(0)")


def test_a_weight_of_which_no_dim_divides_stays_whole() -> None:
    graph = rewritten(through(shard_optimizer), zero(1, least=1, parts=3))
    assert set(homes(graph).values()) == {"B"}


def test_a_dim_that_another_axis_splits_is_left_to_it() -> None:
    placement = Placement((("data", 2), ("tensor", 2)), (0, 1, 2, 3))
    strategy = Strategy(
        ("data", "tensor"),
        (placement,),
        pins=(Pin("a.weight", "variable", "tensor", S(0)),),
        zero=Zero("data", 1, 20),
        optimizer=SGD,
    )
    graph = rewritten(through(shard_optimizer), strategy)
    (weight,) = (v for v in graph.variables if v.name == "a.weight")
    assert weight.nd_sbp == (S(1), S(0))


def test_a_weight_of_exactly_the_least_size_is_split() -> None:
    """b.weight has 16 elements; min_size says that smaller ones stay whole."""
    for least, home in ((16, "S(0)"), (17, "B")):
        graph = rewritten(through(shard_optimizer), zero(1, least=least))
        assert homes(graph)["b.weight"] == home
