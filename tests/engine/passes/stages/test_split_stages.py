import math
from dataclasses import replace

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.network import Level
from flowrun.engine.passes.stages.chosen_stages import read_stages
from flowrun.engine.passes.stages.split_stages import split_stages
from support.plans.graph_text import TWO_LAYERS, assert_ops, graph_of, one_rank_stages, two_layers

# A residual around two blocks; torch tells no module for the sum of gradients.
RESIDUAL = """
    parameter a.weight = %wa: float32[4, 4]
    parameter b.weight = %wb: float32[4, 4]
    feed x = %x: float32[6, 4]
    %p = aten.mm.default(%x, %wa)  # forward a stage 0
    %q = aten.mm.default(%p, %wb)  # forward b stage 0
    %s = aten.add.Tensor(%p, %q)  # forward - stage 0
    %loss = aten.sum.default(%s)  # forward loss stage 0
    %dq = aten.expand.default(%loss, [6, 4])  # backward loss stage 0
    %dp = aten.mm.default(%dq, %wb)  # backward b stage 0
    %sum = aten.add.Tensor(%dq, %dp)  # backward - stage 0
    %dx = aten.mm.default(%sum, %wa)  # backward a stage 0
    result loss = %loss
"""


def test_a_field_that_two_stages_read_enters_at_both() -> None:
    text = RESIDUAL.replace("aten.mm.default(%p, %wb)", "aten.add.Tensor(%p, %x)")
    graph = split_stages(graph_of(text), one_rank_stages(2, stage_modules=(("a",), ("b",))))
    assert [(f.field, f.tensor, f.stage) for f in graph.feeds] == [("x", "x@0", 0), ("x", "x@1", 1)]


def test_an_op_between_modules_follows_its_latest_input_a_sum_of_gradients_the_earliest() -> None:
    graph = split_stages(graph_of(RESIDUAL), one_rank_stages(2, stage_modules=(("a",), ("b",))))
    stages = {op.name: op.stage for op in graph.ops}
    assert stages["s"] == 1
    assert stages["sum"] == stages["dp"] == 1, "the gradient crosses once, summed"
    assert stages["dx"] == 0


AROUND = """
    parameter a.weight = %wa: float32[4, 4]
    parameter b.weight = %wb: float32[4, 4]
    parameter c.weight = %wc: float32[4, 4]
    feed x = %x: float32[6, 4]
    %p = aten.mm.default(%x, %wa)  # forward a stage 0
    %q = aten.mm.default(%p, %wb)  # forward b stage 0
    %r = aten.mm.default(%q, %wc)  # forward c stage 0
    %loss = aten.sum.default(%r)  # forward loss stage 0
    %dr = aten.expand.default(%loss, [6, 4])  # backward loss stage 0
    %dq = aten.mm.default(%dr, %wc)  # backward c stage 0
    %dp = aten.mm.default(%dq, %wb)  # backward b stage 0
    result loss = %loss
"""


def test_a_list_may_go_around_the_stages_as_often_as_they_have_chunks() -> None:
    listed = one_rank_stages(2, stage_modules=(("a", "c"), ("b",)), chunks=2)
    graph = split_stages(graph_of(AROUND), listed)
    places = {op.name: (op.stage, op.chunk) for op in graph.ops}
    assert places == {
        **{"p": (0, 0), "q": (1, 0), "dp": (1, 0), "r": (0, 1), "dq": (0, 1)},
        **{"loss": (1, 1), "dr": (1, 1)},
    }
    with pytest.raises(RecipeError, match=r"3 chunks, but .* go around the 2 stages 2 times"):
        split_stages(graph_of(AROUND), replace(listed, chunks=3))


REFUSED = {
    "a pattern that matches nothing": ((("a", "act"), ("c*",)), "placement.stages.1.modules"),
    "a module that no stage lists": ((("a",), ("b",)), "placement.stages"),
    "a module that an earlier stage lists": (
        (("a", "act", "b"), ("b",)),
        "placement.stages.1.modules",
    ),
}


@pytest.mark.parametrize(("modules", "where"), list(REFUSED.values()), ids=list(REFUSED))
def test_lists_that_do_not_fit_the_model_are_refused(
    modules: tuple[tuple[str, ...], ...], where: str
) -> None:
    with pytest.raises(RecipeError, match=r"act|c\*|'b' is on stage 0") as error:
        split_stages(two_layers(), one_rank_stages(2, stage_modules=modules))
    assert error.value.where == where


