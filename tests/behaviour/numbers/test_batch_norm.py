"""Batch norm in the consistent view: the statistics of one device with the whole micro-batch.

Losses within 1e-5 relative, weights and running statistics within 1e-5: float32 sums in another
order.
"""

from __future__ import annotations

import pytest
import torch

from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from support.layouts.grids import (
    FIVE,
    Layout,
    compiled,
    compiled_evaluation,
    virtual_run,
    weights_of,
)
from support.layouts.plain_loop import micro_batch_loop, plain_evaluation
from support.nets.normed_net import NORMED

STEPS = 3


@pytest.mark.parametrize("layout", [*FIVE, Layout(data=4), Layout(data=2, tensor=2)], ids=str)
def test_a_split_batch_has_the_statistics_of_the_whole(layout: Layout) -> None:
    losses, state = micro_batch_loop(NORMED, STEPS)
    found = virtual_run(NORMED, layout, STEPS)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, tensor=2)], ids=str)
def test_evaluation_reads_the_running_statistics(layout: Layout) -> None:
    _, state = micro_batch_loop(NORMED, STEPS)
    plan = compiled_evaluation(NORMED, layout).plan
    cluster = VirtualCluster(plan, NORMED.rows, state)
    found = cluster.run(2)
    for one, other in zip(found, plain_evaluation(NORMED, state, 2), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for name, value in state.items():
        if "running" in name:
            assert torch.equal(weights_of(cluster)[name], value), "evaluation keeps buffers"


def test_channels_that_are_split_keep_their_statistics_where_they_are() -> None:
    graph = compiled(NORMED, Layout(tensor=2)).plan.graph
    homes = {v.name: str(v.nd_sbp[0]) for v in graph.variables}
    assert homes["norm1.running_mean"] == homes["norm1.running_var"] == "S(0)"
    assert homes["norm2.running_mean"] == "B"
    fused = [op for op in graph.ops if "batch_norm_legit_functional" in op.target]
    assert len(fused) == 3, "no statistic is reduced over ranks that hold whole channels"
