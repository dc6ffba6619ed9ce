"""Locations at which a tensor exists for each choice, and those that its readers ask
for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowrun.engine.ir.location import Location
from flowrun.engine.ir.sbp import B, NdSbp
from flowrun.engine.passes.search.options import AxisSignatures, inputs_of, outputs_of

MAX_SETS = 400  # sets of forms of one tensor that are tried

Locations = frozenset[Location]


@dataclass(frozen=True, slots=True)
class Choices:
    """The forms of one tensor for each value of a variable (None: there is one value)."""

    variable: int | None
    forms: tuple[Locations, ...]

    @property
    def number(self) -> int:
        """Its variable, where there is one."""
        assert self.variable is not None
        return self.variable


class LocationsOfRows:
    """The forms for each row of an op.  Equal answers are one object; RowTables keeps the rows."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Locations, ...]] = {}
        self._several: dict[int, bool] = {}

    def of_homes(self, homes: tuple[NdSbp, ...], stage: int) -> tuple[Locations, ...]:
        """Return the forms of a source, for each of its possible homes."""
        key = (homes, stage)
        if key not in self._known:
            self._known[key] = tuple(frozenset((Location(stage, home),)) for home in homes)
        return self._known[key]

    def is_choice(self, forms: tuple[Locations, ...]) -> bool:
        """Return whether the forms differ.  forms: an answer of this object."""
        if id(forms) not in self._several:
            self._several[id(forms)] = len(set(forms)) > 1
        return self._several[id(forms)]

    def of_output(
        self, rows: Sequence[AxisSignatures], output: int, stage: int
    ) -> tuple[Locations, ...]:
        """Return the forms of output number `output` of an op on a stage, for each of its rows."""
        key = (id(rows), stage, "out", (output,))
        if key not in self._known:
            self._known[key] = tuple(
                frozenset((Location(stage, outputs_of(r)[output]),)) for r in rows
            )
        return self._known[key]

    def of_input(
        self, rows: Sequence[AxisSignatures], places: tuple[int, ...], stage: int
    ) -> tuple[Locations, ...]:
        """Return the forms of a tensor that an op on a stage reads, for each of its rows.

        places: the positions of the tensor among the op's inputs.
        """
        key = (id(rows), stage, "in", places)
        if key not in self._known:
            read = map(inputs_of, rows)
            self._known[key] = tuple(
                frozenset(Location(stage, nd[i]) for i in places) for nd in read
            )
        return self._known[key]


def unions(certain: Locations, readers: Iterable[Choices]) -> tuple[tuple[Locations, ...], bool]:
    """Return (every set of forms that readers may together ask for, whether these are all).

    certain: forms that are in every set.  If there are too many sets, they are those of the fewest
    forms, and the one that is B for all.
    """
    options = [tuple(dict.fromkeys(reader.forms)) for reader in readers]
    if math.prod(map(len, options)) <= 64 * MAX_SETS:
        sets = {certain: None}
        for forms in options:
            sets = dict.fromkeys(s | f for s in sets for f in forms)
        if len(sets) <= MAX_SETS:
            return tuple(sets), True
    return _small_unions(certain, options), False


def _small_unions(
    certain: Locations, options: Sequence[tuple[Locations, ...]]
) -> tuple[Locations, ...]:
    every = list(dict.fromkeys(form for forms in options for f in forms for form in f))
    sets: dict[Locations, None] = {}
    for size in (1, 2, 3):
        if math.comb(len(every), size) + len(sets) > MAX_SETS and sets:
            break
        for some in itertools.combinations(every, size):
            union = certain | frozenset(some)
            if all(any(f <= union for f in forms) for forms in options):
                sets[union] = None
    whole = {Location(at.stage, (B,) * len(at.nd_sbp)) for at in every}
    sets[certain | frozenset(whole)] = None
    return tuple(sets)
