"""count_targets: what a mean over targets is divided by is counted where they are read.

Torch counts the targets where it makes their losses.  Of a split batch the count is a partial sum,
for whose all-reduce backward waits: in mid-step, for whichever rank is last to make its logits.
Targets alone are needed for it, so an op of its own makes it, and its all-reduce ends long before.
Where a step has several micro-batches, count_step.py has done so for all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flowrun.engine.ir.graph import LogicalGraph, Op, Ref
from flowrun.engine.ir.sbp import Partial
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import COUNT
from flowrun.engine.strategy import Strategy


def count_targets(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Counts that are partial sums, by flow.target_weight.

    Signatures are chosen before: were the count of targets that all ranks have free already then,
    inference would split the samples of a loss where nothing else splits them.
    """
    split = {
        op.makes[1]: op
        for op in graph.ops
        if op.target == cross_entropy.FORWARD and len(op.makes) == 2
        if any(isinstance(sbp, Partial) for sbp in op.out_sbp[1])
    }
    counted = {op.name for op in split.values()}
    ops = [new for op in graph.ops for new in (_apart(graph, op) if op.name in counted else [op])]
    losses = {
        _of_logits(op): op
        for op in graph.ops
        if op.target == cross_entropy.FORWARD and (op.name in counted or op.outputs[1] is None)
    }
    return replace(graph, ops=tuple(_behind(op, losses) for op in ops))


def _apart(graph: LogicalGraph, op: Op) -> Iterator[Op]:
    """The count, and the loss without it."""
    given, (loss, count) = cross_entropy.given(op), op.makes
    args = (given["target"], given["weight"], given["ignored"])
    laid = dict(zip(op.inputs, op.in_sbp, strict=True))
    yield replace(
        op,
        name=f"{op.name}_count",
        target=COUNT,
        args=args,
        kwargs=(("dtype", graph.tensors[count].dtype),),
        outputs=(count,),
        in_sbp=tuple(laid[arg.name] for arg in args if isinstance(arg, Ref)),
        out_sbp=op.out_sbp[1:],
    )
    yield replace(op, outputs=(loss, None))


def _of_logits(op: Op) -> tuple[Any, ...]:
    """The logits, and what is kept of their rows, of a loss or of its gradient."""
    given = cross_entropy.given(op)
    return given["x"], given["lse"]


def _behind(op: Op, losses: Mapping[tuple[Any, ...], Op]) -> Op:
    """The gradient of a mean, made when the loss is there: no count comes from it any more."""
    mean = op.target == cross_entropy.BACKWARD and cross_entropy.given(op)["total"] is not None
    forward = losses.get(_of_logits(op)) if mean else None
    if forward is None:
        return op
    args = (*op.args[:-1], Ref(forward.makes[0]))
    return replace(op, args=args, in_sbp=(*op.in_sbp, forward.out_sbp[0]))
