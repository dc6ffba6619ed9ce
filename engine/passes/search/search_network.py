"""search: the choice of a network that costs least, or nearly, and a bound on what it costs too
much.

Exact elimination comes first (layout/elimination.py); it solves any graph on one axis.  For dense
graphs on grids of several axes it is too large, and the best known choices are improved instead:
neighbourhoods of a choice (neighbourhoods.py) are small networks, solved until none gives a better
choice.  A lower bound says how large the remaining gap is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowrun.engine.passes.layout.elimination import CostTable, Values, lower_bound, minimise
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.neighbourhoods import Neighbourhood, neighbourhoods
from flowrun.engine.passes.search.options import Choice

EXACT_MAX_ENTRIES = 1 << 21  # entries of a table while the whole network is eliminated
BOUND_MAX_ENTRIES = 1 << 17  # the same for the bound
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
        """The share by which the cost may be too high; 0: proved least."""
        gap = 1 - self.bound / self.cost if self.cost else 0.0
        return gap if gap > MIN_RELATIVE_GAIN else 0.0


def search(
    network: Network,
    relaxed: Callable[[], Network] | None = None,
    byte_s: float = 0.0,
    starts: Iterable[Choice] = (),
) -> SearchResult:
    """Return the cheapest choice that can be found.

    relaxed: makes another network that costs no more, for the bound.  byte_s: price of a held
    byte.  starts: choices that the result is not above.
    """
    tables = network.tables(byte_s)
    whole = minimise(network.sizes, tables, EXACT_MAX_ENTRIES)
    if whole.exact and network.complete:
        return SearchResult(whole.choice, whole.cost, whole.cost)
    costs = {choice: _cost(tables, choice) for choice in (*starts, whole.choice)}
    best = min(costs, key=costs.__getitem__)
    best, cost = improve(network, tables, best, costs[best])
    bounds = [0.0]
    if network.complete:
        bounds.append(lower_bound(network.sizes, tables, BOUND_MAX_ENTRIES))
    if relaxed is not None:
        looser = relaxed()
        bounds.append(lower_bound(looser.sizes, looser.tables(byte_s), BOUND_MAX_ENTRIES))
    return SearchResult(best, cost, min(cost, max(bounds)))


def improve(
    network: Network, tables: Sequence[CostTable], best: Choice, cost: float
) -> tuple[Choice, float]:
    """Improve a choice until no neighbourhood has a better one; return it with its cost.

    tables: those of the network, with held bytes priced in.  best, cost: the choice to begin with,
    and its cost.
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
            price = _cost(tables, choice)
            if price < cost * (1 - MIN_RELATIVE_GAIN):
                best, cost, better = choice, price, True
    return best, cost


def _cost(tables: Sequence[CostTable], choice: Choice) -> float:
    return math.fsum(float(t.values[tuple(choice[v] for v in t.over)]) for t in tables)


def _least(
    sizes: Sequence[int],
    touching: Sequence[Sequence[CostTable]],
    best: Choice,
    around: Neighbourhood,
) -> Choice:
    """Return the cheapest choice of a neighbourhood (nearly, if tables would be too wide)."""
    leads = [v for v, values in around.free.items() if len(values) > 1 and v not in around.follows]
    place = {v: k for k, v in enumerate(leads)}
    place |= {v: place[lead] for v, lead in around.follows.items() if lead in place}
    touched = {id(t): t for v in place for t in touching[v]}.values()
    sums = _sum_tables(touched, best, around, place)
    choice = list(best)
    for v, values in around.free.items():
        if len(values) == 1:
            choice[v] = values[0]
    lengths = [len(around.free[v]) for v in leads]
    least = minimise(lengths, map(CostTable, sums, sums.values()), around.max_entries).choice
    for v, k in place.items():
        choice[v] = around.free[v][least[k]]
    return tuple(choice)


def _sum_tables(
    tables: Iterable[CostTable], best: Choice, around: Neighbourhood, place: Mapping[int, int]
) -> dict[tuple[int, ...], Values]:
    """Return places of leads -> sum of all tables over them, on what a neighbourhood leaves free.

    place: a free variable -> the lead that it follows, by number.
    """
    sums: dict[tuple[int, ...], Values] = {}
    for table in tables:
        at = [around.free.get(v, (best[v],)) for v in table.over]
        places = tuple(place.get(v, -1) for v in table.over)
        over, part = _follow(places, table.values[np.ix_(*at)])
        sums[over] = sums[over] + part if over in sums else part
    return sums


def _follow(places: tuple[int, ...], values: Values) -> tuple[tuple[int, ...], Values]:
    """Return a table over places, without fixed ones (-1) and with one dim for each repeated
    place.
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
