"""search: the choice of a network that costs least, or nearly, and by how much at most it is off.

Exact elimination first (passes/elimination.py), which answers for any graph on one axis.  Where too
much hangs together (wide graphs on grids of several axes) the best known choices are improved:
neighbourhoods of a choice (one axis of all ops; a module on all axes) are themselves small
networks, solved until none gives a better choice.  A lower bound tells the gap that is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowrun.engine.passes.auto.network import Network
from flowrun.engine.passes.elimination import Table, lower_bound, minimise

EXACT_WIDEST = 1 << 21  # entries of a table, where the whole is tried at once
NEAR_WIDEST = 1 << 17  # in a neighbourhood, and for the bound
NOTHING = 1e-9  # a gain, relative, that is none

Choice = tuple[int, ...]
Allowed = Sequence[Sequence[int]]  # of every variable, the values that it may take


@dataclass(frozen=True, slots=True)
class Found:
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
    relaxed: Network | None = None,
    byte_s: float = 0.0,
    starts: Iterable[Choice] = (),
) -> Found:
    """The least choice that can be found.  starts: choices that it is not above.

    relaxed: another network that costs no more, for the bound.  byte_s: of a held byte.
    """
    tables = network.tables(byte_s)
    whole = minimise(network.sizes, tables, EXACT_WIDEST)
    if whole.exact and network.complete:
        return Found(whole.choice, whole.cost, whole.cost)
    costs = {choice: _cost(tables, choice) for choice in (*starts, whole.choice)}
    best = min(costs, key=costs.__getitem__)
    cost = costs[best]
    improved = True
    while improved:
        improved = False
        for allowed in _neighbourhoods(network, best):
            choice = _within(network.sizes, tables, allowed, NEAR_WIDEST)
            found = _cost(tables, choice)
            if found < cost * (1 - NOTHING):
                best, cost, improved = choice, found, True
    bounds = [0.0]
    if network.complete:
        bounds.append(lower_bound(network.sizes, tables, NEAR_WIDEST))
    if relaxed is not None:
        bounds.append(lower_bound(relaxed.sizes, relaxed.tables(byte_s), NEAR_WIDEST))
    return Found(best, cost, min(cost, max(bounds)))


def _cost(tables: Sequence[Table], choice: Choice) -> float:
    return math.fsum(float(t.values[tuple(choice[v] for v in t.over)]) for t in tables)


def _within(sizes: Sequence[int], tables: Sequence[Table], allowed: Allowed, widest: int) -> Choice:
    """The least choice among allowed values (nearly, where tables would be wider)."""
    free = {v: k for k, v in enumerate(v for v, values in enumerate(allowed) if len(values) > 1)}
    left = []
    for table in tables:
        over = tuple(v for v in table.over if v in free)
        if over:
            values = table.values[np.ix_(*(allowed[v] for v in table.over))]
            left.append(
                Table(tuple(free[v] for v in over), values.reshape([len(allowed[v]) for v in over]))
            )
    found = minimise([len(allowed[v]) for v in free], left, widest).choice
    choice = [values[0] for values in allowed]
    for v, k in free.items():
        choice[v] = allowed[v][found[k]]
    return tuple(choice)


# ---------------------------------------------------------------------------- neighbourhoods


def _neighbourhoods(network: Network, best: Choice) -> Iterator[Allowed]:
    num_axes = len(network.homes[0][0]) if network.homes else len(network.rows[0][0])
    for axis in range(num_axes) if num_axes > 1 else ():
        yield _one_axis(network, best, axis)
    for free in _modules(network):
        yield _free(network, best, free)


def _one_axis(network: Network, best: Choice, axis: int) -> Allowed:
    """All rows and homes that are as they are on every other axis."""
    allowed: list[Sequence[int]] = [
        [
            k
            for k, option in enumerate(options)
            if all(a == axis or s == options[now][a] for a, s in enumerate(option))
        ]
        for options, now in zip((*network.rows, *network.homes), best, strict=False)
    ]
    return _with_sets(network, best, allowed)


def _free(network: Network, best: Choice, ops: frozenset[int]) -> Allowed:
    """All rows of some ops, all homes of what they read."""
    read = {name for v in ops for name in network.ops[v].inputs}
    sources = {len(network.ops) + k for k, n in enumerate(network.sources) if n in read}
    allowed: list[Sequence[int]] = [
        range(size) if v in ops or v in sources else [best[v]]
        for v, size in enumerate(network.sizes[: len(network.ops) + len(network.sources)])
    ]
    return _with_sets(network, best, allowed)


def _with_sets(network: Network, best: Choice, allowed: list[Sequence[int]]) -> Allowed:
    """The sets that the readers' allowed rows may ask for."""
    for there, readers in network.sets:
        assert there.variable is not None
        asked = [
            dict.fromkeys(r.forms[k] for k in allowed[r.variable])  # type: ignore[index]
            for r in readers
        ]
        possible = frozenset().union(*(f for forms in asked for f in forms))
        certain = frozenset.intersection(*there.forms)
        values = [
            k
            for k, forms in enumerate(there.forms)
            if forms - certain <= possible
            and all(any(f <= forms for f in options) for options in asked)
        ]
        now = best[there.variable]
        allowed.append(values if now in values or not values else [now, *values])
        if not values:
            allowed[-1] = [now]
    return allowed


def _modules(network: Network) -> Iterator[frozenset[int]]:
    """The ops of each module, in order; those of two modules that follow each other."""
    groups: dict[str, list[int]] = {}
    for v, op in enumerate(network.ops):
        groups.setdefault(".".join(op.module.split(".")[:3]), []).append(v)
    for ops in groups.values():
        yield frozenset(ops)
    for one, other in zip(list(groups.values()), list(groups.values())[1:], strict=False):
        yield frozenset((*one, *other))
