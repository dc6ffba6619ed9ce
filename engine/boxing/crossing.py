"""Crossing: a boxing from one grid of ranks to another, as between stages.

Three parts (`transfer_sbps`): a path on the source grid that leaves no partial values, slices that
cross point to point (`route`), a path on the target grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from flowrun.engine.boxing.boxing import fits, misfit, path, path_tensors, replicas, unreduced
from flowrun.engine.ir.placement import Placement, Shape, Slices, local_slices
from flowrun.engine.ir.sbp import B, NdSbp, Partial, Sbp, Split


@dataclass(frozen=True, slots=True)
class Send:
    """A slice of the logical tensor that goes from one rank to another (or stays: a local copy).

    region: (start, length) along every dim, in logical coordinates.
    """

    source: int
    target: int
    region: Slices

    @property
    def num_elements(self) -> int:
        """Elements in the slice."""
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
    """(what the source grid is boxed to before crossing, what the target grid receives); no P.

    Least bytes in all (table 2, other ranks).  Among equals twins send to twins, else the fewest
    bytes cross between the grids: what a rank can get from its own grid it gets there.  far: the
    way between the grids is slower than those inside, so that twins count for nothing: ranks that
    want the same each receive a piece and gather (arXiv 2104.04473, section 4.1).
    """
    leaving = _leaving(source_placement.shape, source, target, shape)
    order: dict[NdSbp, tuple[Fraction, bool, Fraction, int]] = {}
    for arriving in _arriving(target_placement.shape, target, shape):
        crossing = _crossing(source_placement, leaving, target_placement, arriving, shape)
        total = crossing + path_tensors(arriving, target, target_placement.shape, shape)
        alike = arriving == leaving == target
        twins = not far and alike and source_placement.shape == target_placement.shape
        foreign = sum(sbp not in leaving for sbp in arriving)
        order[arriving] = (total, not twins, crossing, foreign)
    if not order:
        raise misfit(target, target_placement.shape, shape)
    return leaving, min(order, key=order.__getitem__)


def transfer_bytes(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
    num_bytes: float,
) -> float:
    """Bytes that cross links, over all ranks, from one grid to another, all three parts."""
    leaving, arriving = transfer_sbps(source_placement, source, target_placement, target, shape)
    tensors = (
        path_tensors(source, leaving, source_placement.shape, shape)
        + _crossing(source_placement, leaving, target_placement, arriving, shape)
        + path_tensors(arriving, target, target_placement.shape, shape)
    )
    return float(tensors * Fraction(num_bytes))


@lru_cache(maxsize=4096)
def route(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
) -> tuple[Send, ...]:
    """Which slices go where, so that each target rank gets every element of its piece once.

    Neither side holds a P (on axes of size 1 it does not matter).  A rank that holds a slice itself
    keeps it; else the nearest that holds it sends, while its share is fair; else the idlest.
    """
    held = held_by(source_placement, source, shape)
    holders: dict[Slices, list[int]] = {}
    for k, region in enumerate(held.values()):
        holders.setdefault(region, []).append(k)
    ranks, num_targets = source_placement.ranks, len(target_placement.ranks)
    fair = math.prod(shape) * replicas(target, target_placement.shape) / len(ranks)
    load = [0] * len(ranks)
    sends = []
    for k, (rank, wanted) in enumerate(held_by(target_placement, target, shape).items()):
        nearest = k * len(ranks) // num_targets
        for region, indices in holders.items():
            if (part := _overlap(region, wanted)) is None:
                continue
            if held.get(rank) == region:
                sends.append(Send(rank, rank, part))
                continue
            sender = _sender(indices, nearest, load, fair - _volume(part))
            load[sender] += _volume(part)
            sends.append(Send(ranks[sender], rank, part))
    return tuple(sends)


def _sender(indices: list[int], nearest: int, load: list[int], most: float) -> int:
    """The source nearest to a target whose load is at most `most` (or nothing), else the idlest."""
    by_distance = sorted(indices, key=lambda index: abs(index - nearest))
    fair = (index for index in by_distance if load[index] <= max(most, 0))
    return next(fair, min(by_distance, key=load.__getitem__))


def _leaving(grid: tuple[int, ...], source: NdSbp, target: NdSbp, shape: Shape) -> NdSbp:
    """The nd-SBP without P that costs least to reach; among equals, split as the target is."""
    choices = [
        unreduced(shape) if isinstance(sbp, Partial) and parts > 1 else (_settled(sbp),)
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


def _arriving(grid: tuple[int, ...], target: NdSbp, shape: Shape) -> Iterator[NdSbp]:
    """nd-SBPs without P from which the target is a path away: its B and P may come as pieces."""
    choices = [
        (_settled(sbp),) if isinstance(sbp, Split) or parts == 1 else unreduced(shape)
        for sbp, parts in zip(target, grid, strict=True)
    ]
    for state in itertools.product(*choices):
        if state == target or fits(state, grid, shape):
            yield state


def _settled(sbp: Sbp) -> Sbp:
    """On an axis of size 1, P is B."""
    return B if isinstance(sbp, Partial) else sbp


def _crossing(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
) -> Fraction:
    """How often the tensor crosses between the grids; a rank of both keeps what it holds."""
    if set(source_placement.ranks).isdisjoint(target_placement.ranks):
        return Fraction(replicas(target, target_placement.shape))
    sends = route(source_placement, source, target_placement, target, shape)
    crossing = sum(send.num_elements for send in sends if send.source != send.target)
    return Fraction(crossing, max(1, math.prod(shape)))


def held_by(placement: Placement, nd_sbp: NdSbp, shape: Shape) -> dict[int, Slices]:
    """Which slices of a logical tensor each rank of a placement holds."""
    return {
        rank: local_slices(shape, nd_sbp, placement.shape, placement.coordinate(rank))
        for rank in placement.ranks
    }


def _overlap(one: Slices, other: Slices) -> Slices | None:
    region = []
    for (start, length), (start2, length2) in zip(one, other, strict=True):
        low, high = max(start, start2), min(start + length, start2 + length2)
        if low >= high:
            return None
        region.append((low, high - low))
    return tuple(region)


def _volume(region: Slices) -> int:
    return math.prod(length for _, length in region)
