"""Boxing: (from, to) -> steps, bytes, seconds.  All communication is described here; nothing moves.

On one grid a boxing is a path of steps, each on one axis (`path`); crossing.py has boxings between
grids.  Bytes are those of table 2 of the paper (OneFlow, arXiv 2110.15032): totals over all ranks,
in multiples of T, the bytes of the logical tensor.
transport/transport.py executes the steps in one process, transport/collectives.py by
torch.distributed.
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
from flowrun.engine.ir.sbp import B, Broadcast, NdSbp, Owned, Partial, S, Sbp, Split, format_nd_sbp

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
ALL_TO_ALL, SLICE, PAD, KEEP = "all_to_all", "slice", "pad", "keep"
EXCHANGE = "exchange"  # an all-reduce in which each member receives all parts and reduces them
TURN = "turn"  # S(i) -> S(i): each member's piece goes to the next, around the axis (flow.turn)
SWAP = "swap"  # the same, of the second half to the mirrored member: of n, the last one's to 0

# The kind of a step, by (source, target).  P -> P(max) is absent: it has no meaning.
KINDS: dict[tuple[type[Sbp], type[Sbp]], str] = {
    (Partial, Broadcast): ALL_REDUCE,
    (Partial, Split): REDUCE_SCATTER,
    (Split, Broadcast): ALL_GATHER,
    (Split, Split): ALL_TO_ALL,
    (Broadcast, Split): SLICE,  # local: each rank cuts its piece
    (Split, Partial): PAD,  # local: the piece, surrounded by neutral elements of the reduction
    (Broadcast, Partial): KEEP,  # local: coordinate 0 keeps its value, the others hold identity()
    # to and from an owner: uneven splits.  A message holds tensors of many owners, who are balanced
    # (passes/update/choose_owners.py), so a rank sends as much as where each tensor is split.
    (Partial, Owned): REDUCE_SCATTER,  # a reduction to one
    (Split, Owned): ALL_TO_ALL,  # a gather to one
    (Owned, Split): ALL_TO_ALL,  # a scatter from one
    (Owned, Broadcast): ALL_GATHER,  # a broadcast from one
    (Broadcast, Owned): SLICE,  # local: the owner keeps its value
}
LOCAL_KINDS = (SLICE, PAD, KEEP)
DIRECT_KINDS = (ALL_TO_ALL, EXCHANGE)  # each member sends to each other, not around a ring
# the result is what members sent, in their order
JOINED_KINDS = (ALL_GATHER, ALL_TO_ALL, TURN, SWAP)

LOCAL_BYTES_PER_S = 1e10  # speed of a copy inside one rank
MIN_LOCAL_STEP_S = 1e-7  # above zero, so that doing nothing is always cheaper


@dataclass(frozen=True, slots=True)
class BoxingStep:
    """A move on one axis of one grid: the SBP of that axis changes from source to target.

    exchanged: the step is an all-reduce that runs as an EXCHANGE;
        lowering/add_boxings.py decides (`exchange_if_small`).
    swapped: source and target are one, and the step is a SWAP.
    """

    axis: int
    source: Sbp
    target: Sbp
    exchanged: bool = False
    swapped: bool = False

    @property
    def kind(self) -> str:
        """The collective, or the local program, that executes the step."""
        if self.source == self.target:
            return SWAP if self.swapped else TURN
        return EXCHANGE if self.exchanged else KINDS[type(self.source), type(self.target)]

    @property
    def moves(self) -> bool:
        """True if bytes cross links; False for slice, pad and keep."""
        return self.kind not in LOCAL_KINDS

    @property
    def reduce(self) -> str:
        """The reduction ("sum", "max", "min", "logsumexp") of a step from or to P, or ""."""
        ends = (self.source, self.target)
        return next((sbp.reduce for sbp in ends if isinstance(sbp, Partial)), "")

    def after(self, state: NdSbp) -> NdSbp:
        """Return the nd-SBP that a tensor of nd-SBP `state` has after the step."""
        return replace_axis(state, self.axis, self.target)

    def __str__(self) -> str:
        return f"{self.kind} axis {self.axis} {self.source} -> {self.target}"


def replace_axis(state: NdSbp, axis: int, sbp: Sbp) -> NdSbp:
    """Return the nd-SBP `state` with the SBP of one axis replaced by `sbp`."""
    return (*state[:axis], sbp, *state[axis + 1 :])


def fits(state: NdSbp, grid: tuple[int, ...], shape: Shape) -> bool:
    """Return whether every rank of `grid` gets a nonempty piece of a tensor of `shape` laid out by
    `state`, or one that owns it the whole; single numbers have no owner.

    All P of `state` must be of one reduction as well: sums and maxima do not commute, so (P,
    P(max)) would not say in which order the axes reduce.
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
        if isinstance(sbp, Owned) and not left:
            return False
    return len(reductions) <= 1


