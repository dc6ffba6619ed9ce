from dataclasses import replace

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.sbp import B, NdSbp, P, S, format_nd_sbp
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.passes.layout.infer_sbp import infer_sbp, infer_update
from flowrun.engine.passes.search.search_sbp import assign_sbp
from flowrun.engine.strategy import Pin, Strategy
from support.plans.graph_text import one_axis, rewritten, through

COLUMNS_THEN_ROWS = (
    Pin("a.weight", "variable", "tensor", S(0)),
    Pin("b.weight", "variable", "tensor", S(1)),
)


def signed(strategy: Strategy) -> LogicalGraph:
    return rewritten(through(infer_update), strategy)


def homes(graph: LogicalGraph) -> dict[str, NdSbp]:
    out = {v.name: v.nd_sbp for v in graph.variables}
    return out | {f.field: f.nd_sbp for f in graph.feeds}


def signature(graph: LogicalGraph, name: str) -> str:
    op = graph.producer[name]
    return ", ".join(map(format_nd_sbp, op.in_sbp)) + " -> " + format_nd_sbp(op.out_sbp[0])


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
