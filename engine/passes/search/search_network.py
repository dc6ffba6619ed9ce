"""search: the choice of a network that costs least, or nearly, and a bound on what it costs too
much.

Exact elimination comes first (layout/elimination.py); it solves any graph on one axis.  For dense
graphs on grids of several axes it is too large.  There the best known choice is improved axis by
axis: all rows and homes that do not change on any other axis are a small network, which is solved,
until no axis gives a better choice.  A lower bound says how large the remaining gap is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrun.engine.passes.layout.elimination import CostTable, Values, minimise
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.dual_bound import lower_bound
from flowrun.engine.passes.search.options import Choice

# entries of a table while the whole network is eliminated, and one axis of it
EXACT_MAX_ENTRIES, AXIS_MAX_ENTRIES = 1 << 21, 1 << 20
# tables larger than that with which a truncated elimination still finds what is worth improving
MOST_LARGE = 64
MIN_RELATIVE_GAIN = 1e-9  # smaller gains are rounding errors


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A choice, its cost (in seconds, with held bytes priced in), and a lower bound of every
    choice.
    """

    choice: Choice
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """The most by which the cost may exceed the least, as a share of that; 0: proved least."""
        if self.cost <= self.bound * (1 + MIN_RELATIVE_GAIN):
            return 0.0
        return self.cost / self.bound - 1 if self.bound > 0 else math.inf

    @property
    def proof(self) -> str:
        """What is known of the gap, in words; a percentage is rounded up."""
        if math.isinf(self.gap):
            return "not proved least"
        most = math.ceil(1000 * self.gap) / 10
        return f"at most {most:.1f}% above the least" if most else "proved least"


def search(
    network: Network,
    relaxed: Callable[[], Network] | None = None,
    byte_s: float = 0.0,
    starts: Iterable[Choice] = (),
    until: float = math.inf,
) -> SearchResult:
    """Return the cheapest choice that can be found.

    relaxed: makes another network that costs no more, for the bound where this one is not complete.
    byte_s: price of a held byte.  starts: choices that the result is not above.  until: a moment of
    time.monotonic; what is left then is done by small tables: the result is less good, and so is
    its bound.
    """
    tables = network.tables(byte_s)
    known = {choice: _cost(tables, choice) for choice in starts}
    most_large = MOST_LARGE if known else math.inf
    whole = minimise(network.sizes, tables, EXACT_MAX_ENTRIES, until, most_large)
    if whole.exact and network.complete:
        return SearchResult(whole.choice, whole.cost, whole.cost)
    if whole.choice:
        known[whole.choice] = _cost(tables, whole.choice)
    best = min(known, key=known.__getitem__)
    best, cost = improve(network, tables, best, known[best], until)
    if not network.complete and relaxed is not None:
        network = relaxed()
        tables = network.tables(byte_s)
    bound = lower_bound(network.sizes, tables, cost, until) if network.complete else 0.0
    return SearchResult(best, cost, bound)


def improve(
    network: Network,
    tables: Sequence[CostTable],
    best: Choice,
    cost: float,
    until: float = math.inf,
) -> tuple[Choice, float]:
    """Improve a choice until no axis has a better one, or the time is over; return it with its
    cost.

    tables: those of the network, with held bytes priced in.  best, cost: the choice to begin with,
    and its cost.
    """
    num_axes = len(network.options.rows[0][0])
    left = num_axes if num_axes > 1 else 0  # elimination of one axis is the search of the whole
    axis = 0
    while left and time.monotonic() < until:
        choice = _least_on(axis, network, tables, best)
        price, left = _cost(tables, choice), left - 1
        if price < cost * (1 - MIN_RELATIVE_GAIN):
            best, cost, left = choice, price, num_axes - 1  # this axis has its best
        axis = (axis + 1) % num_axes
    return best, cost


def _cost(tables: Sequence[CostTable], choice: Choice) -> float:
    return math.fsum(float(t.values[tuple(choice[v] for v in t.over)]) for t in tables)


def _least_on(axis: int, network: Network, tables: Sequence[CostTable], best: Choice) -> Choice:
    """Return the cheapest choice that differs from the best on one axis alone (nearly, if tables
    would be too wide).
    """
    free = _rows_on(axis, network, best)
    free += network.sets_of(free, best)
    sums = _sums_of(tables, free)
    sizes = [len(values) for values in free]
    least = minimise(sizes, map(CostTable, sums, sums.values()), AXIS_MAX_ENTRIES).choice
    return tuple(values[k] for values, k in zip(free, least, strict=True))


def _rows_on(axis: int, network: Network, best: Choice) -> list[Sequence[int]]:
    """Return the rows and homes that differ from the best on one axis alone.  Equal ones are one
    object.
    """
    free: list[Sequence[int]] = []
    known: dict[tuple[int, int], Sequence[int]] = {}
    for options, k in zip((*network.options.rows, *network.options.homes), best, strict=False):
        if (id(options), k) not in known:
            others = [sbps[:axis] + sbps[axis + 1 :] for sbps in options]
            known[id(options), k] = [n for n, at in enumerate(others) if at == others[k]]
        free.append(known[id(options), k])
    return free


def _sums_of(
    tables: Sequence[CostTable], free: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], Values]:
    """Return the sum of the tables over the same variables, at their free values; equal ones are
    one array.
    """
    parts: dict[tuple[int, ...], Values] = {}
    totals: dict[tuple[int, int], Values] = {}
    sums: dict[tuple[int, ...], Values] = {}
    for table in tables:
        key = (id(table.values), *(id(free[v]) for v in table.over))
        if key not in parts:
            parts[key] = table.values[np.ix_(*(free[v] for v in table.over))]
        total = parts[key]
        if (before := sums.get(table.over)) is not None:
            pair = (id(before), id(total))
            if pair not in totals:
                totals[pair] = before + total
            total = totals[pair]
        sums[table.over] = total
    return sums
