from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import float32

from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRAD,
    WEIGHTS,
    LogicalGraph,
    LogicalTensor,
    Ref,
    Variable,
)
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.strategy import Strategy, Zero
from support.plans.graph_text import one_axis, one_op

SHAPE = (4, 4)
Reader = tuple[Sbp, int, str]  # what it reads, stage, phase


def read_by(made: Sbp, *readers: Reader, weight: bool = False) -> LogicalGraph:
    """A tensor %t, made by an op or a weight, and ops that read it as said."""
    relu = "aten.relu.default"
    ops = [] if weight else [one_op("t", relu, out=made)]
    ops += [
        one_op(f"r{k}", relu, "t", phase=phase, stage=stage, ins=[sbp], out=sbp, module=f"r{k}")
        for k, (sbp, stage, phase) in enumerate(readers)
    ]
    names = ("t", *(f"r{k}" for k in range(len(readers))))
    tensors = {name: LogicalTensor(name, SHAPE, float32) for name in names}
    variables = (Variable("t", "t", "parameter", nd_sbp=(made,)),) if weight else ()
    return LogicalGraph(tuple(ops), tensors, variables)


def boxed(graph: LogicalGraph, strategy: Strategy | None = None) -> list[str]:
    """The boxing ops, as text without the module."""
    actual = insert_boxing(graph, strategy or one_axis("x")).ops
    return [str(op).split("  #")[0] for op in actual if op.target in ("flow.box", "flow.transfer")]


def test_a_reader_that_wants_what_there_is_needs_no_boxing() -> None:
    assert boxed(read_by(S(0), (S(0), 0, FORWARD))) == []


def test_a_partial_sum_read_whole_is_one_all_reduce() -> None:
    expected = ["%t:B = flow.box(%t, all_reduce axis 0 P -> B)  P -> B"]
    assert boxed(read_by(P, (B, 0, FORWARD))) == expected


def test_readers_that_want_the_same_share_one_boxing() -> None:
    graph = insert_boxing(read_by(P, (B, 0, FORWARD), (B, 0, BACKWARD)), one_axis("x"))
    assert [op.inputs for op in graph.ops if op.name.startswith("r")] == [("t:B",), ("t:B",)]
    assert sum(op.target == "flow.box" for op in graph.ops) == 1


def test_a_second_form_starts_from_the_cheapest_there_is() -> None:
    assert boxed(read_by(P, (B, 0, FORWARD), (S(1), 0, FORWARD))) == [
        "%t:B = flow.box(%t, all_reduce axis 0 P -> B)  P -> B",
        "%t:S(1) = flow.box(%t:B, slice axis 0 B -> S(1))  B -> S(1)",
    ]


def test_a_boxing_stands_before_its_first_reader_in_its_phase() -> None:
    graph = insert_boxing(read_by(P, (P, 0, FORWARD), (B, 0, BACKWARD)), one_axis("x"))
    assert [op.name for op in graph.ops] == ["t", "r0", "t:B", "r1"]
    assert graph.producer["t:B"].phase == BACKWARD


@pytest.mark.parametrize(
    ("zero", "phases"), [(0, [WEIGHTS]), (2, [WEIGHTS]), (3, [FORWARD, BACKWARD])]
)
def test_a_weight_is_gathered_once_a_step_or_under_zero_3_with_each_pass(
    zero: int, phases: Sequence[str]
) -> None:
    graph = read_by(S(0), (B, 0, FORWARD), (B, 0, FORWARD), (B, 0, BACKWARD), weight=True)
    actual = insert_boxing(graph, one_axis("x", zero=Zero("x", zero, 1)))
    assert [op.phase for op in actual.ops if op.target == "flow.box"] == phases


@pytest.mark.parametrize(
    ("zero", "phases"), [(2, [WEIGHTS, WEIGHTS]), (3, [FORWARD, FORWARD, BACKWARD, BACKWARD])]
)
def test_what_is_made_of_a_shard_is_made_beside_each_gather(
    zero: int, phases: Sequence[str]
) -> None:
    reads = [(S(0), 0, WEIGHTS), (B, 0, FORWARD), (B, 0, BACKWARD), (B, 0, WEIGHT_GRAD)]
    graph = read_by(S(0), *reads, weight=True)
    cast, *readers = graph.ops
    graph = replace(graph, ops=(cast, *(replace(op, args=(Ref("r0"),)) for op in readers)))
    actual = insert_boxing(graph, one_axis("x", zero=Zero("x", zero, 1)))
    assert [op.phase for op in actual.ops if op.name.startswith("r0")] == phases


def test_a_boxing_for_a_weight_gradient_that_backward_reads_too_does_not_run_late() -> None:
    graph = read_by(P, (B, 0, WEIGHT_GRAD), (B, 0, BACKWARD), (S(0), 0, WEIGHT_GRAD))
    actual = insert_boxing(graph, one_axis("x")).ops
    phases = {op.name: op.phase for op in actual if op.target == "flow.box"}
    assert phases == {"t:B": BACKWARD, "t:S(0)": WEIGHT_GRAD}


def stages(sizes: Sequence[int]) -> Strategy:
    """Stages of so many ranks along one axis."""
    out, first = [], 0
    for size in sizes:
        out.append(Placement((("x", size),), tuple(range(first, first + size))))
        first += size
    return Strategy(("x",), tuple(out))


def test_another_stage_gets_a_transfer_and_a_partial_sum_is_reduced_before() -> None:
    assert boxed(read_by(P, (S(0), 1, FORWARD)), stages((2, 2))) == [
        "%t:S(0) = flow.box(%t, reduce_scatter axis 0 P -> S(0))  P -> S(0)",
        "%t:S(0)@1 = flow.transfer(%t:S(0), 0)  S(0) -> S(0)",
    ]


def test_two_readers_of_another_stage_share_one_transfer() -> None:
    actual = boxed(read_by(B, (B, 1, FORWARD), (S(0), 1, FORWARD)), stages((2, 2)))
    assert sum("flow.transfer" in line for line in actual) == 1


def test_what_a_larger_grid_can_get_from_its_own_ranks_crosses_once() -> None:
    assert boxed(read_by(S(0), (B, 1, FORWARD)), stages((2, 4))) == [
        "%t:S(0)@1 = flow.transfer(%t, 0)  S(0) -> S(0)",
        "%t:B = flow.box(%t:S(0)@1, all_gather axis 0 S(0) -> B)  S(0) -> B",
    ]