def path(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape
) -> tuple[BoxingStep, ...]:
    """Return the steps from source to target on `grid`: fewest bytes, then fewest steps.

    Axes of size 1 cost nothing: they have the target's SBP from the start.  `shape` is logical.
    Raises SbpError if source or target leaves a rank without elements; otherwise a path exists, at
    worst through B on all axes.
    """
    start = tuple(t if n == 1 else s for s, t, n in zip(source, target, grid, strict=True))
    if start == target:
        return ()
    special = tuple(sbp if isinstance(sbp, Partial | Owned) else None for sbp in target)
    # a dim with at least as many elements as there are ranks splits like any longer one
    ranks = math.prod(grid)
    steps = _paths(start, special, grid, tuple(min(size, ranks) for size in shape)).get(target)
    if steps is None:
        wrong = next((each for each in (start, target) if not fits(each, grid, shape)), None)
        assert wrong is not None, f"no row of KINDS leads from {start} to {target}"
        raise misfit(wrong, grid, shape)
    return steps


@lru_cache(maxsize=65536)
def _paths(
    start: NdSbp, special: tuple[Sbp | None, ...], grid: tuple[int, ...], shape: Shape
) -> Mapping[NdSbp, tuple[BoxingStep, ...]]:
    """Return the path from `start` to each nd-SBP whose P and O are `special` (Dijkstra)."""
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
        for step in _next_steps(state, special, grid, shape):
            new = step.after(state)
            if new not in done:
                total = cost + int(_step_tensors(step, state, grid) * ranks)
                heapq.heappush(heap, (total, length + 1, next(order), new, (*steps, step)))
    return done


def step_bytes(step: BoxingStep, state: NdSbp, grid: tuple[int, ...], num_bytes: float) -> float:
    """Return the bytes that cross links in one step, over all ranks of `grid`.

    state: the nd-SBP before the step.  num_bytes: of the logical tensor.  Exact for uneven splits
    too, except for all-to-all, where a little more or less than 1/p stays on its rank.
    """
    return float(_step_tensors(step, state, grid) * Fraction(num_bytes))


def path_bytes(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape, num_bytes: float
) -> float:
    """Return the bytes that cross links from source to target, over all ranks of `grid`.

    shape, num_bytes: of the logical tensor.
    """
    return float(path_tensors(source, target, grid, shape) * Fraction(num_bytes))


def path_seconds(
    source: NdSbp,
    target: NdSbp,
    grid: tuple[int, ...],
    shape: Shape,
    num_bytes: float,
    links: Sequence[Link],
) -> float:
    """Return the time of the path from source to target on the busiest rank of `grid`, in seconds.

    shape, num_bytes: of the logical tensor.  links: the link of each axis.  Every all-reduce counts
    as a ring: which ones become exchanges depends on their message (lowering/add_boxings.py).
    """
    return sum(
        start_seconds(step, links[step.axis])
        + step_seconds(step, state, grid, shape, num_bytes, links[step.axis])
        for step, state in states(source, target, grid, shape)
    )


def exchange_if_small(step: BoxingStep, num_bytes: float, link: Link) -> BoxingStep:
    """Return an all-reduce step as an exchange if its message is small enough for the link.

    step: any; only an all-reduce changes.  num_bytes: bytes of the message on one rank.
    """
    exchanged = step.kind == ALL_REDUCE and 0 < num_bytes <= link.exchange_bytes
    return replace(step, exchanged=True) if exchanged else step


def start_seconds(step: BoxingStep, link: Link) -> float:
    """Return the seconds that a step takes however little it moves: latency and hops.

    An all-reduce may use a tree instead of a ring (NCCL, src/graph/tuning.cc).  In an all-to-all or
    an exchange each piece may have a start of its own.
    """
    if not step.moves:
        return 0.0
    if step.kind == ALL_REDUCE:
        return link.latency_s + 2 * link.tree_s
    if step.kind in (TURN, SWAP):
        return link.latency_s
    return link.latency_s + link.ring_s + (link.peers_s if step.kind in DIRECT_KINDS else 0.0)


