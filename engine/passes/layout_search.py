"""The minimiser behind infer_sbp: choose one signature for each op, for one axis, so that boxing
costs the fewest seconds.

Dynamic programming over the ops in topological order.  A state says in which forms (stage, SBP)
each live tensor exists; to choose a row boxes what is missing, once for all later readers.  Two
states with the same forms keep the cheaper; a state is dropped if another one could box its way to
all of its forms and still be cheaper (exact, since boxing costs obey the triangle inequality).  If
more than a beam of states survive, the cheapest are kept and `exact` turns False.

Prices, in seconds, that make intent win over bytes: to gather a split activation undoes the
division of work behind it, and a weight stays at home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowrun.engine.graph import Op
from flowrun.engine.ops.signature import Signature
from flowrun.engine.sbp import Broadcast, Partial, Sbp, Split

BEAM, NARROW_BEAM = 1000, 24  # states kept; the narrow beam once WORK pairs of states were compared
WORK = 2_000_000
MOST_ORDERED = 4  # forms of one tensor whose boxings are tried in every order
ACTIVATION_GATHER_S = 1.0
WEIGHT_MOVE_S = 10.0
_TOLERANCE_S = 1e-9  # costs are sums in different orders

Form = tuple[int, Sbp]  # (stage, SBP on the axis)
Forms = frozenset[Form]


@dataclass(frozen=True, slots=True)
class Problem:
    """One chunk of ops to decide, for one axis.

    rows: legal signatures of each op, with the cost of each row itself.
    known: forms of tensors decided before.
    homes: for a variable or feed not decided yet, its possible homes.
    box: seconds from one form to another of a tensor.
    movable: False for variables.
    """

    ops: Sequence[Op]
    rows: Sequence[Sequence[tuple[Signature, float]]]
    known: Mapping[str, Forms]
    homes: Mapping[str, Sequence[tuple[Form, float]]]
    box: Callable[[str, Form, Form], float]
    movable: Callable[[str], bool]
    prices: dict[tuple[str, Form, Form], float] = field(default_factory=dict)  # asked before


class _State(NamedTuple):
    cost: float
    forms: tuple[Forms, ...]  # one for each live tensor
    row: int
    homes: tuple[tuple[str, Form], ...]
    parent: _State | None


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen rows, the homes of sources, every form that each tensor ends up in, and whether it
    is proved least.
    """

    rows: tuple[Signature, ...]
    homes: Mapping[str, Form]
    forms: Mapping[str, Forms]
    cost: float
    exact: bool


def solve(problem: Problem) -> Solution:
    """Least-cost rows for the chunk.

    First with a narrow beam.  Where that cuts something off, its cost is a bound for the search
    proper: a state above it can not become least, for costs only grow.
    """
    found = _search(problem, NARROW_BEAM, math.inf)
    assert found is not None, "without a bound something is found"
    if not found.exact:
        found = _search(problem, BEAM, found.cost) or found
    return found


def _search(problem: Problem, widest: int, bound: float) -> Solution | None:
    certain = _certain(problem)
    # what a reader with one legal row asks for is paid in advance: only readers with a choice keep
    # a tensor in the state
    last_use = {
        name: k
        for k, op in enumerate(problem.ops)
        if len(problem.rows[k]) > 1
        for name in op.inputs
    }
    read = {name for op in problem.ops for name in op.inputs}
    live: list[str] = []
    entered: set[str] = set()
    states = [_State(0.0, (), -1, (), None)]
    exact, work = True, WORK
    for k, op in enumerate(problem.ops):
        for name in dict.fromkeys(op.inputs):
            if name not in live and name not in entered:
                entered.add(name)
                states = [_boxed(problem, s, name, certain) for s in _enter(problem, states, name)]
                live.append(name)
        choice = len(problem.rows[k]) > 1
        positions = [live.index(name) if choice else -1 for name in op.inputs]
        kept = [i for i, name in enumerate(live) if last_use.get(name, -1) > k]
        made = [(j, name) for j, name in enumerate(op.outputs) if name is not None and name in read]
        states = _advance(problem, states, k, op, positions, kept, [j for j, _ in made])
        live = [live[i] for i in kept] + [name for _, name in made]
        entered.update(live)
        for _, name in made:
            at = len(kept) + [n for _, n in made].index(name)
            states = [_boxed(problem, s, name, certain, at) for s in states]
        states = [s for s in states if s.cost <= bound + _TOLERANCE_S]
        states, complete, work = _prune(problem, states, live, work, widest)
        exact = exact and complete
        if not states:  # what would have met the bound was cut off
            return None
    return _trace(problem, min(states, key=lambda s: s.cost), exact)


def _enter(problem: Problem, states: list[_State], name: str) -> list[_State]:
    """A tensor is read for the first time in this chunk: as decided before, or with a choice of
    homes.
    """
    if name in problem.known:
        return [s._replace(forms=(*s.forms, problem.known[name])) for s in states]
    return [
        s._replace(
            cost=s.cost + cost, forms=(*s.forms, frozenset((home,))), homes=(*s.homes, (name, home))
        )
        for s in states
        for home, cost in problem.homes[name]
    ]


def _certain(problem: Problem) -> dict[str, Forms]:
    """Forms that a reader with a single legal row will ask for: boxed at once, so that they are no
    choice to carry along.
    """
    wanted: dict[str, set[Form]] = {}
    for op, rows in zip(problem.ops, problem.rows, strict=True):
        if len(rows) == 1:
            for name, sbp in zip(op.inputs, rows[0][0].inputs, strict=True):
                wanted.setdefault(name, set()).add((op.stage, sbp))
    return {name: frozenset(forms) for name, forms in wanted.items()}


