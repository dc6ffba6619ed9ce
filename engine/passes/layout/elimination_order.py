"""leaving_order: in which order variables leave (elimination.py), so that tables stay small."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

WIDE = 1 << 14  # entries of a table for which another order is tried

EliminationOrder = list[
    tuple[int, int]
]  # variables as they leave, with the entries of the table made then
Urgency = Callable[[int, int], tuple[int, int]]


def leaving_order(sizes: Sequence[int], neighbours: Mapping[int, set[int]]) -> list[int]:
    """The cheaper of two orders: least table first; or, where that meets a wide one, fewest new
    pairs of neighbours first, which keeps what everybody reads (positions, masks) for the end.
    """
    order = _leaving(sizes, neighbours, lambda entries, pairs: (entries, pairs))
    if max((entries for _, entries in order), default=0) > WIDE:
        other = _leaving(sizes, neighbours, lambda entries, pairs: (pairs, entries))
        order = min(order, other, key=lambda o: sum(entries for _, entries in o))
    return [v for v, _ in order]


def _leaving(
    sizes: Sequence[int], neighbours: Mapping[int, set[int]], urgency: Urgency
) -> EliminationOrder:
    """Take the most urgent variable out until none is left.

    urgency: of (entries of the table that it makes, pairs of variables that become neighbours).
    """
    left = _OpenVariables(sizes, neighbours)

    def state(v: int) -> tuple[tuple[int, int], int]:
        return urgency(left.entries[v], left.pairs[v]), v

    order: EliminationOrder = []
    queue = [state(v) for v in left.near]
    heapq.heapify(queue)
    while queue:
        found = heapq.heappop(queue)
        v = found[1]
        if v in left.near and state(v) == found:
            order.append((v, left.entries[v]))
            for u in left.take_out(v):
                heapq.heappush(queue, state(u))
    return order


class _OpenVariables:
    """The variables that have not left; of each its neighbours, the entries of the table that it
    makes, and how many pairs of its neighbours are not each other's (in either order: twice).

    Kept up to date by what changes: some have all others as neighbours, and none is looked through
    where another leaves.
    """

    def __init__(self, sizes: Sequence[int], neighbours: Mapping[int, set[int]]) -> None:
        self.sizes = sizes
        self.near = {v: set(others) for v, others in neighbours.items()}
        self.entries = {
            v: math.prod((sizes[u] for u in others), start=sizes[v])
            for v, others in self.near.items()
        }
        self.pairs = {
            v: sum(len(others) - 1 - len(others & self.near[u]) for u in others)
            for v, others in self.near.items()
        }

    def take_out(self, v: int) -> set[int]:
        """Its neighbours become each other's.  Those for which something has changed."""
        others = self.near[v]
        for u in others:
            self.pairs[u] -= 2 * (len(self.near[u]) - 1 - len(self.near[u] & others))
            self.near[u].remove(v)
            self.entries[u] //= self.sizes[v]
        touched = set(others)
        for one, other in itertools.combinations(others, 2):
            if other not in self.near[one]:
                touched |= self._join(one, other)
        del self.near[v]
        return touched

    def _join(self, one: int, other: int) -> set[int]:
        """Make two variables neighbours; those that are a neighbour of both."""
        common = self.near[one] & self.near[other]
        for u, new in ((one, other), (other, one)):
            self.pairs[u] += 2 * (len(self.near[u]) - len(common))
            self.near[u].add(new)
            self.entries[u] *= self.sizes[new]
        for u in common:
            self.pairs[u] -= 2
        return common