def step_seconds(
    step: BoxingStep,
    state: NdSbp,
    grid: tuple[int, ...],
    shape: Shape,
    num_bytes: float,
    link: Link,
) -> float:
    """Return the seconds in which the busiest rank moves its bytes: 1/p of the group's.

    state: the nd-SBP before the step on `grid`.  shape, num_bytes: of the logical tensor.  link: of
    the step's axis.  Local steps cost a little, so that a path without steps wins a tie.
    """
    group = largest_shape(shape, replace_axis(state, step.axis, B), grid)  # what the group shares
    group_bytes = num_bytes * math.prod(group) / max(1, math.prod(shape))
    if step.moves:
        parts = grid[step.axis]
        sent = float(_group_tensors(step.kind, parts) / parts) * group_bytes
        straight = step.kind in DIRECT_KINDS
        return sent / (link.spread_bytes_per_s if straight else link.bytes_per_s)
    return max(MIN_LOCAL_STEP_S, group_bytes / LOCAL_BYTES_PER_S)


def states(
    source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape
) -> Iterator[tuple[BoxingStep, NdSbp]]:
    """Yield each step of the path from source to target on `grid` with the nd-SBP before it.

    shape: of the logical tensor.
    """
    state = tuple(t if n == 1 else s for s, t, n in zip(source, target, grid, strict=True))
    for step in path(source, target, grid, shape):
        yield step, state
        state = step.after(state)


def _next_steps(
    state: NdSbp, special: Sequence[Sbp | None], grid: tuple[int, ...], shape: Shape
) -> Iterator[BoxingStep]:
    """Yield the legal steps from a state; to P, which saves no byte, or O if the target has it."""
    for axis, (sbp, parts) in enumerate(zip(state, grid, strict=True)):
        if parts == 1:
            continue
        wanted = special[axis]
        for new in (*sbps_without_partial(shape), *((wanted,) if wanted else ())):
            if new == sbp or (type(sbp), type(new)) not in KINDS:
                continue
            step = BoxingStep(axis, sbp, new)
            if not _interleaves(step, state, grid) and fits(step.after(state), grid, shape):
                yield step


def _interleaves(step: BoxingStep, state: NdSbp, grid: tuple[int, ...]) -> bool:
    """Return whether an inner axis splits the dim that the step cuts or joins."""
    inner = range(step.axis + 1, len(grid))
    splits = {state[axis] for axis in inner if grid[axis] > 1 and isinstance(state[axis], Split)}
    return step.source in splits or step.target in splits


def sbps_without_partial(shape: Shape) -> tuple[Sbp, ...]:
    """Return every SBP but P and O that a tensor of `shape` can have on one axis."""
    return (B, *map(S, range(len(shape))))


@cache
def _group_tensors(kind: str, parts: int) -> Fraction:
    """Return how often the group's tensor crosses links: table 2, same ranks, and exchange.

    Ring all-reduce: 2(p-1)/p of the bytes on each rank (Patarasuk and Yuan 2009).
    """
    table = {
        ALL_REDUCE: Fraction(2 * (parts - 1)),
        REDUCE_SCATTER: Fraction(parts - 1),
        ALL_GATHER: Fraction(parts - 1),
        ALL_TO_ALL: Fraction(parts - 1, parts),
        EXCHANGE: Fraction(parts * (parts - 1)),
        TURN: Fraction(1),
        SWAP: Fraction(parts - parts % 2, 2 * parts),  # the middle one's stays
    }
    return table.get(kind, Fraction(0))


def _step_tensors(step: BoxingStep, state: NdSbp, grid: tuple[int, ...]) -> Fraction:
    """Return how often the logical tensor crosses links: all groups with equal data count."""
    alike = replicas(replace_axis(state, step.axis, S(0)), grid)
    return _group_tensors(step.kind, grid[step.axis]) * alike


def path_tensors(source: NdSbp, target: NdSbp, grid: tuple[int, ...], shape: Shape) -> Fraction:
    """Return the bytes that cross links from source to target, in logical tensors of `shape`."""
    steps = states(source, target, grid, shape)
    return sum((_step_tensors(step, state, grid) for step, state in steps), Fraction(0))


def replicas(state: NdSbp, grid: tuple[int, ...]) -> int:
    """Return how many ranks hold each element, as a value or as a part of it."""
    once = (Split, Owned)
    return math.prod(n for sbp, n in zip(state, grid, strict=True) if not isinstance(sbp, once))


def misfit(state: NdSbp, grid: tuple[int, ...], shape: Shape) -> SbpError:
    """Return the error for a tensor of `shape` that cannot have nd-SBP `state` on `grid`."""
    return SbpError(
        f"boxing from or to {format_nd_sbp(state)}",
        f"A tensor of shape {tuple(shape)} cannot have this layout on a grid of "
        f"{' x '.join(map(str, grid))}: a rank would hold nothing, or sums and maxima would mix.",
        "Split a dim that has at least one element for each rank that splits it, or write B.",
    )