def _boxed(
    problem: Problem, state: _State, name: str, certain: Mapping[str, Forms], at: int = -1
) -> _State:
    """The state with what will certainly be asked of a tensor already there; `at`: the tensor's
    place among the live ones.
    """
    have = state.forms[at]
    missing = certain.get(name, frozenset()) - have
    if not missing:
        return state
    forms = list(state.forms)
    forms[at] = have | missing
    return state._replace(cost=state.cost + _all(problem, name, have, missing), forms=tuple(forms))


def _all(problem: Problem, name: str, have: Forms, missing: Forms) -> float:
    """Least cost of boxing to several forms, in any order: each may start from those before it."""
    if not missing:
        return 0.0
    firsts = {form: min(_box(problem, name, h, form) for h in have) for form in missing}
    if len(missing) > MOST_ORDERED:
        cheapest = min(firsts, key=lambda form: (firsts[form], str(form)))
        firsts = {cheapest: firsts[cheapest]}
    return min(
        cost + _all(problem, name, have | {form}, missing - {form}) for form, cost in firsts.items()
    )


def _advance(
    problem: Problem,
    states: list[_State],
    k: int,
    op: Op,
    positions: list[int],
    kept: list[int],
    made: list[int],
) -> list[_State]:
    """All states after op k."""
    names = op.inputs
    steps = [
        (
            index,
            row_cost,
            [
                (name, position, (op.stage, sbp))
                for name, position, sbp in zip(names, positions, row.inputs, strict=True)
                if position >= 0
            ],
            [frozenset(((op.stage, row.outputs[j]),)) for j in made],
        )
        for index, (row, row_cost) in enumerate(problem.rows[k])
    ]
    best: dict[tuple[Forms, ...], _State] = {}
    for state in states:
        for index, row_cost, asked, new in steps:
            forms = list(state.forms)
            cost = state.cost + row_cost
            for name, position, wanted in asked:
                if wanted not in forms[position]:
                    cost += min(_box(problem, name, have, wanted) for have in forms[position])
                    forms[position] = forms[position] | {wanted}
            key = (*(forms[i] for i in kept), *new)
            if key not in best or cost < best[key].cost:
                best[key] = _State(cost, key, index, (), state)
    return list(best.values())


def _box(problem: Problem, name: str, have: Form, wanted: Form) -> float:
    asked = (name, have, wanted)
    price = problem.prices.get(asked)
    if price is None:
        price = problem.prices[asked] = _price(problem, *asked)
    return price


def _price(problem: Problem, name: str, have: Form, wanted: Form) -> float:
    """Seconds of a boxing, and what intent adds to them."""
    cost = problem.box(name, have, wanted)
    if (
        have[0] == wanted[0]
        and isinstance(have[1], Split)
        and isinstance(wanted[1], Broadcast | Partial)
    ):
        cost += ACTIVATION_GATHER_S if problem.movable(name) else WEIGHT_MOVE_S
    elif not problem.movable(name) and isinstance(have[1], Split) and have[1] != wanted[1]:
        cost += WEIGHT_MOVE_S
    return cost


def _prune(
    problem: Problem, states: list[_State], live: list[str], work: int, widest: int
) -> tuple[list[_State], bool, int]:
    """Drop what another state beats even after boxing to the same forms; then keep at most a beam.

    work: pairs of states that may still be compared; (states, whether none was cut off, work left).
    """
    if len(states) == 1:
        return states, True, work
    states.sort(key=lambda s: s.cost)
    kept: list[_State] = []
    beam = widest if work > 0 else NARROW_BEAM
    for state in states:
        work -= len(kept)
        if not any(_dominates(problem, other, state, live) for other in kept):
            kept.append(state)
        if len(kept) > beam:
            return kept[:beam], False, work
        if work <= 0:
            beam = NARROW_BEAM
    return kept, True, work


def _dominates(problem: Problem, a: _State, b: _State, live: list[str]) -> bool:
    spare = b.cost - a.cost + _TOLERANCE_S
    for name, have, wanted in zip(live, a.forms, b.forms, strict=True):
        for form in wanted:
            if form not in have:
                spare -= min(_box(problem, name, source, form) for source in have)
                if spare < 0:
                    return False
    return True


def _trace(problem: Problem, final: _State, exact: bool) -> Solution:
    """Follow the parents back, then replay the choice to learn all forms of every tensor."""
    chain: list[_State] = []
    state: _State | None = final
    while state is not None and state.row >= 0:
        chain.append(state)
        state = state.parent
    chain.reverse()
    homes: dict[str, Form] = {}
    for step in chain:
        assert step.parent is not None
        homes.update(step.parent.homes)
    rows = tuple(problem.rows[k][step.row][0] for k, step in enumerate(chain))
    forms: dict[str, set[Form]] = {}
    for op, row in zip(problem.ops, rows, strict=True):
        for name, sbp in zip(op.inputs, row.inputs, strict=True):
            if name not in forms:
                forms[name] = set(problem.known.get(name) or {homes[name]})
            forms[name].add((op.stage, sbp))
        for made, sbp in zip(op.outputs, row.outputs, strict=True):
            if made is not None:
                forms[made] = {(op.stage, sbp)}
    return Solution(
        rows, homes, {name: frozenset(f) for name, f in forms.items()}, final.cost, exact
    )
