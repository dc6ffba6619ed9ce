"""Crossing: a boxing from one grid of ranks to another, as between stages.

It has three parts (`transfer_sbps`): a path on the source grid that leaves no partial values,
slices that cross point to point (`route`), and a path on the target grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from flowrun.engine.boxing.boxing import (
    fits,
    misfit,
    path,
    path_tensors,
    replicas,
    sbps_without_partial,
)
from flowrun.engine.ir.placement import Placement, Shape, Slices
from flowrun.engine.ir.sbp import B, NdSbp, Partial, Sbp, Split


@dataclass(frozen=True, slots=True)
class Send:
    """A slice of the logical tensor that goes from rank to rank; source == target: a local copy.

    region: (start, length) along every dim, in logical coordinates.
    """

    source: int
    target: int
    region: Slices

    @property
    def num_elements(self) -> int:
        """The number of elements in the slice."""
        return _volume(self.region)

    def __str__(self) -> str:
        cut = ", ".join(f"{start}:{start + length}" for start, length in self.region)
        return f"{self.source} -> {self.target} [{cut}]"


@lru_cache(maxsize=65536)
def transfer_sbps(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
    far: bool = False,
) -> tuple[NdSbp, NdSbp]:
    """Return (the nd-SBP that leaves the source grid, that which arrives on the target grid), no P.

    source_placement, source: grid and nd-SBP of the tensor.  target_placement, target: those that
    its reader needs.  shape: logical.  far: the link between the grids is slower than those inside
    them.  The choice moves the fewest bytes in all (table 2, other ranks).  Among equals, each rank
    sends to its twin at the same coordinate; else the fewest bytes cross between the grids, and a
    rank gets from its own grid what it can.  If `far`, twins do not count: ranks that need the same
    data each receive a piece and gather (arXiv 2104.04473, section 4.1).  Raises SbpError if the
    tensor does not fit.
    """
    sent = _choose_sent_sbp(source_placement.shape, source, target, shape)
    order: dict[NdSbp, tuple[Fraction, bool, Fraction, int]] = {}
    for received in _list_received_sbps(target_placement.shape, target, shape):
        crossing = crossing_tensors(source_placement, sent, target_placement, received, shape)
        total = crossing + path_tensors(received, target, target_placement.shape, shape)
        equal = received == sent == target
        twins = not far and equal and source_placement.shape == target_placement.shape
        foreign = sum(sbp not in sent for sbp in received)
        order[received] = (total, not twins, crossing, foreign)
    if not order:
        raise misfit(target, target_placement.shape, shape)
    return sent, min(order, key=order.__getitem__)


def route(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
) -> tuple[Send, ...]:
    """Return the slices that ranks send, such that each target rank gets each of its elements once.

    source_placement, source: grid and nd-SBP of the sent tensor.  target_placement, target: those
    of the received one.  Neither has a P on an axis of more than one rank.  shape: logical.  A rank
    that holds a slice itself keeps it; else the nearest holder sends it while its load is fair;
    else the least loaded holder.
    """
    held = slices_of_ranks(source_placement, source, shape)
    holders: dict[Slices, list[int]] = {}
    for k, region in enumerate(held.values()):
        holders.setdefault(region, []).append(k)
    ranks, num_targets = source_placement.ranks, len(target_placement.ranks)
    fair = math.prod(shape) * replicas(target, target_placement.shape) / len(ranks)
    load = [0] * len(ranks)
    sends = []
    for k, (rank, wanted) in enumerate(slices_of_ranks(target_placement, target, shape).items()):
        nearest = k * len(ranks) // num_targets
        for region, indices in holders.items():
            if (part := overlap(region, wanted)) is None:
                continue
            if held.get(rank) == region:
                sends.append(Send(rank, rank, part))
                continue
            sender = _sender(indices, nearest, load, fair - _volume(part))
            load[sender] += _volume(part)
            sends.append(Send(ranks[sender], rank, part))
    return tuple(sends)


def _sender(indices: list[int], nearest: int, load: list[int], most: float) -> int:
    """Return the nearest source whose load is at most `most` (or 0), else the least loaded."""
    by_distance = sorted(indices, key=lambda index: abs(index - nearest))
    fair = (index for index in by_distance if load[index] <= max(most, 0))
    return next(fair, min(by_distance, key=load.__getitem__))


def _choose_sent_sbp(grid: tuple[int, ...], source: NdSbp, target: NdSbp, shape: Shape) -> NdSbp:
    """Return the nd-SBP without P that costs least to reach; among equals, one split as target."""
    choices = [
        sbps_without_partial(shape)
        if isinstance(sbp, Partial) and parts > 1
        else (_without_partial(sbp),)
        for sbp, parts in zip(source, grid, strict=True)
    ]
    order: dict[NdSbp, tuple[Fraction, int, int]] = {}
    for state in itertools.product(*choices):
        if state == source:
            return state
        if fits(state, grid, shape):
            foreign = sum(sbp not in target for sbp in state)
            steps = len(path(source, state, grid, shape))
            order[state] = (path_tensors(source, state, grid, shape), foreign, steps)
    if not order:
        raise misfit(source, grid, shape)
    return min(order, key=order.__getitem__)


def _list_received_sbps(grid: tuple[int, ...], target: NdSbp, shape: Shape) -> Iterator[NdSbp]:
    """Yield nd-SBPs without P from which a path leads to the target: B and P may be pieces."""
    choices = [
        (_without_partial(sbp),)
        if isinstance(sbp, Split) or parts == 1
        else sbps_without_partial(shape)
        for sbp, parts in zip(target, grid, strict=True)
    ]
    for state in itertools.product(*choices):
        if state == target or fits(state, grid, shape):
            yield state


def _without_partial(sbp: Sbp) -> Sbp:
    """Return B for P: on an axis of size 1 they are the same."""
    return B if isinstance(sbp, Partial) else sbp


def crossing_tensors(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
) -> Fraction:
    """Return how often the tensor crosses between the grids; a rank of both keeps what it has."""
    if set(source_placement.ranks).isdisjoint(target_placement.ranks):
        return Fraction(replicas(target, target_placement.shape))
    sends = route(source_placement, source, target_placement, target, shape)
    crossing = sum(send.num_elements for send in sends if send.source != send.target)
    return Fraction(crossing, max(1, math.prod(shape)))


def slices_of_ranks(placement: Placement, nd_sbp: NdSbp, shape: Shape) -> dict[int, Slices]:
    """Return rank -> the slices that it holds of a logical tensor of `shape`."""
    return {rank: placement.slices(rank, shape, nd_sbp) for rank in placement.ranks}


def overlap(one: Slices, other: Slices) -> Slices | None:
    """Return what two regions have in common; None if that is nothing."""
    region = []
    for (start, length), (start2, length2) in zip(one, other, strict=True):
        low, high = max(start, start2), min(start + length, start2 + length2)
        if low >= high:
            return None
        region.append((low, high - low))
    return tuple(region)


def _volume(region: Slices) -> int:
    return math.prod(length for _, length in region)
