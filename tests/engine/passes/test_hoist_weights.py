from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.ir import graph as logical
from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    WEIGHTS,
    Feed,
    LogicalGraph,
    Op,
    Variable,
)
from flowrun.engine.ir.sbp import B, NdSbp, P, S, Sbp
from flowrun.engine.passes.hoist_weights import hoist_weights
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.strategy import Strategy, Zero
from support.plans.graph_text import one_axis, one_op, rewritten, through

F32, BF16 = torch.float32, torch.bfloat16


def summed(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return output.sum()


def linear() -> LogicalGraph:
    """One layer without bias, weight (8, 4), under autocast to bf16."""
    module = nn.Sequential(nn.Linear(4, 8, bias=False))
    return capture(Task(module, {"input": "x"}, summed, autocast=BF16), {"x": torch.ones(4, 4)})


def zero(stage: int) -> Strategy:
    """Two ranks of data parallelism, two micro-batches."""
    return one_axis("data", zero=Zero("data", stage, 1), micro_batches=2)


# what a weight of 32 elements and its gradient cost, of 2 ranks


# ---- chains, by hand -----------------------------------------------------------------------------


def op(name: str, target: str, read: str, ins: Sbp, out: Sbp, phase: str, *args: Any) -> Op:
    """An op of one input on one axis."""
    return one_op(name, target, read, *args, phase=phase, ins=[ins], out=out)


def by_hand(home: Sbp, *ops: Op) -> LogicalGraph:
    """A weight %w (4, 4) and what is made of it."""
    nd_sbp: NdSbp = (home,)
    names = ("w", "x", *(o.name for o in ops))
    tensors = {name: logical.LogicalTensor(name, (4, 4), F32) for name in names}
    return LogicalGraph(ops, tensors, (Variable("w", "w", "parameter", nd_sbp=nd_sbp),))


def use(name: str, read: str, sbp: Sbp, phase: str) -> Op:
    return one_op(name, "aten.mul.Tensor", read, "x", phase=phase, ins=[sbp, sbp], out=sbp)


def phases(graph: LogicalGraph) -> dict[str, str]:
    return {op.name: op.phase for op in graph.ops}


def test_a_chain_on_a_weight_is_hoisted_and_its_reader_is_not() -> None:
    graph = by_hand(
        B,
        op("n", "aten.abs.default", "w", B, B, FORWARD),
        op("e", "aten.exp.default", "n", B, B, BACKWARD),
        use("y", "e", B, BACKWARD),
    )
    actual = phases(hoist_weights(graph, one_axis("x")))
    assert actual == {"n": WEIGHTS, "e": WEIGHTS, "y": BACKWARD}


def test_a_view_stays_with_its_reader_and_asks_its_layout_of_the_weight() -> None:
    """The boxing before the view is done once a step; after it, with each micro-batch."""
    graph = by_hand(
        S(0),
        op("t", "aten.t.default", "w", S(0), S(1), FORWARD),
        use("y", "t", B, FORWARD),
        use("z", "t", S(1), FORWARD),
    )
    graph = replace(graph, feeds=(Feed("x", "x", nd_sbp=(B,)),))
    actual = insert_boxing(hoist_weights(graph, one_axis("x")), one_axis("x"))
    assert [(o.name, o.inputs, o.phase) for o in actual.ops] == [
        ("t", ("w",), FORWARD),
        ("w:B", ("w",), WEIGHTS),
        ("t~B", ("w:B",), FORWARD),
        ("y", ("t~B", "x"), FORWARD),
        ("x:S(1)", ("x",), FORWARD),
        ("z", ("t", "x:S(1)"), FORWARD),
    ]


def test_a_view_that_a_hoisted_op_reads_is_hoisted_with_it() -> None:
    graph = by_hand(
        B,
        op("t", "aten.t.default", "w", B, B, FORWARD),
        op("n", "aten.abs.default", "t", B, B, FORWARD),
        use("y", "t", B, BACKWARD),
    )
    actual = hoist_weights(graph, one_axis("x"))
    assert phases(actual) == {"t": FORWARD, "t~B/weights": WEIGHTS, "n": WEIGHTS, "y": BACKWARD}
    alone = hoist_weights(replace(graph, ops=graph.ops[:2]), one_axis("x"))
    assert set(phases(alone).values()) == {WEIGHTS}


def test_ops_of_the_update_stay_there() -> None:
    graph = by_hand(B, op("decayed", "aten.mul.Tensor", "w", B, B, UPDATE, 0.9))
    assert phases(hoist_weights(graph, one_axis("x"))) == {"decayed": UPDATE}


def test_what_has_no_row_at_home_is_made_of_the_whole_weight() -> None:
    """A norm over the split dim: the weight is gathered, once a step."""
    softmax = op("p", "aten._softmax.default", "w", B, B, FORWARD, 0, False)
    graph = hoist_weights(by_hand(S(0), softmax), one_axis("x", zero=Zero("x", 3, 1)))
    actual = insert_boxing(graph, one_axis("x", zero=Zero("x", 3, 1)))
    assert [(o.name, o.phase) for o in actual.ops] == [("w:B", WEIGHTS), ("p", WEIGHTS)]


def test_a_partial_gradient_that_is_accumulated_whole_is_cast_before_it_is_reduced() -> None:
    graph = rewritten(through(hoist_weights), zero(1), linear())
    (total,) = (o for o in graph.ops if o.target == "flow.accumulate" and o.phase == BACKWARD)
    cast = graph.producer[total.inputs[0]]
    assert (cast.in_sbp, cast.out_sbp) == (((P,),), ((P,),))
