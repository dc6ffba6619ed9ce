"""tile: Plan -> Plan.  Which ops of a region that follow one another run some rows at a time.

Each passes over tensors too large for the cache, one behind the other: logits are cast, made
probabilities, and their gradient is filled with zeros, subtracted from and cast back.  Where every
row is made of the same row of what is read (ops/rowwise.py), the ops can do all their work on a few
rows before they go on to the next: what one hands to another stays in the cache, and is never there
as a whole.  So does one op by itself that makes such a tensor on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.hardware.hardware import CPU, Hardware
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.placement import Shape, largest_shape
from flowrun.engine.ops.rowwise import WIDE, RowCount, rows_of
from flowrun.engine.ops.traits import is_view

LEAST_BYTES = 1 << 22  # of what one op hands to another: the cache of a core holds less


def tile(plan: Plan, hardware: Hardware) -> Plan:
    """Fills `tiles` of every region, and takes off it the time of what is not moved any more.

    Only on a CPU: rows enough to fill all of a GPU's cores do not fit in the cache that they share.
    """
    if hardware.device != CPU:
        return plan
    return replace(plan, actors=tuple(_tiled(plan, a, hardware) for a in plan.actors))


def rows_on_a_rank(plan: Plan, op: Op) -> RowCount | None:
    """What the op makes row by row on the rank with the largest shards."""
    if len(op.makes) != 1 or len(op.outputs) != 1:
        return None
    grid, tensors = plan.placements[op.stage].shape, plan.graph.tensors
    read = [
        largest_shape(tensors[name].shape, nd_sbp, grid)
        for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True)
    ]
    return rows_of(op, read, _made(plan, op))


def _made(plan: Plan, op: Op) -> Shape:
    shape = plan.graph.tensors[op.makes[0]].shape
    return largest_shape(shape, op.out_sbp[0], plan.placements[op.stage].shape)


def _tiled(plan: Plan, actor: Actor, hardware: Hardware) -> Actor:
    work = actor.work
    if not isinstance(work, RegionWork):
        return actor
    ops: list[Op] = []
    tiles: list[tuple[int, int]] = []
    moved = 0
    left: Sequence[Op] = work.ops
    while left:
        between, run = _run(plan, left)
        run = _to_itself(run, work)
        handed = _handed_bytes(plan, run)
        if max((*handed.values(), *_inner_bytes(plan, run)), default=0) < LEAST_BYTES:
            between, run = [], left[:1]
        else:
            tiles.append((len(ops) + len(between), len(ops) + len(between) + len(run)))
            shown = work.shown(run)  # written, and not read; what is not is neither
            if not any(op.target in hardware.ops for op in run):  # they were timed in their tile
                moved += sum(n * (1 if name in shown else 2) for name, n in handed.items())
        ops += (*between, *run)
        gone = {op.name for op in (*between, *run)}
        left = [op for op in left if op.name not in gone]
    work = replace(work, ops=tuple(ops), tiles=tuple(tiles))
    return replace(actor, work=work, seconds=actor.seconds - moved / hardware.memory_bytes_per_s)


def _run(plan: Plan, ops: Sequence[Op]) -> tuple[Sequence[Op], Sequence[Op]]:
    """(views between that need nothing of it, the ops from the first on that go row by row)."""
    between: list[Op] = []
    run: list[Op] = []
    made: set[str] = set()
    count = 0
    for op in ops:
        read = made.intersection(op.inputs)
        if run and is_view(op.target) and not read:
            between.append(op)
            continue
        rows = rows_on_a_rank(plan, op) if run or not is_view(op.target) else None
        if rows is None or (run and not (rows.count == count and read and read <= rows.cut)):
            break
        run.append(op)
        made.update(op.makes)
        count = rows.count
    return between, run


def _to_itself(run: Sequence[Op], work: RegionWork) -> Sequence[Op]:
    """The run without its end, from a view on that is for others: what is made is made once."""
    for k, op in enumerate(run):
        if is_view(op.target) and set(op.makes) & {*work.shown(run)}:
            return _to_itself(run[:k], work)
    return run if len(run) > 1 or any(op.target in WIDE for op in run) else ()


def _handed_bytes(plan: Plan, run: Iterable[Op]) -> dict[str, int]:
    """What one op of a run makes and another reads."""
    read = {name for op in run for name in op.inputs}
    return {
        name: math.prod(_made(plan, op)) * plan.graph.tensors[name].dtype.itemsize
        for op in run
        for name in op.makes
        if name in read and not is_view(op.target)
    }


def _inner_bytes(plan: Plan, run: Iterable[Op]) -> Iterator[int]:
    """What ops make on the way: as much as the largest that they read or make, in fp32."""
    grid = plan.placements
    for op in (op for op in run if op.target in WIDE):
        named = (*zip(op.inputs, op.in_sbp, strict=True), *zip(op.outputs, op.out_sbp, strict=True))
        yield 4 * max(
            math.prod(largest_shape(plan.graph.tensors[name].shape, nd_sbp, grid[op.stage].shape))
            for name, nd_sbp in named
            if name is not None
        )
