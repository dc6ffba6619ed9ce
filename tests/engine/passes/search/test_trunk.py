import pytest
import torch

from flowrun.engine.ir.graph import Feed, LogicalGraph, LogicalTensor, Op, Ref, Variable
from flowrun.engine.ir.placement import Placement
from flowrun.engine.passes.search.objective import Objective
from flowrun.engine.passes.search.trunk import hidden_seconds
from flowrun.engine.strategy import Strategy

# x -> a -> b -> c, which also reads the weight w; b's result is read by the very next op
OPS = tuple(
    Op(name, "aten.add.Tensor", tuple(map(Ref, read)), outputs=(name,))
    for name, read in (("a", "xx"), ("b", "aa"), ("c", "bw"))
)
GRAPH = LogicalGraph(
    OPS,
    {name: LogicalTensor(name, (4,), torch.float32) for name in "xwabc"},
    (Variable("w", "w", "parameter"),),
    (Feed("x", "x"),),
)
SECONDS = {"a": 1.0, "b": 2.0, "c": 4.0}


def test_compute_between_maker_and_first_reader_hides_a_boxing() -> None:
    assert hidden_seconds(GRAPH, SECONDS) == {"w": 3.0}


def test_tensors_that_are_under_way_together_share_it_by_bytes() -> None:
    tensors = {**GRAPH.tensors, "v": LogicalTensor("v", (12,), torch.float32)}
    last = Op("c", "aten.cat.default", (Ref("v"), Ref("w")), outputs=("c",))
    variables = (*GRAPH.variables, Variable("v", "v", "parameter"))
    graph = LogicalGraph((*OPS[:2], last), tensors, variables, GRAPH.feeds)
    assert hidden_seconds(graph, {"a": 1.0, "b": 3.0, "c": 4.0}) == {"w": 1.0, "v": 3.0}


def test_nothing_is_hidden_where_the_loops_thread_carries_the_bytes() -> None:
    assert hidden_seconds(GRAPH, SECONDS, but={0}) == {}


@pytest.mark.parametrize(("blocking", "hidden"), [((), {"w": 3.0}), (("data",), {})])
def test_nothing_is_hidden_where_all_axes_block(
    blocking: tuple[str, ...], hidden: dict[str, float]
) -> None:
    grid = Placement((("data", 2),), (0, 1))
    objective = Objective(GRAPH, Strategy(("data",), (grid,), blocking=blocking))
    objective.hide(SECONDS)
    assert objective.hidden == hidden


def test_hidden_seconds_are_rounded_down_by_an_eighth_at_most() -> None:
    """So that blocks which are nearly equal have equal tables."""
    hidden = [hidden_seconds(GRAPH, {**SECONDS, "a": 1 + k / 100})["w"] for k in range(20)]
    assert set(hidden) == {3.0}
    assert hidden_seconds(GRAPH, {**SECONDS, "a": 1.3})["w"] == pytest.approx(3.25)
