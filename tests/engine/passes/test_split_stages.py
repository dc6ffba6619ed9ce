"""captured -> staged: text in, text out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.errors import RecipeError
from flowrun.engine.passes.split_stages import balanced_cuts, split_stages, unit_of
from support.graph_text import assert_ops, graph_of, one_rank_stages, two_layers

LISTED = one_rank_stages(2, stage_modules=(("a", "act"), ("b",)))

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


def test_ops_follow_their_modules_and_backward_its_forward() -> None:
    assert_ops(
        split_stages(two_layers(), LISTED).ops,
        """
        %at = aten.t.default(%a.weight)  # forward a stage 0
        %h = aten.mm.default(%x@0, %at)  # forward a stage 0
        %r = aten.relu.default(%h)  # forward act stage 0
        %bt = aten.t.default(%b.weight)  # forward b stage 1
        %y = aten.mm.default(%r, %bt)  # forward b stage 1
        %loss = aten.sum.default(%y)  # forward loss stage 1
        %dy = aten.expand.default(%tangent@1, [6, 2])  # backward loss stage 1
        %dyt = aten.t.default(%dy)  # backward b stage 1
        %db = aten.mm.default(%dyt, %r)  # backward b stage 1
        %dr = aten.mm.default(%dy, %b.weight)  # backward b stage 1
        %dh = aten.threshold_backward.default(%dr, %h, 0)  # backward act stage 0
        %dht = aten.t.default(%dh)  # backward a stage 0
        %da = aten.mm.default(%dht, %x@0)  # backward a stage 0
        """,
    )


def test_variables_and_feeds_live_where_they_are_read() -> None:
    graph = split_stages(two_layers(), LISTED)
    assert {v.name: v.stage for v in graph.variables} == {"a.weight": 0, "b.weight": 1}
    assert {f.tensor: f.stage for f in graph.feeds} == {"x@0": 0, "tangent@1": 1}


def test_a_field_that_two_stages_read_enters_at_both() -> None:
    text = RESIDUAL.replace("aten.mm.default(%p, %wb)", "aten.add.Tensor(%p, %x)")
    graph = split_stages(graph_of(text), one_rank_stages(2, stage_modules=(("a",), ("b",))))
    assert [(f.field, f.tensor, f.stage) for f in graph.feeds] == [("x", "x@0", 0), ("x", "x@1", 1)]


def test_an_op_between_modules_follows_its_latest_input_and_a_sum_of_gradients_the_earliest() -> (
    None
):
    graph = split_stages(graph_of(RESIDUAL), one_rank_stages(2, stage_modules=(("a",), ("b",))))
    stages = {op.name: op.stage for op in graph.ops}
    assert stages["s"] == 1
    assert stages["sum"] == stages["dp"] == 1, "the gradient crosses once, summed"
    assert stages["dx"] == 0


def test_one_stage_changes_nothing_but_the_level() -> None:
    graph = split_stages(two_layers(), one_rank_stages(1))
    assert [str(op) for op in graph.ops] == [str(op) for op in two_layers().ops]
    assert graph.level == "staged"


REFUSED = {
    "a pattern that matches nothing": ((("a", "act"), ("c*",)), "placement.stages.1.modules"),
    "a module that no stage lists": ((("a",), ("b",)), "placement.stages"),
}


@pytest.mark.parametrize(("modules", "where"), list(REFUSED.values()), ids=list(REFUSED))
def test_lists_that_do_not_fit_the_model_are_refused(
    modules: tuple[tuple[str, ...], ...], where: str
) -> None:
    with pytest.raises(RecipeError, match=r"act|c\*") as error:
        split_stages(two_layers(), one_rank_stages(2, stage_modules=modules))
    assert error.value.where == where


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"4 stages, but the model has 3 blocks: a, act, b"):
        split_stages(two_layers(), one_rank_stages(4))


def test_without_a_list_the_model_is_cut_where_the_slowest_stage_is_fastest() -> None:
    graph = split_stages(two_layers(), one_rank_stages(3))
    assert {op.module: op.stage for op in graph.ops if op.module != "loss"} == {
        "a": 0,
        "act": 1,
        "b": 2,
    }


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=8), data=st.data())
def test_cuts_are_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def slowest(cuts: tuple[int, ...]) -> int:
        bounds = itertools.pairwise((0, *cuts, len(costs)))
        return max(sum(costs[start:end]) for start, end in bounds)

    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert slowest(balanced_cuts(costs, stages)) == min(map(slowest, every))


@pytest.mark.parametrize(
    ("path", "unit"),
    [("blocks.3.attn.qkv", "blocks.3"), ("embed.wte", "embed"), ("head", "head")],
)
def test_a_block_is_the_path_up_to_its_first_number(path: str, unit: str) -> None:
    assert unit_of(path) == unit
