"""elimination: the least sum of small tables, each over a few variables.

Non-serial dynamic programming (Bertelè and Brioschi 1972): a variable leaves by keeping, for every
choice of its neighbours, the best of its own values; what is left is a table over the neighbours.
They leave in an order that keeps such tables small, so chains, trees and a fan of many branches
cost next to nothing, and the whole is exponential only in how much of the graph hangs together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDE, WIDEST = 1 << 14, 1 << 23  # entries: where another order is tried; that are still made
_QUANTUM = 2.0**-46  # costs are its multiples: sums below 128 are the same in any order

Values = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """Costs of every choice of some variables; dim d of values belongs to variable over[d].

    An infinite cost forbids a choice.
    """

    over: tuple[int, ...]
    values: Values


@dataclass(frozen=True, slots=True)
class Least:
    """The value of each variable, the sum of all tables there, and whether it is proved least."""

    choice: tuple[int, ...]
    cost: float
    exact: bool


def minimise(sizes: Sequence[int], tables: Iterable[Table], widest: int = WIDEST) -> Least:
    """Values of variables (0 .. sizes[v] - 1) for which the tables add up to least.

    Where every order of leaving that is tried makes a table of more entries than `widest`, a
    variable with most neighbours is set to what looks best for it alone: not proved least.
    """
    network = _Network(sizes)
    for table in tables:
        network.add(Table(table.over, np.round(table.values / _QUANTUM) * _QUANTUM))
    left: list[tuple[int, Table]] = []  # (variable, its best value for each choice of neighbours)
    exact = True
    while network.tables:
        for v, entries in _order(sizes, network.neighbours):
            if entries > widest:
                exact = False
                v = max(network.tables, key=lambda u: len(network.neighbours[u]))
                left.append((v, network.fix(v)))
                break
            left.append((v, network.eliminate(v)))
    choice = [0] * len(sizes)
    for v, best in reversed(left):
        choice[v] = int(best.values[tuple(choice[u] for u in best.over)])
    return Least(tuple(choice), network.constant, exact)


def lower_bound(sizes: Sequence[int], tables: Iterable[Table], widest: int = WIDEST) -> float:
    """What no choice can be below.

    Mini-buckets (Dechter and Rish 2003): where a variable's table would have more entries than
    `widest`, its tables are parted, and each part is minimised for itself.
    """
    network = _Network(sizes)
    for table in tables:
        network.add(Table(table.over, np.round(table.values / _QUANTUM) * _QUANTUM))
    while network.tables:
        for v, entries in _order(sizes, network.neighbours):
            if entries > widest:
                network.relax(v, widest)
                break
            network.eliminate(v)
    return network.constant


Order = list[tuple[int, int]]  # variables as they leave, with the entries of the table made then


def _order(sizes: Sequence[int], neighbours: Mapping[int, set[int]]) -> Order:
    """The cheaper of two orders: least table first; or, where that meets a wide one, fewest new
    pairs of neighbours first, which keeps what everybody reads (positions, masks) for the end.
    """
    order = _leaving(sizes, neighbours, lambda entries, pairs: (entries, pairs))
    if max(entries for _, entries in order) <= WIDE:
        return order
    other = _leaving(sizes, neighbours, lambda entries, pairs: (pairs, entries))
    return min(order, other, key=lambda o: sum(entries for _, entries in o))


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


class _Network:
    """The variables that are left, with the tables over them and what has been paid."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.constant = 0.0
        self.tables: dict[int, list[Table]] = {v: [] for v in range(len(sizes))}
        self.neighbours: dict[int, set[int]] = {v: set() for v in range(len(sizes))}

    def add(self, table: Table) -> None:
        """One more table."""
        if not table.over:
            self.constant += float(table.values)
        for v in table.over:
            self.tables[v].append(table)
            self.neighbours[v].update(table.over)
            self.neighbours[v].discard(v)

    def eliminate(self, v: int) -> Table:
        """Take v out; its best value for every choice of its neighbours."""
        near = tuple(sorted(self.neighbours[v]))
        total: Values = np.zeros(())
        for table in sorted(self._without(v), key=lambda table: table.values.size):
            total = total + _aligned(table, (*near, v))
        total = np.broadcast_to(total, (*(self.sizes[u] for u in near), self.sizes[v]))
        self.add(Table(near, total.min(axis=-1)))
        return Table(near, total.argmin(axis=-1))

    def relax(self, v: int, widest: int) -> None:
        """Take v out in parts of at most `widest` entries (more, where one table alone has)."""
        parts: list[tuple[set[int], list[Table]]] = []
        for table in sorted(self._without(v), key=lambda table: -table.values.size):
            for over, tables in parts:
                if math.prod(self.sizes[u] for u in over.union(table.over)) <= widest:
                    over.update(table.over)
                    tables.append(table)
                    break
            else:
                parts.append((set(table.over), [table]))
        for over, tables in parts:
            near = tuple(sorted(over - {v}))
            total: Values = np.zeros(())
            for table in tables:
                total = total + _aligned(table, (*near, v))
            total = np.broadcast_to(total, (*(self.sizes[u] for u in near), self.sizes[v]))
            self.add(Table(near, total.min(axis=-1)))

    def fix(self, v: int) -> Table:
        """Take v out at the value that is best if all others were free."""
        tables = self._without(v)
        alone = np.zeros(self.sizes[v])
        for table in tables:
            others = tuple(d for d, u in enumerate(table.over) if u != v)
            alone = alone + table.values.min(axis=others)
        value = int(alone.argmin())
        for table in tables:
            over = tuple(u for u in table.over if u != v)
            self.add(Table(over, table.values.take(value, axis=table.over.index(v))))
        return Table((), np.array(value))

    def _without(self, v: int) -> list[Table]:
        """Forget v; its tables, which no other variable has any more either."""
        tables = self.tables.pop(v)
        for u in self.neighbours.pop(v):
            self.tables[u] = [table for table in self.tables[u] if v not in table.over]
            self.neighbours[u] = {w for table in self.tables[u] for w in table.over} - {u}
        return tables


def _aligned(table: Table, axes: tuple[int, ...]) -> Values:
    """The values with a dim for each of some axes, 1 long where the table does not depend on it."""
    order = sorted(range(len(table.over)), key=lambda d: axes.index(table.over[d]))
    lengths = dict(zip(table.over, table.values.shape, strict=True))
    return table.values.transpose(order).reshape([lengths.get(v, 1) for v in axes])
