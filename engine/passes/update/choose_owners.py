"""choose_owners: which rank updates a matrix that is needed whole (Muon), once for all ranks.

An update that multiplies matrices cannot be divided by rows: each of its ops may run on the one
rank that owns the matrix (`Op.owner`, ir/sbp.py's O), and its products must.  The layout then says
where the matrix travels to its owner and back, as it does of any op: elementwise ops before and
after stay at the weight's home, so states are split as ZeRO and tensor parallelism split them.

The owners of a stage are all its ranks, balanced by foreseen seconds, then by bytes in each block,
whose matrices travel together: the longest update goes to the rank with the least so far (Graham
1969).  The first rank has the most, which costs and memory then count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.ir.graph import UPDATE, LogicalGraph, Op
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.ops.flow.update import ASSIGN
from flowrun.engine.ops.registry import needs_whole
from flowrun.engine.strategy import Strategy


def choose_owners(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Give the ops of each such update their owner, and say in a note how even that is (a pass)."""
    owners: dict[str, int] = {}
    notes = list(graph.notes)
    for stage, placement in enumerate(strategy.placements):
        updates = _updates(graph, stage)
        ranks = len(placement.ranks)
        if ranks == 1 or not updates:
            continue
        chosen, seconds = _balance(updates, graph, strategy, ranks)
        owners |= {op.name: owner for owner, ops in zip(chosen, updates, strict=True) for op in ops}
        notes.append(
            f"each of {len(updates)} matrices is updated by one rank that owns it, of {ranks} of "
            f"stage {stage}: {min(seconds) * 1e3:.3g} to {max(seconds) * 1e3:.3g} ms a rank"
        )
    ops = tuple(replace(op, owner=owners.get(op.name)) for op in graph.ops)
    return replace(graph, ops=ops, notes=tuple(notes))


def _updates(graph: LogicalGraph, stage: int) -> list[list[Op]]:
    """Return the ops of each update of a stage that needs a whole matrix, without those that other
    updates share (rates, clipping).
    """
    of_weight: dict[str, list[Op]] = {
        op.name.removeprefix("update"): []
        for op in graph.ops
        if op.target == ASSIGN and op.phase == UPDATE and op.stage == stage
    }
    for op in graph.ops:
        kind, slash, weight = op.name.partition("/")
        if kind.startswith("update.") and slash + weight in of_weight:
            of_weight[slash + weight].append(op)
    return [ops for ops in of_weight.values() if any(map(needs_whole, ops))]


def _balance(
    updates: Sequence[Sequence[Op]], graph: LogicalGraph, strategy: Strategy, ranks: int
) -> tuple[Sequence[int], Sequence[float]]:
    """Return the owner of each update, and the seconds of each rank, the most first."""
    hardware = strategy.hardware
    each_s = [
        sum(SizedOp.whole(op, graph.tensors).seconds(hardware) for op in ops) for ops in updates
    ]
    num_bytes = [max(graph.tensors[n].num_bytes for op in ops for n in op.makes) for ops in updates]
    blocks = [unit_of(ops[0].module) for ops in updates]
    loads, held = [0.0] * ranks, Counter[tuple[int, str]]()
    owners: dict[int, int] = {}
    for k in sorted(range(len(updates)), key=lambda k: -each_s[k]):
        least = min(loads) + 1e-9  # sums in another order
        free = [rank for rank in range(ranks) if loads[rank] <= least]
        owners[k] = owner = min(free, key=lambda rank: held[rank, blocks[k]])
        loads[owner] += each_s[k]
        held[owner, blocks[k]] += num_bytes[k]
    order = sorted(range(ranks), key=lambda rank: -loads[rank])
    places = {rank: place for place, rank in enumerate(order)}
    return [places[owners[k]] for k in range(len(updates))], [loads[rank] for rank in order]
