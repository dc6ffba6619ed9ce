"""Network: a layout problem as variables and tables over them (layout/elimination.py).

Every table has seconds and bytes, so that the price of a byte can change without building it again.
make_network.py builds the network of a graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrun.engine.passes.layout.elimination import CostTable
from flowrun.engine.passes.search.locations import Choices, Locations
from flowrun.engine.passes.search.objective import Array
from flowrun.engine.passes.search.options import Choice, Options

BYTES_PER_SECOND = 1e12  # bytes that count as a second if only bytes count


@dataclass(frozen=True, slots=True)
class Term:
    """A table in two currencies.  bytes: held by a rank of `stage`."""

    over: tuple[int, ...]
    seconds: Array
    bytes: Array
    stage: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """The variables of a layout and the costs of their values.

    sizes: number of values of every variable: ops and sources, as in options, then sets.
    sets: for each tensor that several ops read, the set of its forms, and the readers.
    complete: False if some tensor's sets, or orders of boxings, are not all there.
    """

    options: Options
    sizes: tuple[int, ...]
    terms: tuple[Term, ...]
    sets: tuple[tuple[Choices, tuple[Choices, ...]], ...]
    complete: bool

    def tables(self, byte_s: float = 0.0) -> list[CostTable]:
        """Return all terms in seconds; equal ones stay one array.

        byte_s: price of a byte that a rank of any stage holds; infinite: only bytes count, and
        BYTES_PER_SECOND of them are a second.
        """
        weighed: dict[tuple[int, int], Array] = {}
        for term in self.terms:
            key = (id(term.seconds), id(term.bytes))
            if key not in weighed:
                weighed[key] = _weigh(term, byte_s)
        return [CostTable(t.over, weighed[id(t.seconds), id(t.bytes)]) for t in self.terms]

    def cost(self, choice: Sequence[int]) -> tuple[float, float]:
        """Return (seconds of all stages, bytes of the rank that holds most) of a choice."""
        seconds: list[float] = []
        held: dict[int, list[float]] = {}
        for term in self.terms:
            where = tuple(choice[v] for v in term.over)
            seconds.append(float(term.seconds[where]))
            held.setdefault(term.stage, []).append(float(term.bytes[where]))
        return math.fsum(seconds), max(map(math.fsum, held.values()), default=0.0)

    def with_sets(self, chosen: Choice) -> Choice:
        """Return rows and homes with the smallest sets of forms that hold all that readers ask for.

        chosen: one of the starts of the network, if the network does not have all sets.
        """
        choice = list(chosen)
        for form_set, readers in self.sets:
            asked = frozenset().union(*(r.forms[choice[r.number]] for r in readers))
            enough = ((len(forms), k) for k, forms in enumerate(form_set.forms) if asked <= forms)
            choice.append(min(enough)[1])
        return tuple(choice)

    def sets_of(self, free: Sequence[Sequence[int]], best: Choice) -> list[list[int]]:
        """Return the sets that the readers' allowed rows may ask for, and those of a choice.

        free: the rows allowed for each op.
        """
        allowed = []
        known: dict[tuple[int, ...], list[int]] = {}  # of tensors alike; by ids
        for form_set, readers in self.sets:
            now = best[form_set.number]
            facts = ((id(r.forms), id(free[r.number])) for r in readers)
            key = (id(form_set.forms), now, *itertools.chain.from_iterable(facts))
            if key not in known:
                asked = [dict.fromkeys(r.forms[k] for k in free[r.number]) for r in readers]
                values = _sets_asked(form_set.forms, asked)
                known[key] = values if now in values else [now, *values]
            allowed.append(known[key])
        return allowed


def _sets_asked(sets: Sequence[Locations], asked: Sequence[Iterable[Locations]]) -> list[int]:
    """Return which sets readers may ask for.  asked: what each of them may."""
    possible = frozenset().union(*(f for forms in asked for f in forms))
    certain = frozenset.intersection(*sets)
    return [
        k
        for k, forms in enumerate(sets)
        if forms - certain <= possible and all(any(f <= forms for f in each) for each in asked)
    ]


def _weigh(term: Term, byte_s: float) -> Array:
    if math.isinf(byte_s):
        return np.where(np.isinf(term.seconds), math.inf, term.bytes / BYTES_PER_SECOND)
    return term.seconds + byte_s * term.bytes if byte_s else term.seconds
