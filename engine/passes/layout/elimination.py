"""elimination: the least sum of small tables, each over a few variables.

Non-serial dynamic programming (Bertelè and Brioschi 1972): a variable leaves by keeping, for every
choice of its neighbours, the best of its own values; what is left is a table over the neighbours.
They leave in an order that keeps such tables small, so chains, trees and a fan of many branches
cost next to nothing, and the whole is exponential only in how much of the graph hangs together.

What is equal is done once: equal tables are one array, and a variable that leaves as another did
leaves what that one left.  So a block that is repeated costs one block; and along a chain of them,
since a table is kept without its least value, what is handed on soon repeats as well.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrun.engine.passes.layout.elimination_order import WIDE, leaving_order

WIDEST = 1 << 23  # entries of a table that is still made
_QUANTUM = 2.0**-46  # costs are its multiples: sums below 128 are the same in any order

Values = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class CostTable:
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


def minimise(sizes: Sequence[int], tables: Iterable[CostTable], widest: int = WIDEST) -> Least:
    """Values of variables (0 .. sizes[v] - 1) for which the tables add up to least.

    Where a variable that leaves would make a table of more entries than `widest`, its neighbours
    with most neighbours are set to what looks best for each alone: not proved least.
    """
    network = _OpenTables(sizes, tables)
    left: list[
        tuple[int, CostTable]
    ] = []  # (variable, its best value for each choice of neighbours)
    exact = True
    for v in leaving_order(sizes, network.neighbours):
        while v in network.tables and network.entries(v) > widest:
            exact = False
            u = max((v, *network.neighbours[v]), key=lambda u: (len(network.neighbours[u]), u))
            left.append((u, network.fix(u)))
        if v in network.tables:
            left.append((v, network.eliminate(v)))
    choice = [0] * len(sizes)
    for v, best in reversed(left):
        choice[v] = int(best.values[tuple(choice[u] for u in best.over)])
    return Least(tuple(choice), network.constant, exact)


def lower_bound(sizes: Sequence[int], tables: Iterable[CostTable], widest: int = WIDEST) -> float:
    """What no choice can be below.

    Mini-buckets (Dechter and Rish 2003): where a variable's table would have more entries than
    `widest`, its tables are parted, and each part is minimised for itself.
    """
    network = _OpenTables(sizes, tables)
    for v in leaving_order(sizes, network.neighbours):
        if network.entries(v) > widest:
            network.relax(v, widest)
        else:
            network.eliminate(v)
    return network.constant


@dataclass(frozen=True, slots=True)
class _Remainder:
    """What a variable leaves: its least over its neighbours, without the lowest of all; its value
    there.  tables: that it was in, so that they live as long.
    """

    tables: tuple[CostTable, ...]
    least: Values
    lowest: float
    best: Values


class _OpenTables:
    """The variables that are left, with the tables over them and what has been paid."""

    def __init__(self, sizes: Sequence[int], tables: Iterable[CostTable]) -> None:
        self.sizes = sizes
        self.constant = 0.0
        self.tables: dict[int, list[CostTable]] = {v: [] for v in range(len(sizes))}
        self.neighbours: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        self._arrays: dict[tuple[tuple[int, ...], bytes], Values] = {}
        self._left: dict[Hashable, _Remainder] = {}
        rounded: dict[int, tuple[Values, Values]] = {}
        for table in tables:
            if id(table.values) not in rounded:
                values = np.round(table.values / _QUANTUM) * _QUANTUM
                rounded[id(table.values)] = table.values, self._one(values)
            self.add(CostTable(table.over, rounded[id(table.values)][1]))

    def add(self, table: CostTable) -> None:
        """One more table."""
        if not table.over:
            self.constant += float(table.values)
        for v in table.over:
            self.tables[v].append(table)
            self.neighbours[v].update(table.over)
            self.neighbours[v].discard(v)

    def entries(self, v: int) -> int:
        """Of the table that v would leave, and itself."""
        return math.prod(self._shape((*self.neighbours[v], v)))

    def eliminate(self, v: int) -> CostTable:
        """Take v out; its best value for every choice of its neighbours."""
        near = tuple(sorted(self.neighbours[v]))
        return CostTable(near, self._leave(v, near, self._without(v)))

    def relax(self, v: int, widest: int) -> None:
        """Take v out in parts of at most `widest` entries (more, where one table alone has)."""
        parts: list[tuple[set[int], list[CostTable]]] = []
        for table in sorted(self._without(v), key=lambda table: -table.values.size):
            for over, tables in parts:
                if math.prod(self.sizes[u] for u in over.union(table.over)) <= widest:
                    over.update(table.over)
                    tables.append(table)
                    break
            else:
                parts.append((set(table.over), [table]))
        for over, tables in parts:
            self._leave(v, tuple(sorted(over - {v})), tables)

    def _leave(self, v: int, near: tuple[int, ...], tables: Sequence[CostTable]) -> Values:
        """Put the least of v for every choice of its neighbours in the place of some tables; the
        value of v where that is.
        """
        axes = (*near, v)
        place = {u: k for k, u in enumerate(axes)}
        whose = sorted((id(t.values), tuple(place[u] for u in t.over)) for t in tables)
        key = (self.sizes[v], *whose)
        found = self._left.get(key)
        if found is None:
            least, lowest, best = _least(
                [_aligned(table, axes) for table in tables], self._shape(axes)
            )
            found = _Remainder(tuple(tables), self._one(least), lowest, best)
            if math.prod(self._shape(axes)) <= WIDE:
                self._left[key] = found
        self.constant += found.lowest
        self.add(CostTable(near, found.least))
        return found.best

    def _shape(self, axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.sizes[v] for v in axes)

    def _one(self, values: Values) -> Values:
        """The array that stands for all that are equal to it."""
        if values.size > WIDE:
            return values
        digest = hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).digest()
        return self._arrays.setdefault((values.shape, digest), values)

    def fix(self, v: int) -> CostTable:
        """Take v out at the value that is best if all others were free."""
        tables = self._without(v)
        alone = np.zeros(self.sizes[v])
        for table in tables:
            others = tuple(d for d, u in enumerate(table.over) if u != v)
            alone = alone + table.values.min(axis=others)
        value = int(alone.argmin())
        for table in tables:
            over = tuple(u for u in table.over if u != v)
            self.add(CostTable(over, table.values.take(value, axis=table.over.index(v))))
        return CostTable((), np.array(value))

    def _without(self, v: int) -> list[CostTable]:
        """Forget v; its tables, which no other variable has any more either."""
        tables = self.tables.pop(v)
        for u in self.neighbours.pop(v):
            self.tables[u] = [table for table in self.tables[u] if v not in table.over]
            self.neighbours[u] = {w for table in self.tables[u] for w in table.over} - {u}
        return tables


def _least(tables: Sequence[Values], shape: tuple[int, ...]) -> tuple[Values, float, Values]:
    """Of the sum of tables over its last dim: the least without the lowest, the lowest, where."""
    total: Values = np.zeros(())
    for values in sorted(tables, key=lambda values: values.size):
        total = total + values
    total = np.broadcast_to(total, shape)
    least = total.min(axis=-1)
    lowest = float(least.min())
    lowest = lowest if math.isfinite(lowest) else 0.0
    return least - lowest, lowest, total.argmin(axis=-1).astype(np.min_scalar_type(shape[-1]))


def _aligned(table: CostTable, axes: tuple[int, ...]) -> Values:
    """The values with a dim for each of some axes, 1 long where the table does not depend on it."""
    order = sorted(range(len(table.over)), key=lambda d: axes.index(table.over[d]))
    lengths = dict(zip(table.over, table.values.shape, strict=True))
    return table.values.transpose(order).reshape([lengths.get(v, 1) for v in axes])
