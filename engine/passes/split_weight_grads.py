"""split_weight_grads: ops that only the weights of their own block wait for get phase weight_grad.

Their region may then run late, in the bubbles of a pipeline (zero bubble, Qi et al. 2023, ZB-H1) or
during an all-reduce.  With 1F1B and GPipe they stay in backward, as in those schedules.  All of
backward ends in accumulators; an op is late only if it reaches them without leaving its block of
the model.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.actors.schedules import schedule_of
from flowrun.engine.ir.graph import BACKWARD, WEIGHT_GRAD, LogicalGraph, Op
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.shapes.create import FULL
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy


def split_weight_grads(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Give phase weight_grad to backward ops whose readers are all accumulators or of that
    phase.
    """
    if strategy.num_stages == 1 or schedule_of(strategy).joined:
        return graph
    late: set[str] = set()
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.phase == BACKWARD and op.module and op.target != FULL:
            readers = [reader for name in op.makes for reader in graph.consumers.get(name, ())]
            unit = unit_of(op.module)
            if readers and all(
                has(r.target, Trait.SUM) or (r.name in late and unit_of(r.module) == unit)
                for r in readers
            ):
                late.add(op.name)
                op = replace(op, phase=WEIGHT_GRAD)
        ops.append(op)
    ops.reverse()
    return replace(graph, ops=tuple(_follow(ops)))


def _follow(ops: list[Op]) -> list[Op]:
    """Move each accumulator to the phase of the op that makes its input."""
    phase_of = {name: op.phase for op in ops for name in op.makes}
    return [
        replace(op, phase=WEIGHT_GRAD)
        if has(op.target, Trait.SUM) and phase_of.get(op.inputs[0]) == WEIGHT_GRAD
        else op
        for op in ops
    ]
