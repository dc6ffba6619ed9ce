from dataclasses import replace

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, NdSbp, P, S, format_nd_sbp
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.passes.layout.infer_sbp import infer_sbp, infer_update
from flowrun.engine.passes.search.search_sbp import assign_sbp
from flowrun.engine.strategy import Pin, Strategy
from support.plans.graph_text import SGD, assert_ops, one_axis, rewritten, through

COLUMNS_THEN_ROWS = (
    Pin("a.weight", "variable", "tensor", S(0)),
    Pin("b.weight", "variable", "tensor", S(1)),
)
MEGATRON = """
    %at = aten.t.default(%a.weight)  S(0) -> S(1)  # forward a stage 0
    %h = aten.mm.default(%x, %at)  B, S(1) -> S(1)  # forward a stage 0
    %r = aten.relu.default(%h)  S(1) -> S(1)  # forward act stage 0
    %bt = aten.t.default(%b.weight)  S(1) -> S(0)  # forward b stage 0
    %y = aten.mm.default(%r, %bt)  S(1), S(0) -> P  # forward b stage 0
    %loss = aten.sum.default(%y)  P -> P  # forward loss stage 0
    %loss/sum = flow.accumulate(%loss)  P -> P  # forward loss stage 0
    %tangent = aten.full.default([], 1.0, dtype=torch.float32)  -> B  # backward loss stage 0
    %dy = aten.expand.default(%tangent, [6, 2])  B -> B  # backward loss stage 0
    %dyt = aten.t.default(%dy)  B -> B  # backward b stage 0
    %db = aten.mm.default(%dyt, %r)  B, S(1) -> S(1)  # backward b stage 0
    %grad/b.weight = flow.accumulate(%db)  S(1) -> S(1)  # backward b stage 0
    %dr = aten.mm.default(%dy, %b.weight)  B, S(1) -> S(1)  # backward b stage 0
    %dh = aten.threshold_backward.default(%dr, %h, 0)  S(1), S(1) -> S(1)  # backward act stage 0
    %dht = aten.t.default(%dh)  S(1) -> S(0)  # backward a stage 0
    %da = aten.mm.default(%dht, %x)  S(0), B -> S(0)  # backward a stage 0
    %grad/a.weight = flow.accumulate(%da)  S(0) -> S(0)  # backward a stage 0
"""


def signed(strategy: Strategy) -> LogicalGraph:
    return rewritten(through(infer_update), strategy)


def homes(graph: LogicalGraph) -> dict[str, NdSbp]:
    out = {v.name: v.nd_sbp for v in graph.variables}
    return out | {f.field: f.nd_sbp for f in graph.feeds}


def signature(graph: LogicalGraph, name: str) -> str:
    op = graph.producer[name]
    return ", ".join(map(format_nd_sbp, op.in_sbp)) + " -> " + format_nd_sbp(op.out_sbp[0])


def test_columns_then_rows_give_megatrons_signatures() -> None:
    graph = rewritten(through(assign_sbp), one_axis("tensor", pins=COLUMNS_THEN_ROWS))
    assert_ops([op for op in graph.ops if op.phase != UPDATE], MEGATRON)


def test_without_pins_the_search_finds_them_itself() -> None:
    graph = rewritten(through(assign_sbp), one_axis("tensor"))
    assert_ops([op for op in graph.ops if op.phase != UPDATE], MEGATRON)


def test_on_the_data_axis_samples_are_split_weights_whole_and_gradients_partial() -> None:
    graph = signed(one_axis("data"))
    assert homes(graph) == {
        "x": (S(0),),
        **dict.fromkeys(("a.weight", "b.weight"), (B,)),
        **dict.fromkeys(("momentum_buffer/a.weight", "momentum_buffer/b.weight", "@lr"), (B,)),
    }
    assert signature(graph, "h") == "S(0), B -> S(0)"
    assert signature(graph, "da") == "S(1), S(0) -> P"
    assert signature(graph, "grad/a.weight") == "P -> P", "summed once a step, not each micro-batch"


def test_a_state_lives_with_its_weight_and_the_update_runs_there() -> None:
    graph = signed(one_axis("tensor", pins=COLUMNS_THEN_ROWS))
    assert homes(graph)["momentum_buffer/a.weight"] == homes(graph)["a.weight"] == (S(0),)
    assert signature(graph, "a.weight'") == "S(0), S(0), S(0), B -> S(0)"


def test_two_axes_are_decided_one_after_the_other() -> None:
    axes = (("data", 2), ("tensor", 2))
    placement = Placement(axes, (0, 1, 2, 3))
    strategy = Strategy(("data", "tensor"), (placement,), pins=COLUMNS_THEN_ROWS, optimizer=SGD)
    graph = signed(strategy)
    assert signature(graph, "h") == "(S(0), B), (B, S(1)) -> (S(0), S(1))"
    assert signature(graph, "y") == "(S(0), S(1)), (B, S(0)) -> (S(0), P)"
    assert signature(graph, "da") == "(S(1), S(0)), (S(0), B) -> (P, S(0))"


def test_an_axis_of_size_1_is_as_if_absent() -> None:
    graph = signed(one_axis("tensor", 1, pins=COLUMNS_THEN_ROWS))
    assert {nd_sbp for op in graph.ops for nd_sbp in (*op.in_sbp, *op.out_sbp)} == {(B,)}


def test_a_later_line_of_the_recipe_wins() -> None:
    pins = (*COLUMNS_THEN_ROWS, Pin("*.weight", "variable", "tensor", B))
    assert homes(signed(one_axis("tensor", pins=pins)))["a.weight"] == (B,)


def test_a_pinned_batch_field_lies_as_pinned() -> None:
    pins = (Pin("batch.x", "variable", "tensor", S(1)),)
    assert homes(signed(one_axis("tensor", pins=pins)))["x"] == (S(1),)


def test_a_weight_that_a_pin_splits_against_its_use_is_read_where_it_is() -> None:
    """a.weight split along its rows' elements makes %h partial; it is not gathered."""
    pins = (Pin("a.weight", "variable", "tensor", S(1)),)
    graph = signed(one_axis("tensor", pins=pins))
    assert signature(graph, "h") == "S(1), S(0) -> P"
    boxed = insert_boxing(graph, one_axis("tensor", pins=pins))
    moved = {op.inputs[0] for op in boxed.ops if op.target == "flow.box" and op.args[1].moves}
    assert "a.weight" not in moved
    assert "h" in moved, "the relu of a part is not a part of the relu"


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RecipeError, match="6 samples cannot be divided over 4 ranks") as error:
        signed(one_axis("data", 4))
    assert error.value.where == "placement.axes.data"


def test_an_op_without_a_table_is_whole_everywhere_and_noted() -> None:
    strategy = one_axis("tensor")
    graph = rewritten(through(assign_sbp)[:-1], strategy)
    strange = [
        replace(op, target="aten.nobody.default") if op.name == "r" else op for op in graph.ops
    ]
    graph = infer_sbp(replace(graph, ops=tuple(strange)), strategy)
    assert signature(graph, "r") == "B -> B"
    assert [note for note in graph.notes if "aten.nobody.default in module act" in note]


def test_an_output_may_be_pinned_to_be_a_sum() -> None:
    pins = (Pin("b", "out", "tensor", P), Pin("act", "out", "tensor", P))
    assert signature(signed(one_axis("tensor", pins=pins)), "y/pinned") == "P -> P"
