"""The minimiser of infer_sbp: it chooses one signature for each op on one axis, such that
boxing costs the fewest seconds.

The choices are a row of every op and a home of every source.  The costs are those of each row
itself, and of boxing each tensor from the form (stage, SBP) in which it is made to all forms that
its readers ask for: each once, in the best order, possibly by way of another form that they could
ask for.  Each of these costs depends on few choices, so it is a table, and elimination.py finds the
choice with the least sum of tables.

Two prices in seconds let intent win over bytes (Intent): gathering a split activation undoes the
division of work that made it, and a weight stays at home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import Broadcast, NdSbp, Partial, Sbp, Split
from flowrun.engine.ir.signature import Signature
from flowrun.engine.passes.layout.elimination import CostTable, Values, minimise

MAX_ORDERED_FORMS = 4  # boxings of one tensor to at most so few forms are tried in every order

AxisLocation = tuple[int, Sbp]  # (stage, SBP on the axis)
AxisLocations = frozenset[AxisLocation]
Box = Callable[[AxisLocation, AxisLocation], float]  # seconds


class Intent(NamedTuple):
    """Seconds that a boxing of a split tensor costs in addition to its bytes.

    gather_s: to gather it.  move_s: to split it otherwise, on its stage or another.
    """

    gather_s: float
    move_s: float


ACTIVATION = Intent(1.0, 0.0)
WEIGHT = Intent(10.0, 10.0)
# bytes decide: whether rows looked up in a table or sums of them travel; how attention over a
# divided length sees all keys and values
FREE = Intent(0.0, 0.0)


class TensorOnAxis(NamedTuple):
    """The facts of a tensor that decide what its boxings cost.  nd_sbp: on the axes before."""

    shape: Shape
    nd_sbp: NdSbp
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A portion of ops to decide on one axis.

    rows: legal signatures of each op, with the cost of each row itself, in seconds.
    known: forms of tensors decided before.
    homes: for a variable or feed not decided yet, its possible homes.
    like: the facts of a tensor.  box: seconds of boxing it from one form to another.
    intent: prices of a tensor.  alike: a stage -> the first on which all boxings cost the same.
    """

    ops: Sequence[Op]
    rows: Sequence[Sequence[tuple[Signature, float]]]
    known: Mapping[str, AxisLocations]
    homes: Mapping[str, Sequence[AxisLocation]]
    like: Callable[[str], TensorOnAxis]
    box: Callable[[TensorOnAxis, AxisLocation, AxisLocation], float]
    intent: Callable[[str], Intent]
    alike: Callable[[int], int] = lambda stage: stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The chosen rows, the homes of sources, and the forms in which each tensor then exists.

    cost: in seconds.  exact: it is proved least.
    """

    rows: tuple[Signature, ...]
    homes: Mapping[str, AxisLocation]
    forms: Mapping[str, AxisLocations]
    cost: float
    exact: bool


@dataclass(frozen=True, slots=True)
class _TensorChoice:
    """The forms of one tensor for each value of a variable of the tables.

    variable: None if there is nothing to choose.
    """

    variable: int | None
    forms: tuple[AxisLocations, ...]


def solve(problem: Problem) -> Solution:
    """Return the rows of least cost for a portion of ops.

    If they are not proved least, return the cheaper of two solutions: one over all rows, one over
    the few rows that split only the first dim.
    """
    first = _solve(problem)
    if first.exact:
        return first
    fewer = [[row for row in rows if not _splits_another(row[0])] for rows in problem.rows]
    if not all(fewer):
        return first
    other = replace(_solve(replace(problem, rows=fewer)), exact=False)
    return min((first, other), key=lambda solution: solution.cost)


def _splits_another(row: Signature) -> bool:
    return any(isinstance(sbp, Split) and sbp.dim for sbp in (*row.inputs, *row.outputs))


def _solve(problem: Problem) -> Solution:
    asked = _reader_forms(problem)
    sources = [name for name in problem.homes if name in asked]
    sizes = [len(rows) for rows in problem.rows] + [len(problem.homes[name]) for name in sources]
    seconds = {id(rows): np.array([s for _, s in rows]) for rows in problem.rows}
    tables = [CostTable((v,), seconds[id(rows)]) for v, rows in enumerate(problem.rows)]
    makers = _maker_forms(problem, sources)
    fans: dict[object, _Fan] = {}  # tensors with equal facts share one, as in repeated blocks
    for name, readers in asked.items():
        forms = makers[name].forms, tuple(reader.forms for reader in readers)
        forms = _on_first_alike(problem.alike, *forms)
        facts, intent = problem.like(name), problem.intent(name)
        if (fan := fans.get((facts, intent, forms))) is None:
            fan = fans[facts, intent, forms] = _fan(partial(problem.box, facts), intent, *forms)
        tables += _boxings(fan, makers[name], readers, sizes)
    least = minimise(sizes, tables)
    rows = tuple(legal[at][0] for legal, at in zip(problem.rows, least.choice, strict=False))
    chosen = least.choice[len(problem.ops) :]
    homes = {n: problem.homes[n][at] for n, at in zip(sources, chosen, strict=False)}
    return Solution(
        rows=rows,
        homes=homes,
        forms=_forms(problem, rows, homes),
        cost=least.cost,
        exact=least.exact,
    )


def _on_first_alike(
    alike: Callable[[int], int],
    maker_forms: Sequence[AxisLocations],
    asked: Sequence[Sequence[AxisLocations]],
) -> tuple[tuple[AxisLocations, ...], tuple[tuple[AxisLocations, ...], ...]]:
    """Return forms that are all on one stage as those of the first stage like it."""
    stages = {stage for forms in (maker_forms, *asked) for each in forms for stage, _ in each}
    first = alike(min(stages))

    def moved(forms: Sequence[AxisLocations]) -> tuple[AxisLocations, ...]:
        if len(stages) > 1 or first in stages:
            return tuple(forms)
        return tuple(frozenset((first, sbp) for _, sbp in each) for each in forms)

    return moved(maker_forms), tuple(map(moved, asked))


def _reader_forms(problem: Problem) -> dict[str, list[_TensorChoice]]:
    """Return the forms that each reader of each tensor asks for, by its rows.

    A row that reads a tensor twice may ask for two forms.
    """
    asked: dict[str, list[_TensorChoice]] = {}
    known: dict[tuple[int, ...], tuple[AxisLocations, ...]] = {}  # equal ops share their rows
    for k, (op, rows) in enumerate(zip(problem.ops, problem.rows, strict=True)):
        inputs = op.inputs
        for name in dict.fromkeys(inputs):
            places = [i for i, other in enumerate(inputs) if other == name]
            key = id(rows), op.stage, *places
            if key not in known:
                read = (frozenset((op.stage, row.inputs[i]) for i in places) for row, _ in rows)
                known[key] = tuple(read)
            asked.setdefault(name, []).append(_TensorChoice(k, known[key]))
    return asked


def _maker_forms(problem: Problem, sources: Sequence[str]) -> dict[str, _TensorChoice]:
    """Return the forms in which every tensor is made, or exists from before."""
    makers = {name: _TensorChoice(None, (forms,)) for name, forms in problem.known.items()}
    for v, name in enumerate(sources, start=len(problem.ops)):
        makers[name] = _TensorChoice(v, tuple(frozenset((home,)) for home in problem.homes[name]))
    for k, (op, rows) in enumerate(zip(problem.ops, problem.rows, strict=True)):
        for j, output in enumerate(op.outputs):
            if output is not None:
                forms = tuple(frozenset(((op.stage, row.outputs[j]),)) for row, _ in rows)
                makers[output] = _TensorChoice(k, forms)
    return makers


@dataclass(frozen=True)
class _Fan:
    """The cost of the boxings of one tensor.

    allowed: for each reader with a choice, an array of dims (sets of forms in which the tensor may
        exist, the reader's rows): 0 if the form that the row reads is in the set, else infinite.
    paid: seconds, an array of dims (forms in which the tensor is made, sets).
    """

    allowed: tuple[Values, ...]
    paid: Values

    @cached_property
    def alone(self) -> Values:
        """The seconds where one reader has a choice: dims (forms in which it is made, its rows)."""
        values: Values = (self.paid[:, :, None] + self.allowed[0]).min(axis=1)
        return values


def _boxings(
    fan: _Fan, maker: _TensorChoice, readers: Sequence[_TensorChoice], sizes: list[int]
) -> list[CostTable]:
    """Return the cost of one tensor's boxings as tables.

    Readers with a choice share one more variable: the set of forms in which the tensor exists.
    Each requires that the set contains its own form.  A single such reader decides the set.
    """
    choosing = [reader.variable for reader in readers if len(set(reader.forms)) > 1]
    if len(choosing) == 1:
        return [_table((maker.variable, choosing[0]), fan.alone)]
    form_set = len(sizes) if choosing else None
    if choosing:
        sizes.append(fan.paid.shape[1])
    tables = [
        _table((form_set, v), allowed) for v, allowed in zip(choosing, fan.allowed, strict=True)
    ]
    return [*tables, _table((maker.variable, form_set), fan.paid)]


def _fan(
    box: Box,
    intent: Intent,
    maker_forms: Sequence[AxisLocations],
    asked: Sequence[Sequence[AxisLocations]],
) -> _Fan:
    """Return the fan of a tensor.

    maker_forms: those in which it may be made.  asked: for each reader, those that it may ask for.
    """
    certain: AxisLocations = frozenset().union(
        *(forms[0] for forms in asked if len(set(forms)) == 1)
    )
    choosing = [forms for forms in asked if len(set(forms)) > 1]
    sets = _unions(certain, choosing)
    allowed = tuple(
        np.where([[each <= asked_for for each in forms] for asked_for in sets], 0.0, math.inf)
        for forms in choosing
    )

    @cache
    def price(have: AxisLocation, wanted: AxisLocation) -> float:
        return box(have, wanted) + _intent_seconds(have, wanted, intent)

    paid = {
        have: [_all_seconds(price, have, asked_for - have) for asked_for in sets]
        for have in dict.fromkeys(maker_forms)
    }
    return _Fan(allowed, np.array([paid[have] for have in maker_forms]))


def _unions(
    certain: AxisLocations, asked: Iterable[Sequence[AxisLocations]]
) -> tuple[AxisLocations, ...]:
    """Return every set of forms that readers may together ask for."""
    sets = {certain: None}
    for forms in asked:
        sets = dict.fromkeys(s | each for s in sets for each in dict.fromkeys(forms))
    return tuple(sets)


def _table(over: tuple[int | None, int | None], values: Values) -> CostTable:
    """Return a table over two choices, without those that have a single value."""
    kept = [d for d, v in enumerate(over) if v is not None]
    if len(kept) < len(over):
        values = values.reshape([values.shape[d] for d in kept])
    return CostTable(tuple(v for v in over if v is not None), values)


def _all_seconds(
    price: Callable[[AxisLocation, AxisLocation], float],
    have: AxisLocations,
    missing: AxisLocations,
) -> float:
    """Return the least seconds of boxing to several forms in any order; each may start from
    those before.
    """
    if not missing:
        return 0.0
    firsts = {form: min(price(h, form) for h in have) for form in missing}
    if len(missing) > MAX_ORDERED_FORMS:
        cheapest = min(firsts, key=lambda form: (firsts[form], str(form)))
        firsts = {cheapest: firsts[cheapest]}
    return min(
        cost + _all_seconds(price, have | {form}, missing - {form}) for form, cost in firsts.items()
    )


def _intent_seconds(have: AxisLocation, wanted: AxisLocation, intent: Intent) -> float:
    """Return the seconds that the intent adds to a boxing."""
    if not isinstance(have[1], Split):
        return 0.0
    if have[0] == wanted[0] and isinstance(wanted[1], Broadcast | Partial):
        return intent.gather_s
    return intent.move_s if have[1] != wanted[1] else 0.0


def _forms(
    problem: Problem, rows: Sequence[Signature], homes: Mapping[str, AxisLocation]
) -> dict[str, AxisLocations]:
    """Return every form of every tensor that is read or made."""
    forms: dict[str, set[AxisLocation]] = {name: {home} for name, home in homes.items()}
    for op, row in zip(problem.ops, rows, strict=True):
        for name, sbp in zip(op.inputs, row.inputs, strict=True):
            forms.setdefault(name, set(problem.known.get(name, ()))).add((op.stage, sbp))
        for output, sbp in zip(op.outputs, row.outputs, strict=True):
            if output is not None:
                forms[output] = {(op.stage, sbp)}
    return {name: frozenset(each) for name, each in forms.items()}
