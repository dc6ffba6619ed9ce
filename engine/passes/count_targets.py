"""count_targets: the targets that a mean divides by are counted as soon as they are read.

Torch counts the targets where it makes their losses.  If the batch is split, the count is a partial
sum, and backward waits for its all-reduce in the middle of the step, until the last rank has made
its logits.  The count needs only the targets.  So an op of its own makes it, and its all-reduce
ends long before.  For steps of several micro-batches count_step.py has already done so for all of
them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref
from flowrun.engine.ir.sbp import Partial
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import COUNT
from flowrun.engine.strategy import Strategy


def count_targets(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Make counts that are partial sums by flow.target_weight.

    It runs after signatures are chosen.  If it ran before, inference would see a count that all
    ranks have for free, and would split the samples of a loss where nothing else splits them.
    """
    split = {
        op.makes[1]: op
        for op in graph.ops
        if op.target == cross_entropy.FORWARD and len(op.makes) == 2
        if any(isinstance(sbp, Partial) for sbp in op.out_sbp[1])
    }
    counted = {op.name for op in split.values()}
    ops = [
        new
        for op in graph.ops
        for new in (_split_off_count(graph, op) if op.name in counted else [op])
    ]
    losses = {
        _logits_of(op): op
        for op in graph.ops
        if op.target == cross_entropy.FORWARD and (op.name in counted or op.outputs[1] is None)
    }
    return replace(graph, ops=tuple(_wait_for_loss(op, losses) for op in ops))


def _split_off_count(graph: LogicalGraph, op: Op) -> tuple[Op, Op]:
    given, laid = cross_entropy.given(op), dict(zip(op.inputs, op.in_sbp, strict=True))
    args = (given["target"], given["weight"], given["ignored"])
    count, loss = split_off_count(graph, op, args)
    read = tuple(laid[arg.name] for arg in args if isinstance(arg, Ref))
    return replace(count, in_sbp=read, out_sbp=op.out_sbp[1:]), loss


def split_off_count(graph: LogicalGraph, op: Op, args: tuple[object, ...]) -> tuple[Op, Op]:
    """Return an op that counts the weight of a loss's targets, and the loss without its count.

    args: target, weight, ignored.
    """
    loss, count = op.outputs
    assert count is not None
    return replace(
        op,
        name=f"{op.name}_count",
        target=COUNT,
        table=None,
        args=args,
        kwargs=(("dtype", graph.tensors[count].dtype),),
        outputs=(count,),
    ), replace(op, outputs=(loss, None))


def _logits_of(op: Op) -> tuple[object, ...]:
    """Return the logits, and the logsumexp of their rows, that a loss or its gradient reads."""
    given = cross_entropy.given(op)
    return given["x"], given["lse"]


def _wait_for_loss(op: Op, losses: Mapping[tuple[object, ...], Op]) -> Op:
    """Let the gradient of a mean read the loss, so that it still runs after it: the count came
    from it.
    """
    mean = op.target == cross_entropy.BACKWARD and cross_entropy.given(op)["total"] is not None
    forward = losses.get(_logits_of(op)) if mean else None
    if forward is None:
        return op
    args = (*op.args[:-1], Ref(forward.makes[0]))
    return replace(op, args=args, in_sbp=(*op.in_sbp, forward.out_sbp[0]))
