"""share_weights: gathers of weights that move no byte, since the ranks of the group share memory.

ZeRO gathers a weight from shards that the ranks update.  Where they share memory, the shards lie
side by side in it: each rank updates its own, all read the whole, and a weight is on a host once.
What is left of the gather: a rank announces that its shard is written, and waits for the others.

A rank must not write its shard while another still reads the whole.  It does not, where whatever
reads the whole comes before a collective of the same group that comes before the update, as the sum
of the weight's gradients does: no rank leaves a collective that another has not come to.  A gather
of which the plan does not show that copies, as between hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flowrun.engine.actors.plan import Actor, BoxWork, Plan, RegionWork
from flowrun.engine.boxing.boxing import ALL_GATHER, replace_axis
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import B, NdSbp, Split
from flowrun.engine.lowering.add_regions import is_communication
from flowrun.engine.lowering.reuse_buffers import find_ancestors
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy


def share_weights(plan: Plan, strategy: Strategy) -> Plan:
    """Mark the gathers that move no byte, if all ranks share memory (a pass)."""
    if not (strategy.shared_memory and strategy.shares_weights):
        return plan
    grids = [placement.shape for placement in plan.placements]
    return replace(plan, actors=tuple(mark_shared_gathers(plan.actors, plan.graph, grids)))


def mark_shared_gathers(
    actors: Sequence[Actor], graph: LogicalGraph, grids: Sequence[tuple[int, ...]]
) -> list[Actor]:
    """Return the actors of `graph`'s plan with `one_copy` set for such gathers; all ranks share
    memory.
    """
    order = _ActOrder(actors)
    updates = {
        variable: k
        for k, actor in enumerate(actors)
        if isinstance(actor.work, RegionWork)
        for variable, _ in actor.work.updates
    }
    gathers = {
        k: actor.work
        for k, actor in enumerate(actors)
        if isinstance(actor.work, BoxWork) and actor.work.step.kind == ALL_GATHER
    }
    axes: dict[str, set[int]] = {}  # variable -> those that it is gathered over
    for work in gathers.values():
        for move in work.moves:
            axes.setdefault(move.read, set()).add(work.step.axis)
    homes = {v.tensor: v.nd_sbp for v in graph.variables}

    def lies_once(k: int, work: BoxWork) -> bool:
        grid = grids[actors[k].stage]
        return all(
            move.read in homes
            and len(axes[move.read]) == 1
            and _are_one_stretch(move.shape, homes[move.read], step.axis, grid)
            and (
                move.read not in updates
                or order.are_read_before(k, _possible_views(graph, move.made), updates[move.read])
            )
            for step, move in zip(work.steps, work.moves, strict=True)
        )

    shared = {k for k, work in gathers.items() if lies_once(k, work)}
    return [
        replace(actor, work=replace(gathers[k], one_copy=True)) if k in shared else actor
        for k, actor in enumerate(actors)
    ]


def _are_one_stretch(shape: Sequence[int], nd_sbp: NdSbp, axis: int, grid: tuple[int, ...]) -> bool:
    """True if what the ranks of an axis hold are pieces of one stretch of memory."""
    split = nd_sbp[axis]
    assert isinstance(split, Split), "it is gathered"
    whole = largest_shape(tuple(shape), replace_axis(nd_sbp, axis, B), grid)
    return math.prod(whole[: split.dim]) == 1


def _possible_views(graph: LogicalGraph, name: str) -> set[str]:
    views, left = {name}, [name]
    while left:
        for op in graph.consumers.get(left.pop(), ()):
            if not has(op.target, Trait.ALLOCATES) and not is_communication(op):
                new = set(op.makes) - views
                views |= new
                left += new
    return views


class _ActOrder:
    """The order of actors that holds on every rank, whatever the timing, within a step: one comes
    before another if what it makes is read on the way there.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._actors = actors
        maker = {name: k for k, actor in enumerate(actors) for name in actor.makes}
        makers: dict[int, set[int]] = {k: set() for k in range(len(actors))}
        self._readers: dict[str, list[int]] = {}
        for k, actor in enumerate(actors):
            for name in actor.reads:
                self._readers.setdefault(name, []).append(k)
                if name in maker and _waits_for_all(actor, actors[maker[name]], name):
                    makers[k].add(maker[name])
        self._before = find_ancestors(makers)

    def are_read_before(self, gather: int, names: Iterable[str], update: int) -> bool:
        """Return whether each reader of the tensors `names` precedes a collective of the group of
        `gather`, and that collective precedes `update`.
        """
        group = self._group(gather)
        met = 0  # a bit for each that comes before such a collective
        for k in range(len(self._actors)):
            if self._group(k) == group and k != gather and self._before[update] >> k & 1:
                met |= self._before[k]
        return all(met >> k & 1 for name in names for k in self._readers.get(name, ()))

    def _group(self, k: int) -> tuple[int, int] | None:
        actor = self._actors[k]
        return (actor.stage, actor.work.step.axis) if isinstance(actor.work, BoxWork) else None


def _waits_for_all(reader: Actor, maker: Actor, name: str) -> bool:
    """True if all acts of the maker, of a step or up to a micro-batch, come before the reader's;
    not where an actor of steps reads what another makes with each micro-batch.
    """
    return not reader.per_step or maker.per_step or name in maker.sums
