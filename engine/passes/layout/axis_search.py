"""The minimiser behind infer_sbp: choose one signature for each op, for one axis, so that boxing
costs the fewest seconds.

What is chosen: a row of every op, a home of every source.  What is paid: each row itself; and for
each tensor to box it from the form (stage, SBP) in which it is made to all forms that its readers
ask for, each once, in the best order, perhaps by way of one that they could ask for.  Every such
cost depends on a few choices alone, so it is a table, and elimination.py finds the choice for which
the tables add up to least.

Prices, in seconds, that make intent win over bytes (Intent): to gather a split activation undoes
the division of work behind it, and a weight stays at home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.sbp import Broadcast, Partial, Sbp, Split
from flowrun.engine.ops.signature import Signature
from flowrun.engine.passes.layout.elimination import CostTable, Values, minimise

MOST_ORDERED = 4  # forms of one tensor whose boxings are tried in every order

AxisLocation = tuple[int, Sbp]  # (stage, SBP on the axis)
AxisLocations = frozenset[AxisLocation]
Box = Callable[[AxisLocation, AxisLocation], float]  # seconds


class Intent(NamedTuple):
    """Seconds that it counts, beside its bytes, to gather a split tensor, or to split it otherwise
    on its stage or another.
    """

    gather_s: float
    move_s: float


ACTIVATION = Intent(1.0, 0.0)
WEIGHT = Intent(10.0, 10.0)
ROWS = Intent(0.0, 0.0)  # of a table, looked up: bytes decide whether they or their sums travel


class BoxingKey(Hashable, Protocol):
    """What boxings of a tensor on one stage depend on, beside their SBPs."""

    def seconds(self, have: Sbp, wanted: Sbp) -> float:
        """From one to the other."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One chunk of ops to decide, for one axis.

    rows: legal signatures of each op, with the cost of each row itself.
    known: forms of tensors decided before.
    homes: for a variable or feed not decided yet, its possible homes.
    box: seconds from one form to another of a tensor.
    like: of a tensor on one stage, all that boxings there depend on beside their SBPs.
    intent: of a tensor.
    """

    ops: Sequence[Op]
    rows: Sequence[Sequence[tuple[Signature, float]]]
    known: Mapping[str, AxisLocations]
    homes: Mapping[str, Sequence[tuple[AxisLocation, float]]]
    box: Callable[[str, AxisLocation, AxisLocation], float]
    like: Callable[[str, int], BoxingKey]
    intent: Callable[[str], Intent]


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen rows, the homes of sources, every form that each tensor ends up in, and whether it
    is proved least.
    """

    rows: tuple[Signature, ...]
    homes: Mapping[str, AxisLocation]
    forms: Mapping[str, AxisLocations]
    cost: float
    exact: bool


@dataclass(frozen=True, slots=True)
class _TensorChoice:
    """What a variable of the tables says of one tensor: the forms behind each of its values.

    variable: None where there is nothing to choose.
    """

    variable: int | None
    forms: tuple[AxisLocations, ...]


def solve(problem: Problem) -> Solution:
    """Least-cost rows for the chunk.  Where they are not proved least, the cheaper of two: of all
    rows, and of those that split no dim but the first, of which there are few.
    """
    found = _solve(problem)
    if found.exact:
        return found
    fewer = [[row for row in rows if not _splits_another(row[0])] for rows in problem.rows]
    if not all(fewer):
        return found
    other = replace(_solve(replace(problem, rows=fewer)), exact=False)
    return min((found, other), key=lambda solution: solution.cost)


def _splits_another(row: Signature) -> bool:
    return any(isinstance(sbp, Split) and sbp.dim for sbp in (*row.inputs, *row.outputs))


