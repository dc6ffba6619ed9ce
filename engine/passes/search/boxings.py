"""Boxings: the cost of having one tensor in several forms.

Each form is boxed once, in the best order, from the form in which the tensor is made or from one
that exists already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from flowrun.engine.ir.location import Location
from flowrun.engine.passes.search.locations import Locations
from flowrun.engine.passes.search.objective import Array, Objective

MAX_ORDERED_FORMS = 6  # boxings to at most so few forms are tried in every order

LocationNumbers = tuple[int, ...]  # forms by their number, ascending
Held = Mapping[int, Array]  # stage -> bytes that a rank of it holds


class Boxings:
    """Tables of seconds and held bytes; equal ones are one array.

    complete: False if some order of boxings was not tried.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.complete = True
        self._number: dict[Location, int] = {}
        self._seconds: dict[object, dict[tuple[int, int], float]] = {}
        self._tables: dict[object, tuple[Array, Held]] = {}
        self._shown: dict[object, Array] = {}

    def table(
        self,
        name: str,
        maker_forms: tuple[Locations, ...],
        wanted: tuple[Locations, ...],
        ways: Locations = frozenset(),
    ) -> tuple[Array, Held]:
        """Return (seconds, bytes) for each form in which a tensor is made and each set of wanted
        forms.

        maker_forms: forms at its maker.  wanted: sets of forms.  ways: forms through which a boxing
        may go; then the seconds of a set are those of its dearest form, at most what the set costs:
        boxings to several forms may go through one way, which is paid once.
        """
        objective, tensor = self.objective, self.objective.graph.tensors[name]
        keeps = objective.copy_bytes(name, next(iter(maker_forms[0]))) > 0
        times = objective.box_times(name)
        key = (tensor.shape, tensor.dtype, times, keeps, maker_forms, wanted, ways)
        if key not in self._tables:
            have, want = list(dict.fromkeys(maker_forms)), list(dict.fromkeys(wanted))
            seconds, held = self._distinct(name, have, want, ways)
            at = np.ix_([have.index(f) for f in maker_forms], [want.index(f) for f in wanted])
            whole = {stage: each[at] for stage, each in held.items()}
            self._tables[key] = seconds[at], whole
        seconds, held = self._tables[key]
        hidden = objective.hidden.get(name, 0.0)
        if not hidden:
            return seconds, held
        if (id(seconds), hidden) not in self._shown:
            self._shown[id(seconds), hidden] = objective.visible_seconds(seconds, hidden)
        return self._shown[id(seconds), hidden], held

    def _distinct(
        self,
        name: str,
        maker_forms: Sequence[Locations],
        wanted: Sequence[Locations],
        ways: Locations,
    ) -> tuple[Array, Held]:
        """Return the table over forms and sets that occur once."""
        every = list(dict.fromkeys(f for forms in (*maker_forms, *wanted, ways) for f in forms))
        place = {form: k for k, form in enumerate(every)}
        into = self._prices(name, every, [place[way] for way in ways]).T.tolist()
        copies = [self.objective.copy_bytes(name, form) for form in every]
        times = self.objective.box_times(name)
        seconds = np.zeros((len(maker_forms), len(wanted)))
        held = {stage: np.zeros_like(seconds) for stage in dict.fromkeys(f.stage for f in every)}
        known: dict[tuple[LocationNumbers, LocationNumbers], float] = {}
        least, most = (_least_of_dearest, math.inf) if ways else (_least, MAX_ORDERED_FORMS)
        numbers = {f: tuple(sorted(map(place.__getitem__, f))) for f in (*maker_forms, *wanted)}
        for i, existing in enumerate(map(numbers.__getitem__, maker_forms)):
            for j, places in enumerate(map(numbers.__getitem__, wanted)):
                missing = tuple(k for k in places if k not in existing)
                self.complete &= len(missing) <= most
                seconds[i, j] = times * least(into, existing, missing, known)
                for k in missing:
                    held[every[k].stage][i, j] += copies[k]
        return seconds, held

    def _prices(self, name: str, every: Sequence[Location], ways: Sequence[int]) -> Array:
        """Return the seconds from each form to each, possibly through one of `ways`."""
        tensor = self.objective.graph.tensors[name]
        kind = (tensor.shape, tensor.dtype.itemsize)
        known = self._seconds.setdefault(kind, {})
        numbers = [self._number.setdefault(form, len(self._number)) for form in every]
        price = np.zeros((len(every), len(every)))
        for i, a in enumerate(numbers):
            for j, b in enumerate(numbers):
                if (a, b) not in known:
                    known[a, b] = self.objective.box_seconds(name, every[i], every[j])
                price[i, j] = known[a, b]
        for way in ways:
            price = np.minimum(price, price[:, way, None] + price[way])
        return price


def _least(
    into: Sequence[Sequence[float]],
    have: LocationNumbers,
    missing: LocationNumbers,
    known: dict[tuple[LocationNumbers, LocationNumbers], float],
) -> float:
    """Return the least seconds of boxing to several forms in any order, each from any that exists.

    into: seconds to each form, from each.  known: results so far; it grows.
    """
    if not missing:
        return 0.0
    key = (have, missing)
    if key not in known:
        lasts = missing
        if len(missing) > MAX_ORDERED_FORMS:
            lasts = (max(missing, key=lambda f: (min(into[f][h] for h in have), f)),)
        existing = have + missing
        known[key] = min(
            _least(into, have, tuple(k for k in missing if k != f), known)
            + min(into[f][h] for h in existing if h != f)
            for f in lasts
        )
    return known[key]


def _least_of_dearest(
    into: Sequence[Sequence[float]],
    have: LocationNumbers,
    missing: LocationNumbers,
    known: dict[tuple[LocationNumbers, LocationNumbers], float],
) -> float:
    """Return the least seconds of boxing to one of the forms, the dearest.  Arguments: `_least`."""
    return max((_least(into, have, (form,), known) for form in missing), default=0.0)
