"""elimination: the least sum of small tables, each over a few variables.

Non-serial dynamic programming (Bertelè and Brioschi 1972): to eliminate a variable is to keep, for
every choice of its neighbours, the best of its own values; the remainder is a table over the
neighbours.  Variables are eliminated in an order that keeps such tables small.  Chains, trees and a
fan of many branches then cost next to nothing, and the whole is exponential only in the size of the
densest part of the graph.

Equal work is done once: equal tables share one array, and a variable whose tables equal those of
another leaves the same remainder.  So a block that is repeated costs as much as one block; and
along a chain of blocks the remainders soon repeat as well, since a table is kept without its least
value.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from flowrun.engine.passes.layout.elimination_order import LARGE_TABLE_ENTRIES, order_variables

MAX_TABLE_ENTRIES = 1 << 23  # larger tables are not made
LATE_TABLE_ENTRIES = 1 << 10  # nor ones larger than this after the deadline
KEPT_ENTRIES = 1 << 23  # of large remainders, in all, that are kept for variables alike
_QUANTUM_S = 2.0**-46  # costs are multiples of it: sums below 128 are equal in any order

Values = npt.NDArray[np.float64]


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


def minimise(
    sizes: Sequence[int],
    tables: Iterable[CostTable],
    max_entries: int = MAX_TABLE_ENTRIES,
    until: float = math.inf,
    most_large: float = math.inf,
) -> Least:
    """Return values of variables (0 .. sizes[v] - 1) for which the sum of the tables is least.

    sizes: number of values of each variable.  max_entries: if eliminating a variable would make a
    larger table, its neighbours with most neighbours are fixed at the value that looks best for
    each alone; the result is then not proved least.  until: a moment of time.monotonic; from then
    on only small tables are made.  most_large: if more tables would be larger, no choice is made.
    """
    network = _OpenTables(sizes, tables)
    if sum(entries > max_entries for entries in network.foreseen) > most_large:
        return Least((), math.inf, exact=False)
    # (variable, its best value for each choice of its neighbours)
    left: list[tuple[int, CostTable]] = []
    exact = True
    for v in network.order:
        if max_entries > LATE_TABLE_ENTRIES and time.monotonic() >= until:
            max_entries = LATE_TABLE_ENTRIES
        while v in network.tables and network.entries(v) > max_entries:
            exact = False
            u = network.most_joined(v)
            left.append((u, network.fix(u)))
        if v in network.tables:
            left.append((v, network.eliminate(v)))
    choice = [0] * len(sizes)
    for v, best in reversed(left):
        choice[v] = int(best.values[tuple(choice[u] for u in best.over)])
    return Least(tuple(choice), network.constant, exact)


@dataclass(frozen=True, slots=True)
class _Remainder:
    """The result of eliminating a variable.

    tables: those that it was in, kept alive because their ids are the key.  least: its least cost
    for each choice of its neighbours, minus the lowest of all.  best: its value there.
    """

    tables: tuple[CostTable, ...]
    least: Values
    lowest: float
    best: Values


class _OpenTables:
    """The variables not yet eliminated, the tables over them, and the cost so far.

    order: of elimination.  foreseen: the entries of the table that each makes.  tables: variable ->
    the tables of which it is the first to leave, so that they are all of its tables when its turn
    comes (bucket elimination, Dechter 1999).
    _listed: variable -> those of `tables` that have, or had, a table over it.

    A variable of one value has no dim in any table: numpy allows 64 dims, and an op that reads the
    gradients of all weights has more neighbours.
    """

    def __init__(self, sizes: Sequence[int], tables: Iterable[CostTable]) -> None:
        self.sizes = sizes
        self.constant = 0.0
        self._arrays: dict[tuple[tuple[int, ...], bytes], Values] = {}
        self._left: dict[Hashable, _Remainder] = {}
        self._room = KEPT_ENTRIES
        rounded: dict[int, tuple[Values, Values]] = {}
        neighbours: dict[int, set[int]] = {v: set() for v, size in enumerate(sizes) if size > 1}
        given: list[CostTable] = []
        for table in tables:
            if id(table.values) not in rounded:
                values = np.round(table.values / _QUANTUM_S) * _QUANTUM_S
                values = values.reshape([size for size in values.shape if size > 1])
                rounded[id(table.values)] = table.values, self._one(values)
            over = tuple([v for v in table.over if sizes[v] > 1])
            given.append(CostTable(over, rounded[id(table.values)][1]))
            for v in over:
                neighbours[v].update(over)
        for v, near in neighbours.items():
            near.discard(v)
        order = order_variables(sizes, neighbours)
        self.order = list(map(itemgetter(0), order))
        self.foreseen = list(map(itemgetter(1), order))
        self._turn = {v: k for k, v in enumerate(self.order)}
        self.tables: dict[int, list[CostTable]] = {v: [] for v in self.order}
        self._listed: dict[int, set[int]] = {v: set() for v in self.order}
        for table in given:
            self.add(table)

    def add(self, table: CostTable) -> None:
        """Add a table."""
        if table.over:
            first = min(table.over, key=self._turn.__getitem__)
            self.tables[first].append(table)
            for v in table.over:
                self._listed[v].add(first)
        else:
            self.constant += float(table.values)

    def near(self, v: int) -> tuple[int, ...]:
        """Return the neighbours of v, whose turn it is."""
        return tuple(sorted({u for table in self.tables[v] for u in table.over} - {v}))

    def most_joined(self, v: int) -> int:
        """Return which of v and its neighbours has most neighbours."""

        def joined(u: int) -> int:
            lists = (self.tables.get(first, ()) for first in self._listed[u])
            tables = itertools.chain.from_iterable(lists)
            return len({each for table in tables if u in table.over for each in table.over})

        return max((v, *self.near(v)), key=lambda u: (joined(u), u))

    def entries(self, v: int) -> int:
        """Return the entries of the table over v and its neighbours."""
        return math.prod(self._shape((*self.near(v), v)))

    def eliminate(self, v: int) -> CostTable:
        """Eliminate v; return its best value for every choice of its neighbours."""
        near = self.near(v)
        return CostTable(near, self._leave(v, near, self.tables.pop(v)))

    def _leave(self, v: int, near: tuple[int, ...], tables: Sequence[CostTable]) -> Values:
        """Replace some tables of v by its least cost for every choice of its neighbours; return
        v's values.
        """
        axes = (v, *near)
        place = {u: k for k, u in enumerate(axes)}
        whose = sorted((id(t.values), tuple(place[u] for u in t.over)) for t in tables)
        key = (self.sizes[v], *whose)
        leaving = self._left.get(key)
        if leaving is None:
            least, lowest, best = _least(
                [_align(table, axes) for table in tables], self._shape(axes)
            )
            if least.size > LARGE_TABLE_ENTRIES:
                self._room -= least.size
            if kept := self._room >= 0:
                least = self._one(least)
            leaving = _Remainder(tuple(tables), least, lowest, best)
            if kept:
                self._left[key] = leaving
        self.constant += leaving.lowest
        self.add(CostTable(near, leaving.least))
        return leaving.best

    def _shape(self, axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.sizes[v] for v in axes)

    def _one(self, values: Values) -> Values:
        """Return the array that stands for all arrays equal to it."""
        digest = hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).digest()
        return self._arrays.setdefault((values.shape, digest), values)

    def fix(self, v: int) -> CostTable:
        """Eliminate v at the value that would be best if all others were free."""
        tables = self._without(v)
        alone = np.zeros(self.sizes[v])
        for table in tables:
            others = tuple(d for d, u in enumerate(table.over) if u != v)
            alone = alone + table.values.min(axis=others)
        value = int(alone.argmin())
        for table in tables:
            over = tuple(u for u in table.over if u != v)
            values = np.asarray(table.values.take(value, axis=table.over.index(v)))
            self.add(CostTable(over, values))
        return CostTable((), np.array(value))

    def _without(self, v: int) -> list[CostTable]:
        """Remove v, whose turn may be later, and return its tables."""
        found: list[CostTable] = []
        for u in self.tables.keys() & self._listed.pop(v):
            found += [table for table in self.tables[u] if v in table.over]
            self.tables[u] = [table for table in self.tables[u] if v not in table.over]
        del self.tables[v]
        return found


def _least(tables: Sequence[Values], shape: tuple[int, ...]) -> tuple[Values, float, Values]:
    """Return (least minus lowest, lowest, argmin) of the sum of tables over its first dim."""
    total: Values = np.zeros(())
    for values in sorted(tables, key=lambda values: values.size):
        if total.shape == shape:
            total += values
        else:
            total = total + values
    total = np.broadcast_to(total, shape)
    least = total.min(axis=0)
    best = _argmin(total, least).astype(np.min_scalar_type(shape[0]), copy=False)
    lowest = float(least.min())
    if math.isfinite(lowest):
        least -= lowest
        return least, lowest, best
    return least, 0.0, best


def _argmin(total: Values, least: Values) -> npt.NDArray[np.integer]:
    """Return where the least of each column stands first."""
    if least.size < LARGE_TABLE_ENTRIES:
        return np.asarray(total.argmin(axis=0))
    best = np.zeros(least.shape, np.min_scalar_type(len(total)))  # numpy takes 4 times as long
    for k in reversed(range(len(total))):
        np.copyto(best, k, where=total[k] == least)
    return best


def _align(table: CostTable, axes: tuple[int, ...]) -> Values:
    """Return the values with one dim for each of `axes`, of size 1 where the table does not
    depend on it.
    """
    order = sorted(range(len(table.over)), key=lambda d: axes.index(table.over[d]))
    lengths = dict(zip(table.over, table.values.shape, strict=True))
    return table.values.transpose(order).reshape([lengths.get(v, 1) for v in axes])