def _solve(problem: Problem) -> Solution:
    asked = _asked(problem)
    sources = [name for name in problem.homes if name in asked]
    sizes = [len(rows) for rows in problem.rows] + [len(problem.homes[name]) for name in sources]
    own = [[cost for _, cost in choices] for choices in problem.rows]
    own += [[cost for _, cost in problem.homes[name]] for name in sources]
    tables = [CostTable((v,), np.array(costs)) for v, costs in enumerate(own)]
    made = _made(problem, sources)
    for name, readers in asked.items():
        tables += _boxings(problem, name, made[name], readers, sizes)
    least = minimise(sizes, tables)
    rows = tuple(legal[at][0] for legal, at in zip(problem.rows, least.choice, strict=False))
    chosen = least.choice[len(problem.ops) :]
    homes = {n: problem.homes[n][at][0] for n, at in zip(sources, chosen, strict=False)}
    return Solution(rows, homes, _forms(problem, rows, homes), least.cost, least.exact)


def _asked(problem: Problem) -> dict[str, list[_TensorChoice]]:
    """What each reader of each tensor asks for, by its rows.  A row that reads a tensor twice may
    ask for two forms.
    """
    asked: dict[str, list[_TensorChoice]] = {}
    for k, (op, rows) in enumerate(zip(problem.ops, problem.rows, strict=True)):
        inputs = op.inputs
        for name in dict.fromkeys(inputs):
            places = [i for i, other in enumerate(inputs) if other == name]
            forms = tuple(frozenset((op.stage, row.inputs[i]) for i in places) for row, _ in rows)
            asked.setdefault(name, []).append(_TensorChoice(k, forms))
    return asked


def _made(problem: Problem, sources: Sequence[str]) -> dict[str, _TensorChoice]:
    """The forms in which every tensor is made, or in which it is there from before."""
    made = {name: _TensorChoice(None, (forms,)) for name, forms in problem.known.items()}
    for v, name in enumerate(sources, start=len(problem.ops)):
        made[name] = _TensorChoice(v, tuple(frozenset((home,)) for home, _ in problem.homes[name]))
    for k, (op, rows) in enumerate(zip(problem.ops, problem.rows, strict=True)):
        for j, output in enumerate(op.outputs):
            if output is not None:
                forms = tuple(frozenset(((op.stage, row.outputs[j]),)) for row, _ in rows)
                made[output] = _TensorChoice(k, forms)
    return made


@dataclass(frozen=True, slots=True)
class _Fan:
    """What one tensor's boxings cost.

    allowed: of each reader with a choice, 0 where what it asks for is there, else infinite; dims:
    sets of forms in which the tensor may be there, the reader's rows.  paid: dims: the forms in
    which it is made, the sets.
    """

    allowed: tuple[Values, ...]
    paid: Values


def _boxings(
    problem: Problem,
    name: str,
    made: _TensorChoice,
    readers: Sequence[_TensorChoice],
    sizes: list[int],
) -> list[CostTable]:
    """What one tensor's boxings cost, as tables.

    Readers with a choice meet in one more variable: the set of forms in which the tensor is there.
    Each asks that its own be among them.
    """
    fan = _fan_of(problem, name, made.forms, tuple(reader.forms for reader in readers))
    choosing = [reader.variable for reader in readers if len(set(reader.forms)) > 1]
    there = len(sizes) if choosing else None
    if choosing:
        sizes.append(fan.paid.shape[1])
    tables = [_table((there, v), allowed) for v, allowed in zip(choosing, fan.allowed, strict=True)]
    return [*tables, _table((made.variable, there), fan.paid)]


def _fan_of(
    problem: Problem,
    name: str,
    made: tuple[AxisLocations, ...],
    asked: tuple[tuple[AxisLocations, ...], ...],
) -> _Fan:
    """made: the forms in which a tensor may be made.  asked: of each reader, those that it may ask
    for.
    """
    stages = {form[0] for forms in (made, *asked) for each in forms for form in each}
    intent = problem.intent(name)
    if len(stages) > 1:
        return _fan(partial(problem.box, name), intent, made, asked)
    like, (made, *readers) = problem.like(name, *stages), map(_on_a_stage, (made, *asked))
    return _fan_on_a_stage(like, intent, made, tuple(readers))


