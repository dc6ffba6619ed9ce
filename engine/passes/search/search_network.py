"""search: the choice of a network that costs least, or nearly, and by how much at most it is off.

Exact elimination first (layout/elimination.py), which answers for any graph on one axis.  Where too
much hangs together (wide graphs on grids of several axes) the best known choices are improved:
neighbourhoods of a choice (neighbourhoods.py) are themselves small networks, solved until none
gives a better choice.  A lower bound tells the gap that is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrun.engine.passes.layout.elimination import CostTable, Values, lower_bound, minimise
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.neighbourhoods import Neighbourhood, neighbourhoods
from flowrun.engine.passes.search.options import Choice

EXACT_WIDEST = 1 << 21  # entries of a table, where the whole is tried at once
BOUND_WIDEST = 1 << 17  # for the bound
NOTHING = 1e-9  # a gain, relative, that is none


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A choice, what it costs (in seconds, held bytes weighed in), and what none is below."""

    choice: Choice
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """By how much at most the cost is too high, relative; 0: proved least."""
        gap = 1 - self.bound / self.cost if self.cost else 0.0
        return gap if gap > NOTHING else 0.0


def search(
    network: Network,
    relaxed: Callable[[], Network] | None = None,
    byte_s: float = 0.0,
    starts: Iterable[Choice] = (),
) -> SearchResult:
    """The least choice that can be found.  starts: choices that it is not above.

    relaxed: another network that costs no more, for the bound.  byte_s: of a held byte.
    """
    tables = network.tables(byte_s)
    whole = minimise(network.sizes, tables, EXACT_WIDEST)
    if whole.exact and network.complete:
        return SearchResult(whole.choice, whole.cost, whole.cost)
    costs = {choice: _cost(tables, choice) for choice in (*starts, whole.choice)}
    best = min(costs, key=costs.__getitem__)
    best, cost = improved(network, tables, best, costs[best])
    bounds = [0.0]
    if network.complete:
        bounds.append(lower_bound(network.sizes, tables, BOUND_WIDEST))
    if relaxed is not None:
        looser = relaxed()
        bounds.append(lower_bound(looser.sizes, looser.tables(byte_s), BOUND_WIDEST))
    return SearchResult(best, cost, min(cost, max(bounds)))


def improved(
    network: Network, tables: Sequence[CostTable], best: Choice, cost: float
) -> tuple[Choice, float]:
    """A choice and its cost, improved until no neighbourhood has anything better.  tables: those of
    the network, with held bytes weighed in.
    """
    touching: list[list[CostTable]] = [[] for _ in network.sizes]
    for table in tables:
        for v in table.over:
            touching[v].append(table)
    better = True
    while better:
        better = False
        for around in neighbourhoods(network, best):
            choice = _least(network.sizes, touching, best, around)
            found = _cost(tables, choice)
            if found < cost * (1 - NOTHING):
                best, cost, better = choice, found, True
    return best, cost


def _cost(tables: Sequence[CostTable], choice: Choice) -> float:
    return math.fsum(float(t.values[tuple(choice[v] for v in t.over)]) for t in tables)


def _least(
    sizes: Sequence[int],
    touching: Sequence[Sequence[CostTable]],
    best: Choice,
    around: Neighbourhood,
) -> Choice:
    """The least choice of a neighbourhood (nearly, where tables would be wide)."""
    leads = [v for v, values in around.free.items() if len(values) > 1 and v not in around.follows]
    place = {v: k for k, v in enumerate(leads)}
    place |= {v: place[lead] for v, lead in around.follows.items() if lead in place}
    sums: dict[tuple[int, ...], Values] = {}
    for table in {id(t): t for v in place for t in touching[v]}.values():
        at = [around.free.get(v, (best[v],)) for v in table.over]
        places = tuple(place.get(v, -1) for v in table.over)
        over, part = _follow(places, table.values[np.ix_(*at)])
        sums[over] = sums[over] + part if over in sums else part
    choice = list(best)
    for v, values in around.free.items():
        if len(values) == 1:
            choice[v] = values[0]
    lengths = [len(around.free[v]) for v in leads]
    found = minimise(lengths, map(CostTable, sums, sums.values()), around.widest).choice
    for v, k in place.items():
        choice[v] = around.free[v][found[k]]
    return tuple(choice)


def _follow(places: tuple[int, ...], values: Values) -> tuple[tuple[int, ...], Values]:
    """A table over places: without those that are fixed (-1), one dim for each that is there
    twice.
    """
    values = values.reshape([n for n, k in zip(values.shape, places, strict=True) if k >= 0])
    over = [k for k in places if k >= 0]
    while len(set(over)) < len(over):
        k = next(k for k in over if over.count(k) > 1)
        one, other = (i for i, each in enumerate(over) if each == k)
        values = np.moveaxis(np.diagonal(values, axis1=one, axis2=other), -1, one)
        del over[other]
    order = sorted(range(len(over)), key=over.__getitem__)
    return tuple(over[i] for i in order), values.transpose(order)
