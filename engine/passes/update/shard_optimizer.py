"""shard_optimizer: ZeRO by SBP alone (ZeRO, Rajbhandari et al. 2020; OneFlow, section 6).

A parameter that is B along the ZeRO axis moves its home, with its optimizer states, to S(i) on that
axis.  All else follows: the gradient boxes P -> S, the update runs on the shard, readers of the
weight box S -> B.

    stage 1   the accumulated gradient stays P: a reduce-scatter and a gather of the weight a step
    stage 2   the accumulator is S: the gradient is reduce-scattered with each micro-batch
    stage 3   forward and backward each gather the weight with each micro-batch; frozen weights too,
              which have neither state nor gradient

i is the first dim that divides evenly and that no other axis splits.  A parameter without such a
dim, or a small one, stays B, and a note says so.  A table that is updated by rows stays too: each
step would have to gather the whole table; a pin splits it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from flowrun.engine.boxing.boxing import replace_axis
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Variable, gradient_of
from flowrun.engine.ir.sbp import Broadcast, NdSbp, S, Split
from flowrun.engine.ops.flow.update import ACCUMULATE
from flowrun.engine.passes.update.sparse_ops import sparse_tables
from flowrun.engine.strategy import Strategy


def shard_optimizer(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Move the homes of parameters and states on the ZeRO axis, and of accumulators from stage 2
    on.
    """
    if not strategy.zero.axis or strategy.zero.stage == 0:
        return graph
    axis = strategy.axes.index(strategy.zero.axis)
    moved = _new_homes(graph, axis, strategy)
    homes = {v.name: home for v, home in moved.items() if home is not None}
    kept = [v.name for v, home in moved.items() if home is None]
    variables = tuple(
        replace(v, nd_sbp=homes.get(graph.lives_with[v.name], v.nd_sbp)) for v in graph.variables
    )
    ops = graph.ops
    if strategy.zero.stage >= 2:
        of_tensors = {v.tensor: home for v, home in moved.items() if home is not None}
        ops = tuple(_shard_accumulator(op, of_tensors, axis) for op in ops)
    note = f"ZeRO {strategy.zero.stage} on {strategy.zero.axis}: " + _describe(
        homes, kept, sparse_tables(graph)
    )
    return replace(graph, ops=ops, variables=variables, notes=(*graph.notes, note))


def _describe(homes: Collection[str], kept: Sequence[str], tables: Collection[str]) -> str:
    note = f"{len(homes)} parameters sharded"
    if kept:
        names = ", ".join(kept[:4]) + (" …" if len(kept) > 4 else "")
        note += f", {len(kept)} stay B (small, or no dim divides): {names}"
    if tables:
        note += f", {len(tables)} tables are not sharded because they are updated by rows"
    return note


def _new_homes(graph: LogicalGraph, axis: int, strategy: Strategy) -> dict[Variable, NdSbp | None]:
    """Return the home of each weight that ZeRO shards; None if it stays B."""
    tables = sparse_tables(graph)
    return {
        v: _shard(v, graph.tensors[v.tensor], axis, strategy)
        for v in graph.variables
        if v.kind == "parameter"
        and v.tensor not in tables
        and (v.new is not None or strategy.zero.stage >= 3)
    }


def _shard(
    variable: Variable, tensor: LogicalTensor, axis: int, strategy: Strategy
) -> NdSbp | None:
    grid = strategy.placements[variable.stage].shape
    if grid[axis] == 1 or not isinstance(variable.nd_sbp[axis], Broadcast):
        return None
    if tensor.num_elements < strategy.zero.min_size:
        return None
    taken = {sbp.dim for sbp in variable.nd_sbp if isinstance(sbp, Split)}
    for dim, size in enumerate(tensor.shape):
        if dim not in taken and size % grid[axis] == 0:
            return replace_axis(variable.nd_sbp, axis, S(dim))
    return None


def _shard_accumulator(op: Op, homes: dict[str, NdSbp], axis: int) -> Op:
    output = op.outputs[0] if op.outputs else None
    home = homes.get(gradient_of(output or ""))
    if op.target != ACCUMULATE or home is None:
        return op
    nd_sbp = replace_axis(op.in_sbp[0], axis, home[axis])
    return replace(op, in_sbp=(nd_sbp,), out_sbp=(nd_sbp,))
