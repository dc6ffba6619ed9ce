"""Boxing: (from, to) -> steps, bytes, seconds.  The algebra of all communication; moves nothing.

On one grid a boxing is a path of steps, each on one axis (`path`); between grids: crossing.py.
Bytes are those of the paper's table 2 (OneFlow, arXiv 2110.15032): totals over all ranks, T = bytes
of the logical tensor.
transport/transport.py does the steps in one process, transport/collectives.py on torch.distributed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache

from flowrun.engine.errors import SbpError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.placement import Shape, largest_shape
from flowrun.engine.ir.sbp import B, Broadcast, NdSbp, Partial, S, Sbp, Split, format_nd_sbp

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
ALL_TO_ALL, SLICE, PAD, KEEP = "all_to_all", "slice", "pad", "keep"
EXCHANGE = "exchange"  # an all-reduce in one go: each member gets what all have, and reduces it

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
STRAIGHT = (ALL_TO_ALL, EXCHANGE)  # from each member to each other, not around a ring

LOCAL_BYTES_PER_S = 1e10  # copying inside one rank
LOCAL_LEAST_S = 1e-7  # so that doing nothing is always cheaper


@dataclass(frozen=True, slots=True)
class BoxingStep:
    """One move on one axis of one grid: the SBP of that axis changes from source to target.

    exchanged: an all-reduce that goes as an EXCHANGE; lower.py decides (`by_size`).
    """

    axis: int
    source: Sbp
    target: Sbp
    exchanged: bool = False

    @property
    def kind(self) -> str:
        """The collective, or the local program, that does it."""
        return EXCHANGE if self.exchanged else KINDS[type(self.source), type(self.target)]

    @property
    def moves(self) -> bool:
        """True if bytes cross links; False for slice, pad and keep."""
        return self.kind not in LOCAL

    @property
    def reduce(self) -> str:
        """sum, max, min or logsumexp for a step from or to P; "" for the others."""
        for sbp in (self.source, self.target):
            if isinstance(sbp, Partial):
                return sbp.reduce
        return ""

    def after(self, state: NdSbp) -> NdSbp:
        """The nd-SBP that the step leaves."""
        return replaced(state, self.axis, self.target)

    def __str__(self) -> str:
        return f"{self.kind} axis {self.axis} {self.source} -> {self.target}"


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


def path(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape
) -> tuple[BoxingStep, ...]:
    """The steps from source to target: least bytes, then fewest steps.

    Axes of size 1 cost nothing: they have what the target says from the start.  Raises SbpError if
    source or target leaves a rank with nothing; else there is a way, if need be through all B.
    """
    start = tuple(t if n == 1 else s for s, t, n in zip(source, target, grid, strict=True))
    if start == target:
        return ()
    partial = tuple(sbp if isinstance(sbp, Partial) else None for sbp in target)
    # a dim of at least as many elements as there are ranks can be split as any longer one
    ranks = math.prod(grid)
    steps = _paths(start, partial, grid, tuple(min(size, ranks) for size in shape)).get(target)
    if steps is None:
        raise misfit(target if fits(start, grid, shape) else start, grid, shape)
    return steps


@lru_cache(maxsize=65536)
def _paths(
    start: NdSbp, partial: tuple[Partial | None, ...], grid: tuple[int, ...], shape: Shape
) -> Mapping[NdSbp, tuple[BoxingStep, ...]]:
    """The paths from start to all nd-SBPs that have these P, or none (Dijkstra over nd-SBPs)."""
    done: dict[NdSbp, tuple[BoxingStep, ...]] = {}
    if not fits(start, grid, shape):
        return done
    ranks, order = math.prod(grid), itertools.count()
    Entry = tuple[int, int, int, NdSbp, tuple[BoxingStep, ...]]  # bytes in whole tensors x ranks
    heap: list[Entry] = [(0, 0, 0, start, ())]
    while heap:
        cost, length, _, state, steps = heapq.heappop(heap)
        if state in done:
            continue
        done[state] = steps
        for step in _next_steps(state, partial, grid, shape):
            new = step.after(state)
            if new not in done:
                total = cost + int(_tensors_moved(step, state, grid) * ranks)
                heapq.heappush(heap, (total, length + 1, next(order), new, (*steps, step)))
    return done


def step_bytes(step: BoxingStep, state: NdSbp, grid: tuple[int, ...], num_bytes: float) -> float:
    """Bytes that cross links, over all ranks; `state`: the nd-SBP before the step.

    Exact for uneven splits too, except all-to-all: a little more or less than 1/p stays at home.
    """
    return float(_tensors_moved(step, state, grid) * Fraction(num_bytes))


def path_bytes(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape, num_bytes: float
) -> float:
    """Bytes that cross links, over all ranks, along the path."""
    return float(path_tensors(source, target, grid, shape) * Fraction(num_bytes))


def path_seconds(
    source: NdSbp,
    target: NdSbp,
    grid: tuple[int, ...],
    shape: Shape,
    num_bytes: float,
    links: Sequence[Link],
) -> float:
    """Time of the path on the busiest rank.  links: of each axis.

    An all-reduce goes around a ring here: which are exchanged, the message says in which they
    travel (lower.py).
    """
    return sum(
        start_seconds(step, links[step.axis])
        + step_seconds(step, state, grid, shape, num_bytes, links[step.axis])
        for step, state in states(source, target, grid, shape)
    )


def by_size(step: BoxingStep, num_bytes: float, link: Link) -> BoxingStep:
    """An all-reduce as an exchange, if its message on a rank is small enough for the link."""
    exchanged = step.kind == ALL_REDUCE and 0 < num_bytes <= link.exchange_bytes
    return replace(step, exchanged=True) if exchanged else step


def start_seconds(step: BoxingStep, link: Link) -> float:
    """Of one step, however little it moves: a latency, and the hops of a ring; an all-reduce may
    go up and down a tree instead (NCCL, src/graph/tuning.cc), and of what goes straight to every
    other member each piece may have a start of its own.
    """
    if not step.moves:
        return 0.0
    if step.kind == ALL_REDUCE:
        return link.latency_s + 2 * link.tree_s
    return link.latency_s + link.ring_s + (link.peers_s if step.kind in STRAIGHT else 0.0)


def step_seconds(
    step: BoxingStep,
    state: NdSbp,
    grid: tuple[int, ...],
    shape: Shape,
    num_bytes: float,
    link: Link,
) -> float:
    """Of what one step moves, on the busiest rank: 1/p of what crosses in its group.

    Local steps cost a little, so that among equals doing nothing wins.
    """
    group = largest_shape(shape, replaced(state, step.axis, B), grid)  # what the group shares
    group_bytes = num_bytes * math.prod(group) / max(1, math.prod(shape))
    if step.moves:
        parts = grid[step.axis]
        sent = float(_group_tensors(step.kind, parts) / parts) * group_bytes
        straight = step.kind in STRAIGHT
        return sent / (link.spread_bytes_per_s if straight else link.bytes_per_s)
    return max(LOCAL_LEAST_S, group_bytes / LOCAL_BYTES_PER_S)


def states(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape
) -> Iterator[tuple[BoxingStep, NdSbp]]:
    """Each step of the path with the nd-SBP before it."""
    state = tuple(t if n == 1 else s for s, t, n in zip(source, target, grid, strict=True))
    for step in path(source, target, grid, shape):
        yield step, state
        state = step.after(state)


def _next_steps(
    state: NdSbp, partial: Sequence[Partial | None], grid: tuple[int, ...], shape: Shape
) -> Iterator[BoxingStep]:
    """Legal steps from a state.  A P appears only where the target wants it: it saves no byte."""
    for axis, (sbp, parts) in enumerate(zip(state, grid, strict=True)):
        if parts == 1:
            continue
        for new in (*unreduced(shape), *filter(None, (partial[axis],))):
            if new == sbp or (type(sbp), type(new)) not in KINDS:
                continue
            step = BoxingStep(axis, sbp, new)
            if not _interleaves(step, state, grid) and fits(step.after(state), grid, shape):
                yield step


def _interleaves(step: BoxingStep, state: NdSbp, grid: tuple[int, ...]) -> bool:
    """True if an inner axis splits the dim that the step cuts or joins: it would shuffle pieces."""
    inner = range(step.axis + 1, len(grid))
    splits = {state[axis] for axis in inner if grid[axis] > 1 and isinstance(state[axis], Split)}
    return step.source in splits or step.target in splits


def unreduced(shape: Shape) -> tuple[Sbp, ...]:
    """Every SBP without P that a tensor can have on one axis."""
    return (B, *map(S, range(len(shape))))


@cache
def _group_tensors(kind: str, parts: int) -> Fraction:
    """Table 2, same ranks: how often the group's tensor crosses links; an exchange is not in it.

    Ring all-reduce: 2(p-1)/p of the bytes on each rank (Patarasuk and Yuan 2009).
    """
    table = {
        ALL_REDUCE: Fraction(2 * (parts - 1)),
        REDUCE_SCATTER: Fraction(parts - 1),
        ALL_GATHER: Fraction(parts - 1),
        ALL_TO_ALL: Fraction(parts - 1, parts),
        EXCHANGE: Fraction(parts * (parts - 1)),
    }
    return table.get(kind, Fraction(0))


def _tensors_moved(step: BoxingStep, state: NdSbp, grid: tuple[int, ...]) -> Fraction:
    """How often the logical tensor crosses: as in one group, times the ranks that hold the same."""
    alike = replicas(replaced(state, step.axis, S(0)), grid)
    return _group_tensors(step.kind, grid[step.axis]) * alike


def path_tensors(source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape) -> Fraction:
    """What crosses links on a path, over all ranks, in whole tensors."""
    steps = states(source, target, grid, shape)
    return sum((_tensors_moved(step, state, grid) for step, state in steps), Fraction(0))


def replicas(state: NdSbp, grid: tuple[int, ...]) -> int:
    """How many ranks hold (a value or a part of) each element."""
    return math.prod(n for sbp, n in zip(state, grid, strict=True) if not isinstance(sbp, Split))


def misfit(state: NdSbp, grid: tuple[int, ...], shape: Shape) -> SbpError:
    """The error for a tensor that cannot lie so on a grid."""
    return SbpError(
        f"boxing from or to {format_nd_sbp(state)}",
        f"Shape {tuple(shape)} cannot lie so on a grid of {' x '.join(map(str, grid))}: "
        "a rank would hold nothing, or sums and maxima would mix.",
        "Split a dim with at least as many elements as ranks split it, or write B.",
    )
