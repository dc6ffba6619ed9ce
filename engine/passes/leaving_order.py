"""leaving_order: in which order variables leave (elimination.py), so that tables stay small."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

WIDE = 1 << 14  # entries of a table for which another order is tried

Order = list[tuple[int, int]]  # variables as they leave, with the entries of the table made then


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
    sizes: Sequence[int],
    neighbours: Mapping[int, set[int]],
    urgency: Callable[[int, int], tuple[int, int]],
) -> Order:
    """Take the most urgent variable out until none is left; its neighbours become each other's.

    urgency: of (entries of the table that it makes, pairs of variables that become neighbours).
    """
    near = {v: set(others) for v, others in neighbours.items()}

    def state(v: int) -> tuple[tuple[int, int], int, int]:
        entries = math.prod((sizes[u] for u in near[v]), start=sizes[v])
        pairs = sum(len(near[v] - near[u]) - 1 for u in near[v])
        return urgency(entries, pairs), v, entries

    order: Order = []
    queue = [state(v) for v in near]
    heapq.heapify(queue)
    while queue:
        found = heapq.heappop(queue)
        _, v, entries = found
        if v not in near or state(v) != found:
            continue
        order.append((v, entries))
        others = near.pop(v)
        touched = set(others)
        for u in others:
            near[u] = (near[u] | others) - {u, v}
            touched |= near[u]
        for u in touched:
            heapq.heappush(queue, state(u))
    return order
