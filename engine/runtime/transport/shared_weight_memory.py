"""Side by side: the weights that ranks of one host hold in pieces and read whole, in one memory
(engine/lowering/share_weights.py says which).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from flowrun.engine.actors.plan import BoxWork, Plan
from flowrun.engine.runtime.transport.arena import ArenaPiece
from flowrun.engine.runtime.transport.transport import GroupLayout, bucket_layout

# (ranks of a group, the one of them in whose memory it is to lie, bytes) -> memory for all of them;
# None if they share none
Share = Callable[[tuple[int, ...], int, int], ArenaPiece | None]


class Weight(NamedTuple):
    """A variable as one rank has it.  piece: what it holds, a part of the whole.  axis: of the
    placement, along which the pieces lie.
    """

    axis: int
    whole: torch.Tensor
    piece: torch.Tensor


def side_by_side(plan: Plan, rank: int, share: Share) -> dict[str, Weight]:
    """Return memory for the variables of the plan that the rank's host holds once; nothing is
    written there.

    All ranks of a group ask `share` for theirs in one order.
    """
    placement = plan.placements[plan.stage_of(rank)]
    coordinate = placement.coordinate(rank)
    lying = _lying(plan, rank)
    # the largest first: the members of a group, which all count alike, shall have as much each
    sizes = {name: math.prod(layout.shape) for name, (layout, _) in lying.items()}
    held: Counter[tuple[tuple[int, ...], int]] = Counter()  # (group, member) -> bytes
    weights: dict[str, Weight] = {}
    for name in sorted(lying, key=lambda name: -sizes[name]):
        (layout, axis), dtype = lying[name], plan.tensors[name].dtype
        group = placement.group(rank, axis)
        owner = min((held[group, member], member) for member in group)[1]
        held[group, owner] += sizes[name] * dtype.itemsize
        memory = share(group, owner, sizes[name] * dtype.itemsize)
        if memory is not None:
            index = coordinate[axis]
            before = sum(math.prod(layout.before(k)) for k in range(index))
            weights[name] = Weight(
                axis,
                _view(memory, 0, layout.shape, dtype),
                _view(memory, before, layout.before(index), dtype),
            )
    return weights


def wholes(plan: Plan, there: Mapping[str, Weight]) -> dict[int, list[torch.Tensor]]:
    """Return the whole weights that each gather makes if its variables lie so, by actor."""
    return {
        actor.id: [there[move.read].whole for move in actor.work.moves]
        for actor in plan.actors
        if isinstance(actor.work, BoxWork) and actor.work.one_copy
        if all(
            move.read in there and there[move.read].axis == actor.work.step.axis
            for move in actor.work.moves
        )
    }


def _lying(plan: Plan, rank: int) -> dict[str, tuple[GroupLayout, int]]:
    """Variables of a rank's stage to lie so: how, and over which axis."""
    stage = plan.stage_of(rank)
    placement, coordinate = plan.placements[stage], plan.placements[stage].coordinate(rank)
    layouts_of: dict[str, tuple[GroupLayout, int]] = {}
    for actor in plan.stage_actors(stage):
        if isinstance(actor.work, BoxWork) and actor.work.one_copy:
            layouts = bucket_layout(actor.work, placement.shape, coordinate).each
            for step, move, layout in zip(actor.work.steps, actor.work.moves, layouts, strict=True):
                layouts_of[move.read] = layout, step.axis
    return layouts_of


def _view(
    memory: ArenaPiece, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """start: in elements."""
    return memory.tensor(start * dtype.itemsize, math.prod(shape), dtype).view(shape)
