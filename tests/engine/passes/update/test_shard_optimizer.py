import pytest

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.passes.update.shard_optimizer import shard_optimizer
from flowrun.engine.pipeline import PASSES
from flowrun.engine.strategy import Pin, Strategy, Zero
from support.plans.graph_text import (
    SGD,
    TWO_LAYERS,
    assert_ops,
    graph_of,
    one_axis,
    rewritten,
    through,
)

A = ("a.weight", "momentum_buffer/a.weight")  # 32 elements
B_WEIGHT = ("b.weight", "momentum_buffer/b.weight")  # 16 elements


def zero(stage: int, least: int = 20, parts: int = 2) -> Strategy:
    """ZeRO on the data axis, for weights of at least so many elements."""
    return one_axis("data", parts, zero=Zero("data", stage, least))


def homes(graph: LogicalGraph) -> dict[str, str]:
    """Name of a variable -> its SBP on the axis."""
    return {v.name: str(v.nd_sbp[0]) for v in graph.variables}


def boxings(graph: LogicalGraph) -> list[str]:
    """tensor: collective, phase; of what moves, except the reported loss."""
    return [
        f"{op.inputs[0]}: {op.args[1].kind}, {op.phase}"
        for op in graph.ops
        if op.target == "flow.box" and op.args[1].moves and not op.inputs[0].startswith("loss")
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_large_weight_and_its_state_are_split_a_small_one_stays_whole(stage: int) -> None:
    graph = rewritten(through(shard_optimizer), zero(stage))
    assert homes(graph) == {**dict.fromkeys(A, "S(0)"), **dict.fromkeys(B_WEIGHT, "B")}
    assert graph.notes == (
        f"ZeRO {stage} on data: 1 parameters sharded, "
        "1 stay B (small, or no dim divides): b.weight",
    )


def test_stage_0_changes_nothing() -> None:
    graph = rewritten(through(shard_optimizer), zero(0))
    assert set(homes(graph).values()) == {"B"}


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


def test_the_accumulator_is_partial_in_stage_1_and_split_from_stage_2_on() -> None:
    for stage, sbp in ((1, "P"), (2, "S(0)"), (3, "S(0)")):
        graph = rewritten(through(shard_optimizer), zero(stage))
        assert_ops(
            [graph.producer["grad/a.weight"]],
            f"%grad/a.weight = flow.accumulate(%da)  {sbp} -> {sbp}  # backward a stage 0",
        )


WHAT_MOVES = {
    1: ["a.weight: all_gather, weights", "grad/a.weight: reduce_scatter, update"],
    2: ["a.weight: all_gather, weights", "da: reduce_scatter, backward"],
    3: ["a.weight: all_gather, forward", "da: reduce_scatter, backward"],
}


@pytest.mark.parametrize("stage", list(WHAT_MOVES))
def test_gradients_are_scattered_and_weights_gathered(stage: int) -> None:
    """b.weight, too small, has an all-reduce as without ZeRO."""
    actual = boxings(rewritten(PASSES, zero(stage)))
    assert actual == [*WHAT_MOVES[stage], "grad/b.weight: all_reduce, update"]


def test_stage_3_gathers_for_forward_and_backward_apart() -> None:
    """Backward reads b.weight, not a.weight: %x needs no gradient."""
    actual = boxings(rewritten(PASSES, zero(3, least=1)))
    gathers = [line for line in actual if "all_gather" in line]
    assert gathers == [
        "a.weight: all_gather, forward",
        "b.weight: all_gather, forward",
        "b.weight: all_gather, backward",
    ]
    assert B not in {v.nd_sbp[0] for v in rewritten(PASSES, zero(3, least=1)).variables}


def test_a_weight_of_exactly_the_least_size_is_split() -> None:
    """b.weight has 16 elements; min_size says that smaller ones stay whole."""
    for least, home in ((16, "S(0)"), (17, "B")):
        graph = rewritten(through(shard_optimizer), zero(1, least=least))
        assert homes(graph)["b.weight"] == home
