"""dual_bound: a cost that no choice of a network can be below.

Tables are over one variable or two.  Messages move cost between tables, and change no sum: a sweep
goes through the variables in order, and each passes on, through every table that it shares with a
later one, the least that the later one's values need of it and of what came before.  What remains
of it is at least its least value, and the bound is the sum of these.  The next sweep goes back.
No sweep lowers the bound; it stays at or below that of a linear program, which for layouts of
blocks in a row is mostly the least cost itself (TRW-S: Kolmogorov 2006, "Convergent tree-reweighted
message passing for energy minimization", section 5).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrun.engine.passes.layout.elimination import CostTable, Values

CLOSE_ENOUGH = 1e-3  # of the cost; a gap below it is not made smaller
_MOST_PAIRS = 60  # of sweeps, there and back
_LEAST_GAIN = 0.1  # of the gap: the last pair is one that closes less


@dataclass(slots=True)
class _SharedTable:
    """A table between two variables, seen from one of them.

    to: the other.  costs: own values first.  sent, got: places of messages there and from there.
    """

    to: int
    costs: Values
    sent: int
    got: int


def lower_bound(
    sizes: Sequence[int], tables: Iterable[CostTable], cost: float, until: float = math.inf
) -> float:
    """Return a bound that no choice can be below, at most `cost`.

    sizes: values of each variable.  tables: over at most two of them; no cost is negative.  cost:
    of a known choice.  until: a moment of time.monotonic, to which sweeps there and back are made;
    one pair at least.
    """
    if math.isinf(cost):
        return 0.0
    sweeps = _Sweeps(sizes, tables, cost)
    bound = 0.0
    for _ in range(_MOST_PAIRS):
        before, bound = bound, max(bound, sweeps.sweep(), sweeps.sweep())
        close = cost - bound <= CLOSE_ENOUGH * cost or bound - before < _LEAST_GAIN * (cost - bound)
        if close or time.monotonic() >= until:
            break
    return min(bound, cost)


class _Sweeps:
    """The messages of a network.

    order: of the variables in the next sweep, by the first with which each shares a table, so that
    sets and sources stand by the ops to which they belong.
    """

    def __init__(self, sizes: Sequence[int], tables: Iterable[CostTable], cost: float) -> None:
        self.own = [np.zeros(size) for size in sizes]
        self.constant = 0.0
        self.messages: list[Values] = []
        self.links: list[list[_SharedTable]] = [[] for _ in sizes]
        for over, costs in _sums(tables, cost).items():
            if len(over) == 2:
                self._link(*over, costs)
            elif over:
                self.own[over[0]] = costs
            else:
                self.constant = float(costs)
        first = [min((link.to for link in links), default=v) for v, links in enumerate(self.links)]
        self.order = sorted(range(len(sizes)), key=lambda v: (min(v, first[v]), v))

    def _link(self, one: int, other: int, costs: Values) -> None:
        there, back = len(self.messages), len(self.messages) + 1
        self.messages += [np.zeros(costs.shape[1]), np.zeros(costs.shape[0])]
        self.links[one].append(_SharedTable(other, costs, there, back))
        self.links[other].append(_SharedTable(one, costs.T, back, there))

    def sweep(self) -> float:
        """Pass messages in order; return the bound.  The next sweep goes the other way."""
        messages, bound = self.messages, self.constant
        passed = bytearray(len(self.links))
        for v in self.order:
            links = self.links[v]
            ahead = [link for link in links if not passed[link.to]]
            here = sum((messages[link.got] for link in links), self.own[v])
            share = 1 / max(len(ahead), len(links) - len(ahead), 1)
            for link in ahead:
                alone = share * here - messages[link.got]
                needed = (link.costs + alone[:, None]).min(axis=0)
                least = float(needed.min())
                messages[link.sent] = needed - least
                bound += least
            bound += (1 - share * len(ahead)) * float(here.min())
            passed[v] = True
        self.order.reverse()
        return bound


def _sums(tables: Iterable[CostTable], cost: float) -> dict[tuple[int, ...], Values]:
    """Return the sum of the tables over the same variables; equal ones are one array.

    No entry is above `cost`: a choice with such a one costs at least as much as the known one.
    """
    parts: dict[tuple[int, ...], list[tuple[Values, bool]]] = {}
    for table in tables:
        over = tuple(sorted(table.over))
        parts.setdefault(over, []).append((table.values, over != table.over))
    known: dict[tuple[tuple[int, bool], ...], Values] = {}
    sums: dict[tuple[int, ...], Values] = {}
    for over, each in parts.items():
        key = tuple((id(values), turned) for values, turned in each)
        if key not in known:
            total = sum(values.T if turned else values for values, turned in each)
            known[key] = np.minimum(total, cost)
        sums[over] = known[key]
    return sums
