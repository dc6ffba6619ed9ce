"""Forms: in which layouts a tensor is there, by what is chosen; and what its readers ask for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrun.engine.ir.sbp import B, NdSbp
from flowrun.engine.passes.search.objective import Form
from flowrun.engine.passes.search.rows import AxisSignatures, inputs_of, outputs_of

MOST_SETS = 400  # forms of one tensor that are there together: sets that are tried

Forms = frozenset[Form]


@dataclass(frozen=True, slots=True)
class Choices:
    """The forms of one tensor behind each value of a variable (None: there is one value)."""

    variable: int | None
    forms: tuple[Forms, ...]


class FormsOfRows:
    """The forms behind each row of an op.  Equal answers are one object; rows: kept by Rows."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Forms, ...]] = {}
        self._several: dict[int, bool] = {}

    def at(self, homes: tuple[NdSbp, ...], stage: int) -> tuple[Forms, ...]:
        """Of what lives in one of some homes."""
        key = (homes, stage)
        if key not in self._known:
            self._known[key] = tuple(frozenset(((stage, home),)) for home in homes)
        return self._known[key]

    def several(self, forms: tuple[Forms, ...]) -> bool:
        """Whether there is something to choose.  forms: what this object has answered."""
        if id(forms) not in self._several:
            self._several[id(forms)] = len(set(forms)) > 1
        return self._several[id(forms)]

    def made(self, rows: Sequence[AxisSignatures], stage: int, output: int) -> tuple[Forms, ...]:
        """Of one output."""
        key = (id(rows), stage, "out", (output,))
        if key not in self._known:
            self._known[key] = tuple(frozenset(((stage, outputs_of(r)[output]),)) for r in rows)
        return self._known[key]

    def read(
        self, rows: Sequence[AxisSignatures], stage: int, places: tuple[int, ...]
    ) -> tuple[Forms, ...]:
        """Of one tensor, which stands at these places among the inputs."""
        key = (id(rows), stage, "in", places)
        if key not in self._known:
            read = map(inputs_of, rows)
            self._known[key] = tuple(frozenset((stage, nd[i]) for i in places) for nd in read)
        return self._known[key]


def unions(certain: Forms, readers: Iterable[Choices]) -> tuple[tuple[Forms, ...], bool]:
    """Every set of forms that readers may together ask for, beside those that are certain; and
    whether these are all.  Where they are too many, those of the fewest forms, and B in all.
    """
    options = [tuple(dict.fromkeys(reader.forms)) for reader in readers]
    if math.prod(map(len, options)) <= 64 * MOST_SETS:
        sets = {certain: None}
        for forms in options:
            sets = dict.fromkeys(s | f for s in sets for f in forms)
        if len(sets) <= MOST_SETS:
            return tuple(sets), True
    return _small_unions(certain, options), False


def _small_unions(certain: Forms, options: Sequence[tuple[Forms, ...]]) -> tuple[Forms, ...]:
    every = list(dict.fromkeys(form for forms in options for f in forms for form in f))
    sets: dict[Forms, None] = {}
    for size in (1, 2, 3):
        if math.comb(len(every), size) + len(sets) > MOST_SETS and sets:
            break
        for some in itertools.combinations(every, size):
            there = certain | frozenset(some)
            if all(any(f <= there for f in forms) for forms in options):
                sets[there] = None
    whole = {(form[0], (B,) * len(form[1])) for form in every}
    sets[certain | frozenset(whole)] = None
    return tuple(sets)
