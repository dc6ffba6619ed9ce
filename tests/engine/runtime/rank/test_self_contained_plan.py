from dataclasses import replace

import pytest
import torch

from flowrun.engine.ir.graph import LogicalGraph
from support.layouts.grids import Layout, compiled, run_plan
from support.layouts.plain_loop import gpt

NO_GRAPH = LogicalGraph((), {})


@pytest.mark.parametrize(
    "layout", [Layout(data=2, tensor=2, zero=2), Layout(data=2, stages=2, zero=3)], ids=str
)
def test_ranks_train_alike_without_the_graph(layout: Layout) -> None:
    plan = compiled(gpt(), layout).plan
    found = run_plan(gpt(), replace(plan, graph=NO_GRAPH), steps=2)
    expected = run_plan(gpt(), plan, steps=2)
    assert found.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


def test_the_plan_reads_the_same_without_the_graph() -> None:
    plan = compiled(gpt(), Layout(stages=2)).plan
    assert str(replace(plan, graph=NO_GRAPH)) == str(plan)