def test_more_stages_than_pieces_are_refused() -> None:
    wanted = r"asks for 5 stages, but .* into at most 4 pieces"
    with pytest.raises(RecipeError, match=wanted) as error:
        split_stages(two_layers(), one_rank_stages(5))
    assert error.value.where == "placement.stages"


def test_without_a_list_the_model_is_cut_where_the_slowest_stage_is_fastest() -> None:
    free = Hardware(levels=(Level(0, 0.0, math.inf),))
    graph = split_stages(two_layers(), one_rank_stages(3, hardware=free))
    expected = {"a": 0, "act": 1, "b": 2}
    assert {op.module: op.stage for op in graph.ops if op.module != "loss"} == expected


# A mask of constants and a gate of weights, each read on both sides of the cut.
SHARED = """
    parameter a.weight = %wa: float32[4, 4]
    parameter b.weight = %wb: float32[4, 4]
    parameter gate = %gate: float32[4]
    feed x = %x: float32[6, 4]
    %ones = aten.ones.default([6, 4])  # forward - stage 0
    %mask = aten.tril.default(%ones)  # forward - stage 0
    %open = aten.sigmoid.default(%gate)  # forward - stage 0
    %p = aten.mm.default(%x, %wa)  # forward a stage 0
    %pm = aten.mul.Tensor(%p, %mask)  # forward a stage 0
    %pg = aten.mul.Tensor(%pm, %open)  # forward a stage 0
    %q = aten.mm.default(%pg, %wb)  # forward b stage 0
    %qm = aten.mul.Tensor(%q, %mask)  # forward b stage 0
    %qg = aten.mul.Tensor(%qm, %open)  # forward b stage 0
    %loss = aten.sum.default(%qg)  # forward loss stage 0
    result loss = %loss
"""


def test_what_no_activation_enters_is_computed_by_every_stage_that_reads_it() -> None:
    graph = split_stages(graph_of(SHARED), one_rank_stages(2, stage_modules=(("a",), ("b",))))
    assert_ops(
        graph.ops,
        """
        %ones@0 = aten.ones.default([6, 4])  # forward - stage 0
        %ones@1 = aten.ones.default([6, 4])  # forward - stage 1
        %mask@0 = aten.tril.default(%ones@0)  # forward - stage 0
        %mask@1 = aten.tril.default(%ones@1)  # forward - stage 1
        %open@0 = aten.sigmoid.default(%gate)  # forward - stage 0
        %open@1 = aten.sigmoid.default(%gate)  # forward - stage 1
        %p = aten.mm.default(%x@0, %wa)  # forward a stage 0
        %pm = aten.mul.Tensor(%p, %mask@0)  # forward a stage 0
        %pg = aten.mul.Tensor(%pm, %open@0)  # forward a stage 0
        %q = aten.mm.default(%pg, %wb)  # forward b stage 1
        %qm = aten.mul.Tensor(%q, %mask@1)  # forward b stage 1
        %qg = aten.mul.Tensor(%qm, %open@1)  # forward b stage 1
        %loss = aten.sum.default(%qg)  # forward loss stage 1
        """,
    )


def test_a_backward_op_follows_its_forward_op_where_a_module_is_cut() -> None:
    graph = two_layers()
    moments = dict(h=0, r=1, y=2, loss=3, dy=3, dyt=2, db=2, dr=2, dh=1, dht=0, da=0)
    flat = [replace(op, module="one", moment=moments.get(op.name, -1)) for op in graph.ops]
    staged = split_stages(replace(graph, ops=tuple(flat)), one_rank_stages(2))
    stages = {op.name: op.stage for op in staged.ops}
    pairs = {("db", "y"), ("dr", "y"), ("dh", "r"), ("da", "h")}
    assert {stages["h"], stages["y"]} == {0, 1}, "the one module is cut"
    assert all(stages[later] == stages[earlier] for later, earlier in pairs)


def test_another_graph_of_the_model_follows_op_by_op() -> None:
    training = split_stages(two_layers(), one_rank_stages(3))
    text = TWO_LAYERS.replace("aten.relu.default", "aten.gelu.default")  # this graph has another op
    lines = [line for line in text.splitlines() if "backward" not in line and "grad/" not in line]
    actual = split_stages(
        graph_of("\n".join(lines)), one_rank_stages(3, decided=read_stages(training))
    )
    there = {op.name: op.stage for op in training.ops}
    assert all(op.stage == there[op.name] for op in actual.ops)
    expected = {v.name: v.stage for v in training.variables}
    assert {v.name: v.stage for v in actual.variables} == expected
