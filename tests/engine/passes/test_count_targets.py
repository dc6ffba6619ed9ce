"""count_targets: no rank waits in mid-step for the count of another one's targets.

Of steps with one micro-batch: count_step has counted those of more.
"""

import pytest

from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import COUNT
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import gpt

GPT = gpt(blocks=1, width=16, micro_batches=1)


def graph(layout: Layout) -> LogicalGraph:
    return compiled(GPT, layout).plan.graph


def made_of(graph: LogicalGraph, name: str) -> set[str]:
    """What comes from outside that a tensor is made of."""
    maker = graph.producer.get(name)
    if maker is None:
        return {name}
    return {read for each in maker.inputs for read in made_of(graph, each)}


def the(graph: LogicalGraph, target: str) -> Op:
    (op,) = (op for op in graph.ops if op.target == target)
    return op


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, tensor=2)], ids=str)
def test_the_count_of_a_split_batch_is_made_of_its_targets_alone(layout: Layout) -> None:
    actual = graph(layout)
    total = cross_entropy.given(the(actual, cross_entropy.BACKWARD))["total"]
    assert made_of(actual, total.name) == {"batch.targets"}
    assert the(actual, COUNT).out_sbp == the(actual, cross_entropy.FORWARD).out_sbp[1:]


def test_a_gradient_has_its_loss_before_it_all_the_same() -> None:
    actual = graph(Layout(data=2))
    loss, count = the(actual, cross_entropy.FORWARD).outputs
    assert count is None
    assert cross_entropy.given(the(actual, cross_entropy.BACKWARD))["loss"].name == loss


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(stages=2)], ids=str)
def test_where_all_ranks_have_all_targets_the_loss_counts_them(layout: Layout) -> None:
    assert COUNT not in {op.target for op in graph(layout).ops}
