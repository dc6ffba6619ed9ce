"""order_variables: an order of eliminating variables (elimination.py) that keeps tables small."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

LARGE_TABLE_ENTRIES = 1 << 14  # if a table is larger, another order is tried

EliminationOrder = list[tuple[int, int]]  # (variable, entries of the table that it makes)


def order_variables(sizes: Sequence[int], neighbours: Mapping[int, set[int]]) -> EliminationOrder:
    """Return the cheaper of two orders of elimination.

    The first takes the variable with the smallest table.  If that meets a large table, the second
    takes the variable that makes the fewest new pairs of neighbours: it keeps tensors that
    everything reads (positions, masks) for the end.  sizes: number of values of each variable.
    neighbours: variables that share a table.
    """
    order = _order_by(sizes, neighbours)
    if max((entries for _, entries in order), default=0) > LARGE_TABLE_ENTRIES:
        other = _order_by(sizes, neighbours, pairs_first=True)
        order = min(order, other, key=lambda o: sum(entries for _, entries in o))
    return order


def _order_by(
    sizes: Sequence[int], neighbours: Mapping[int, set[int]], *, pairs_first: bool = False
) -> EliminationOrder:
    """Eliminate the most urgent variable until none is left: by the entries of the table that it
    makes and the pairs of variables that become neighbours, or by the pairs first.
    """
    left = _OpenVariables(sizes, neighbours)
    entries, pairs = left.entries, left.pairs
    first, second = (pairs, entries) if pairs_first else (entries, pairs)
    latest = {v: (first[v], second[v], v) for v in left.near}
    order: EliminationOrder = []
    queue = [*latest.values()]
    heapq.heapify(queue)
    while queue:
        entry = heapq.heappop(queue)
        v = entry[2]
        if latest.get(v) is entry:
            del latest[v]
            order.append((v, entries[v]))
            for u in left.take_out(v):
                now = first[u], second[u], u
                if now != latest[u]:
                    latest[u] = now
                    heapq.heappush(queue, now)
    return order


class _OpenVariables:
    """The variables not yet eliminated.

    near: neighbours of each.  entries: of the table that eliminating it makes.  pairs: ordered
    pairs of its neighbours that are not neighbours of each other.  Each elimination updates only
    what changes: some variables have all others as neighbours, and looking through these would be
    too slow.
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
        """Make the neighbours of v each other's neighbours; return the variables that change."""
        near, pairs, entries, size = self.near, self.pairs, self.entries, self.sizes[v]
        others = near.pop(v)
        for u in others:
            around = near[u]
            around.remove(v)
            pairs[u] -= 2 * (len(around) - len(around & others))
            entries[u] //= size
        touched = set(others)
        for one, other in itertools.combinations(others, 2):
            if other not in near[one]:
                touched |= self._join(one, other)
        return touched

    def _join(self, one: int, other: int) -> set[int]:
        """Make two variables neighbours; return those that are neighbours of both."""
        common = self.near[one] & self.near[other]
        for u, new in ((one, other), (other, one)):
            self.pairs[u] += 2 * (len(self.near[u]) - len(common))
            self.near[u].add(new)
            self.entries[u] *= self.sizes[new]
        for u in common:
            self.pairs[u] -= 2
        return common
