"""Large weights that backward multiplies with are turned once a step; numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrun.engine.compile import compile_training
from flowrun.engine.cost.hardware import Hardware
from flowrun.engine.graph import BACKWARD, WEIGHTS, LogicalGraph
from flowrun.engine.plan import Plan
from support.layouts import LAYOUTS, Layout, example, run_plan, strategy, task
from support.plain_loop import (
    TINY_GPT,
    TINY_MLP,
    Training,
    loss_difference,
    plain_loop,
    weight_difference,
)

ALL = Hardware(turned_bytes=1)


def planned(training: Training, layout: Layout, hardware: Hardware = ALL) -> Plan:
    asked = replace(strategy(training, layout), hardware=hardware)
    return compile_training(task(training), example(training), asked).plan


def turned(graph: LogicalGraph) -> set[str]:
    """Weights with a copy."""
    return {
        op.makes[0].removesuffix("/turned")
        for op in graph.ops
        if op.target == "aten.clone.default" and op.makes[0].endswith("/turned")
    }


def test_a_copy_is_made_once_a_step_and_read_with_every_micro_batch() -> None:
    graph = planned(TINY_MLP, Layout()).graph
    assert turned(graph) == {"output.weight"}  # no gradient of images is asked for
    (copy,) = (op for op in graph.ops if op.makes == ("output.weight/turned",))
    assert copy.phase == WEIGHTS
    (product,) = graph.consumers["output.weight/by columns"]
    assert (product.target, product.phase) == ("aten.mm.default", BACKWARD)
    assert graph.tensors[product.inputs[1]].shape == graph.tensors["output.weight"].shape


@pytest.mark.parametrize(
    ("layout", "hardware", "micro_batches"),
    [
        (Layout(), Hardware(), 4),
        (Layout(), Hardware(turned_bytes=1e9), 4),
        (Layout(), ALL, 1),
        (Layout(data=2, zero=3), ALL, 4),
    ],
    ids=["not asked for", "none is as large", "one micro-batch", "ZeRO"],
)
def test_none_is_made(layout: Layout, hardware: Hardware, micro_batches: int) -> None:
    training = replace(TINY_MLP, micro_batches=micro_batches)
    assert turned(planned(training, layout, hardware).graph) == set()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_a_plain_loops(layout: Layout) -> None:
    plan = planned(TINY_GPT, layout)
    if not layout.zero:
        assert turned(plan.graph)
    run, plain = run_plan(TINY_GPT, plan, 6), plain_loop(TINY_GPT, layout.clip_norm, 6)
    assert loss_difference(run.losses, plain) < 1e-5
    assert weight_difference(run.weights, plain) < 1e-3
