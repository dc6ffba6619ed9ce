import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.capture.capture import capture
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.ir.graph import FORWARD, LogicalGraph
from flowrun.engine.passes.stages.balance_stages import (
    WORK_TOLERANCE,
    ForwardSequence,
    balance_cuts,
)
from flowrun.engine.passes.stages.split_stages import split_stages
from support.layouts.grids import Layout, compiled, example, strategy, task
from support.layouts.plain_loop import Training, gpt

SECONDS = st.integers(0, 20)


@st.composite
def lines(draw: st.DrawFn) -> ForwardSequence:
    """Up to 8 pieces; nothing crosses before the first."""
    work = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    entering, leaving = (
        [0, *draw(st.lists(SECONDS, min_size=len(work) - 1, max_size=len(work) - 1))]
        for _ in range(2)
    )
    return ForwardSequence(*(tuple(map(float, each)) for each in (work, entering, leaving)))


@settings(max_examples=150)
@given(line=lines(), data=st.data())
def test_cuts_are_the_best_of_all_cuts(line: ForwardSequence, data: st.DataObject) -> None:
    n = len(line.work_s)
    stages = data.draw(st.integers(1, n))
    ranks = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))

    def seconds(start: int, end: int) -> float:
        returning_s = (*line.returning_s, 0.0)[end]
        return sum(line.work_s[start:end]) + line.entering_s[start] + returning_s

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = itertools.pairwise((0, *cuts, n))
        return max(seconds(a, b) / share for (a, b), share in zip(bounds, ranks, strict=True))

    def sent(cuts: tuple[int, ...]) -> float:
        return sum(line.entering_s[cut] + line.returning_s[cut] for cut in cuts)

    every = list(itertools.combinations(range(1, n), stages - 1))
    limit = min(map(slowest, every)) + WORK_TOLERANCE * sum(line.work_s) / sum(ranks)
    nearly = [cuts for cuts in every if slowest(cuts) <= limit]
    actual = balance_cuts(line, ranks)
    assert (sent(actual), slowest(actual)) == min((sent(cuts), slowest(cuts)) for cuts in nearly)


def staged(training: Training, stages: int) -> LogicalGraph:
    graph = capture(task(training), example(training))
    return split_stages(graph, strategy(training, Layout(stages=stages)))


def stage_seconds(graph: LogicalGraph, training: Training) -> list[float]:
    hardware = strategy(training, Layout()).hardware
    seconds: Counter[int] = Counter()
    for op in graph.ops:
        seconds[op.stage] += SizedOp.whole(op, graph.tensors).seconds(hardware)
    return [seconds[stage] for stage in sorted(seconds)]


def test_three_blocks_on_two_stages_are_cut_inside_the_middle_block() -> None:
    training = gpt(blocks=3)
    graph = staged(training, 2)
    middle = {op.stage for op in graph.ops if op.module.startswith("blocks.1")}
    assert middle == {0, 1}
    seconds = stage_seconds(graph, training)
    assert max(seconds) <= 1.1 * sum(seconds) / 2


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_tensor_crosses_each_way_where_a_clean_cut_exists(stages: int) -> None:
    plan = compiled(gpt(blocks=4), Layout(stages=stages)).plan
    crossings = Counter(
        (op.phase, op.args[1], op.stage)
        for op in plan.graph.ops
        if op.target == "flow.transfer" and op.phase != "update"
    )
    expected: Counter[tuple[str, int, int]] = Counter()
    for stage in range(stages - 1):
        expected[FORWARD, stage, stage + 1] += 1
        expected["backward", stage + 1, stage] += 1
    assert crossings == expected
