"""Boxing: (from, to) -> steps, bytes, seconds.  The algebra of all communication; moves nothing.

On one grid a boxing is a path of steps, each on one axis (`path`).  Between grids it has three
parts (`transfer_sbps`): a path on the source grid that leaves no partial values, slices that cross
point to point (`route`), a path on the target grid.  Bytes are those of the paper's table 2
(OneFlow, arXiv 2110.15032): totals over all ranks, T = bytes of the logical tensor.
runtime/transport.py does the steps in one process, runtime/collectives.py on torch.distributed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from flowrun.engine.cost.hardware import Link
from flowrun.engine.errors import SbpError
from flowrun.engine.placement import Placement, Shape, Slices, largest_shape, local_slices
from flowrun.engine.sbp import B, Broadcast, NdSbp, Partial, S, Sbp, Split, format_nd_sbp

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
ALL_TO_ALL, SLICE, PAD, KEEP = "all_to_all", "slice", "pad", "keep"

# What one step is, by (source, target).  Absent: P -> P(max), a maximum of parts means nothing.
KINDS: dict[tuple[type[Sbp], type[Sbp]], str] = {
    (Partial, Broadcast): ALL_REDUCE,
    (Partial, Split): REDUCE_SCATTER,
    (Split, Broadcast): ALL_GATHER,
    (Split, Split): ALL_TO_ALL,
    (Broadcast, Split): SLICE,  # local: each rank cuts its piece
    (Split, Partial): PAD,  # local: the piece among values that do not count
    (Broadcast, Partial): KEEP,  # local: coordinate 0 keeps; the others, see identity()
}
LOCAL = (SLICE, PAD, KEEP)

LOCAL_BYTES_PER_S = 1e10  # copying inside one rank
LOCAL_LEAST_S = 1e-7  # so that doing nothing is always cheaper


@dataclass(frozen=True, slots=True)
class Step:
    """One move on one axis of one grid: the SBP of that axis changes from source to target."""

    axis: int
    source: Sbp
    target: Sbp

    @property
    def kind(self) -> str:
        """The collective, or the local program, that does it."""
        return KINDS[type(self.source), type(self.target)]

    @property
    def moves(self) -> bool:
        """True if bytes cross links; False for slice, pad and keep."""
        return self.kind not in LOCAL

    @property
    def reduce(self) -> str:
        """sum, max or min for a step from or to P; "" for the others."""
        for sbp in (self.source, self.target):
            if isinstance(sbp, Partial):
                return sbp.reduce
        return ""

    def after(self, state: NdSbp) -> NdSbp:
        """The nd-SBP that the step leaves."""
        return replaced(state, self.axis, self.target)

    def __str__(self) -> str:
        return f"{self.kind} axis {self.axis} {self.source} -> {self.target}"


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


# ---- one grid -----------------------------------------------------------------------------------


def replaced(state: NdSbp, axis: int, sbp: Sbp) -> NdSbp:
    """The nd-SBP with another SBP on one axis."""
    return (*state[:axis], sbp, *state[axis + 1 :])


def fits(state: NdSbp, grid: tuple[int, ...], shape: Shape) -> bool:
    """True if no rank gets an empty piece of a split dim, and all P are of one reduction.

    Sums and maxima do not commute: (P, P(max)) would not say in which order the axes reduce.
    """
    left = list(shape)
    reductions = set()
    for sbp, parts in zip(state, grid, strict=True):
        if parts == 1:
            continue
        if isinstance(sbp, Partial):
            reductions.add(sbp.reduce)
        if isinstance(sbp, Split):
            if sbp.dim >= len(left) or left[sbp.dim] < parts:
                return False
            left[sbp.dim] //= parts  # the smallest piece
    return len(reductions) <= 1


@lru_cache(maxsize=65536)
def path(source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape) -> tuple[Step, ...]:
    """The steps from source to target: least bytes, then fewest steps (Dijkstra over nd-SBPs).

    Axes of size 1 cost nothing: they have what the target says from the start.  Raises SbpError if
    source or target leaves a rank with nothing; else there is a way, if need be through all B.
    """
    start = tuple(t if n == 1 else s for s, t, n in zip(source, target, grid, strict=True))
    if start == target:
        return ()
    for end in (start, target):
        if not fits(end, grid, shape):
            raise _misfit(end, grid, shape)
    order = itertools.count()
    Entry = tuple[Fraction, int, int, NdSbp, tuple[Step, ...]]
    heap: list[Entry] = [(Fraction(0), 0, 0, start, ())]
    done: set[NdSbp] = set()
    while heap:
        cost, length, _, state, steps = heapq.heappop(heap)
        if state == target:
            return steps
        if state in done:
            continue
        done.add(state)
        for step in _next_steps(state, target, grid, shape):
            new = step.after(state)
            if new not in done:
                total = cost + _tensors_moved(step, state, grid)
                heapq.heappush(heap, (total, length + 1, next(order), new, (*steps, step)))
    raise AssertionError(f"no path {start} -> {target} on {grid}, shape {shape}")


def step_bytes(step: Step, state: NdSbp, grid: tuple[int, ...], num_bytes: float) -> float:
    """Bytes that cross links, over all ranks; `state`: the nd-SBP before the step.

    Exact for uneven splits too, except all-to-all: a little more or less than 1/p stays at home.
    """
    return float(_tensors_moved(step, state, grid) * Fraction(num_bytes))


def path_bytes(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape, num_bytes: float
) -> float:
    """Bytes that cross links, over all ranks, along the path."""
    return float(_path_tensors(source, target, grid, shape) * Fraction(num_bytes))


def path_seconds(
    source: NdSbp,
    target: NdSbp,
    grid: tuple[int, ...],
    shape: Shape,
    num_bytes: float,
    link: Link,
) -> float:
    """Time of the path on the busiest rank."""
    seconds = 0.0
    for step, state in states(source, target, grid, shape):
        seconds += step_seconds(step, state, grid, shape, num_bytes, link)
    return seconds


def step_seconds(
    step: Step, state: NdSbp, grid: tuple[int, ...], shape: Shape, num_bytes: float, link: Link
) -> float:
    """Time of one step on the busiest rank: a latency, then 1/p of what crosses in its group.

    Local steps cost a little, so that among equals doing nothing wins.
    """
    group = largest_shape(shape, replaced(state, step.axis, B), grid)  # what the group shares
    group_bytes = num_bytes * math.prod(group) / max(1, math.prod(shape))
    if step.moves:
        parts = grid[step.axis]
        sent = float(_group_tensors(step.kind, parts) / parts) * group_bytes
        return link.latency_s + sent / link.bytes_per_s
    return max(LOCAL_LEAST_S, group_bytes / LOCAL_BYTES_PER_S)


def states(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape
) -> Iterator[tuple[Step, NdSbp]]:
    """Each step of the path with the nd-SBP before it."""
    state = tuple(t if n == 1 else s for s, t, n in zip(source, target, grid, strict=True))
    for step in path(source, target, grid, shape):
        yield step, state
        state = step.after(state)


def _next_steps(state: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape) -> Iterator[Step]:
    """Legal steps from a state.  A P appears only where the target wants it: it saves no byte."""
    for axis, (sbp, parts) in enumerate(zip(state, grid, strict=True)):
        if parts == 1:
            continue
        for new in dict.fromkeys((*_unreduced(shape), target[axis])):
            if new == sbp or (type(sbp), type(new)) not in KINDS:
                continue
            step = Step(axis, sbp, new)
            if not _interleaves(step, state, grid) and fits(step.after(state), grid, shape):
                yield step


def _interleaves(step: Step, state: NdSbp, grid: tuple[int, ...]) -> bool:
    """True if an inner axis splits the dim that the step cuts or joins: it would shuffle pieces."""
    inner = range(step.axis + 1, len(grid))
    splits = {state[axis] for axis in inner if grid[axis] > 1 and isinstance(state[axis], Split)}
    return step.source in splits or step.target in splits


def _unreduced(shape: Shape) -> tuple[Sbp, ...]:
    """Every SBP without P that a tensor can have on one axis."""
    return (B, *map(S, range(len(shape))))


def _group_tensors(kind: str, parts: int) -> Fraction:
    """Table 2, same ranks: how often the group's tensor crosses links.

    Ring all-reduce: 2(p-1)/p of the bytes on each rank (Patarasuk and Yuan 2009).
    """
    table = {
        ALL_REDUCE: Fraction(2 * (parts - 1)),
        REDUCE_SCATTER: Fraction(parts - 1),
        ALL_GATHER: Fraction(parts - 1),
        ALL_TO_ALL: Fraction(parts - 1, parts),
    }
    return table.get(kind, Fraction(0))


def _tensors_moved(step: Step, state: NdSbp, grid: tuple[int, ...]) -> Fraction:
    """How often the logical tensor crosses: as in one group, times the ranks that hold the same."""
    replicas = _replicas(replaced(state, step.axis, S(0)), grid)
    return _group_tensors(step.kind, grid[step.axis]) * replicas


def _path_tensors(source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape) -> Fraction:
    steps = states(source, target, grid, shape)
    return sum((_tensors_moved(step, state, grid) for step, state in steps), Fraction(0))


def _replicas(state: NdSbp, grid: tuple[int, ...]) -> int:
    """How many ranks hold (a value or a part of) each element."""
    return math.prod(n for sbp, n in zip(state, grid, strict=True) if not isinstance(sbp, Split))


def _misfit(state: NdSbp, grid: tuple[int, ...], shape: Shape) -> SbpError:
    return SbpError(
        f"boxing from or to {format_nd_sbp(state)}",
        f"Shape {tuple(shape)} cannot lie so on a grid of {' x '.join(map(str, grid))}: "
        "a rank would hold nothing, or sums and maxima would mix.",
        "Split a dim with at least as many elements as ranks split it, or write B.",
    )


# ---- between grids ------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def transfer_sbps(
    source_placement: Placement,
    source: NdSbp,
    target_placement: Placement,
    target: NdSbp,
    shape: Shape,
) -> tuple[NdSbp, NdSbp]:
    """(what the source grid is boxed to before crossing, what the target grid receives); no P.

    Least bytes in all (table 2, other ranks).  Among equals twins send to twins, else the fewest
    bytes cross between the grids: what a rank can get from its own grid it gets there.
    """
    leaving = _leaving(source_placement.shape, source, target, shape)
    order: dict[NdSbp, tuple[Fraction, bool, Fraction, int]] = {}
    for arriving in _arriving(target_placement.shape, target, shape):
        crossing = _crossing(source_placement, leaving, target_placement, arriving, shape)
        total = crossing + _path_tensors(arriving, target, target_placement.shape, shape)
        twins = arriving == leaving == target and source_placement.shape == target_placement.shape
        foreign = sum(sbp not in leaving for sbp in arriving)
        order[arriving] = (total, not twins, crossing, foreign)
    if not order:
        raise _misfit(target, target_placement.shape, shape)
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
        _path_tensors(source, leaving, source_placement.shape, shape)
        + _crossing(source_placement, leaving, target_placement, arriving, shape)
        + _path_tensors(arriving, target, target_placement.shape, shape)
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
    fair = math.prod(shape) * _replicas(target, target_placement.shape) / len(ranks)
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
        _unreduced(shape) if isinstance(sbp, Partial) and parts > 1 else (_settled(sbp),)
        for sbp, parts in zip(source, grid, strict=True)
    ]
    order: dict[NdSbp, tuple[Fraction, int, int]] = {}
    for state in itertools.product(*choices):
        if state == source:
            return state
        if fits(state, grid, shape):
            foreign = sum(sbp not in target for sbp in state)
            steps = len(path(source, state, grid, shape))
            order[state] = (_path_tensors(source, state, grid, shape), foreign, steps)
    if not order:
        raise _misfit(source, grid, shape)
    return min(order, key=order.__getitem__)


def _arriving(grid: tuple[int, ...], target: NdSbp, shape: Shape) -> Iterator[NdSbp]:
    """nd-SBPs without P from which the target is a path away: its B and P may come as pieces."""
    choices = [
        (_settled(sbp),) if isinstance(sbp, Split) or parts == 1 else _unreduced(shape)
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
        return Fraction(_replicas(target, target_placement.shape))
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