def _on_a_stage(forms: tuple[AxisLocations, ...]) -> tuple[AxisLocations, ...]:
    return tuple(frozenset([(0, sbp) for _, sbp in each]) for each in forms)


@lru_cache(maxsize=1 << 12)
def _fan_on_a_stage(
    like: BoxingKey,
    intent: Intent,
    made: tuple[AxisLocations, ...],
    asked: tuple[tuple[AxisLocations, ...], ...],
) -> _Fan:
    """Of all tensors that are alike: those of repeated blocks, and of other layouts of the model.
    The stage is written 0.
    """

    def box(have: AxisLocation, wanted: AxisLocation) -> float:
        return like.seconds(have[1], wanted[1])

    return _fan(box, intent, made, asked)


def _fan(
    box: Box,
    intent: Intent,
    made: Sequence[AxisLocations],
    asked: Sequence[Sequence[AxisLocations]],
) -> _Fan:
    """See _fan_of."""
    certain: AxisLocations = frozenset().union(
        *(forms[0] for forms in asked if len(set(forms)) == 1)
    )
    choosing = [forms for forms in asked if len(set(forms)) > 1]
    there = _unions(certain, choosing)
    allowed = tuple(
        np.where([[each <= all_of for each in forms] for all_of in there], 0.0, math.inf)
        for forms in choosing
    )

    @cache
    def price(have: AxisLocation, wanted: AxisLocation) -> float:
        return box(have, wanted) + _counts(have, wanted, intent)

    paid = {
        have: [_all(price, have, all_of - have) for all_of in there] for have in dict.fromkeys(made)
    }
    return _Fan(allowed, np.array([paid[have] for have in made]))


def _unions(
    certain: AxisLocations, asked: Iterable[Sequence[AxisLocations]]
) -> tuple[AxisLocations, ...]:
    """Every set of forms that readers may together ask for."""
    sets = {certain: None}
    for forms in asked:
        sets = dict.fromkeys(s | each for s in sets for each in dict.fromkeys(forms))
    return tuple(sets)


def _table(over: tuple[int | None, int | None], values: Values) -> CostTable:
    """A table over two choices, without those where there is nothing to choose: 1 long then."""
    kept = [d for d, v in enumerate(over) if v is not None]
    if len(kept) < len(over):
        values = values.reshape([values.shape[d] for d in kept])
    return CostTable(tuple(v for v in over if v is not None), values)


def _all(
    price: Callable[[AxisLocation, AxisLocation], float],
    have: AxisLocations,
    missing: AxisLocations,
) -> float:
    """Least cost of boxing to several forms, in any order: each may start from those before it."""
    if not missing:
        return 0.0
    firsts = {form: min(price(h, form) for h in have) for form in missing}
    if len(missing) > MOST_ORDERED:
        cheapest = min(firsts, key=lambda form: (firsts[form], str(form)))
        firsts = {cheapest: firsts[cheapest]}
    return min(cost + _all(price, have | {form}, missing - {form}) for form, cost in firsts.items())


def _counts(have: AxisLocation, wanted: AxisLocation, intent: Intent) -> float:
    """What it adds to the seconds of a boxing."""
    if not isinstance(have[1], Split):
        return 0.0
    if have[0] == wanted[0] and isinstance(wanted[1], Broadcast | Partial):
        return intent.gather_s
    return intent.move_s if have[1] != wanted[1] else 0.0


def _forms(
    problem: Problem, rows: Sequence[Signature], homes: Mapping[str, AxisLocation]
) -> dict[str, AxisLocations]:
    """Every form of every tensor that is read or made."""
    forms: dict[str, set[AxisLocation]] = {name: {home} for name, home in homes.items()}
    for op, row in zip(problem.ops, rows, strict=True):
        for name, sbp in zip(op.inputs, row.inputs, strict=True):
            forms.setdefault(name, set(problem.known.get(name, ()))).add((op.stage, sbp))
        for made, sbp in zip(op.outputs, row.outputs, strict=True):
            if made is not None:
                forms[made] = {(op.stage, sbp)}
    return {name: frozenset(found) for name, found in forms.items()}
