"""The minimiser against brute force, and against greedy choice, on random small problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.boxing import path_seconds
from flowrun.engine.cost.hardware import Link
from flowrun.engine.graph import Op, Ref
from flowrun.engine.ops.signature import Signature
from flowrun.engine.passes.layout_search import (
    ACTIVATION_GATHER_S,
    WEIGHT_MOVE_S,
    Form,
    Problem,
    solve,
)
from flowrun.engine.sbp import B, P, S, Sbp

SBPS: tuple[Sbp, ...] = (B, P, S(0), S(1))
LINK = Link(latency_s=1e-4, bytes_per_s=1e9)


def _signature(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[:-1]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 6 ops in a random graph of up to 3 sources, 1 to 3 rows an op, in up to 2 stages."""
    sources = [f"s{k}" for k in range(draw(st.integers(1, 3)))]
    sizes = {name: draw(st.integers(1, 1 << 20)) for name in sources}
    stage = 0
    ops: list[Op] = []
    rows: list[list[tuple[Signature, float]]] = []
    there = list(sources)
    for k in range(draw(st.integers(1, 6))):
        stage = max(stage, draw(st.integers(0, 4)) // 4)
        inputs = draw(st.lists(st.sampled_from(there), min_size=1, max_size=2, unique=True))
        made = f"t{k}"
        sizes[made] = draw(st.integers(1, 1 << 20))
        ops.append(Op(f"op{k}", "op", tuple(map(Ref, inputs)), outputs=(made,), stage=stage))
        row = st.tuples(*[st.sampled_from(SBPS)] * (len(inputs) + 1), st.integers(0, 3))
        least = draw(st.sampled_from((1, 2, 2, 3)))
        drawn = draw(st.lists(row, min_size=least, max_size=3, unique_by=_signature))
        rows.append([(Signature(r[:-2], (r[-2],)), r[-1] * 1e-4) for r in drawn])
        there.append(made)
    known = {name: frozenset({(0, B)}) for name in sources[:1]}
    home = st.lists(st.sampled_from(SBPS[::2]), min_size=1, max_size=2, unique=True)
    homes = {name: [((0, sbp), 0.0) for sbp in draw(home)] for name in sources[1:]}
    weights = set(sources[2:])

    def box(name: str, have: Form, wanted: Form) -> float:
        return boxing_seconds(sizes[name], have, wanted)

    return Problem(ops, rows, known, homes, box, lambda name: name not in weights)


def boxing_seconds(num_bytes: int, have: Form, wanted: Form) -> float:
    """Of a square of numbers on 2 ranks; a crossing to another stage costs once more."""
    seconds = path_seconds((have[1],), (wanted[1],), (2,), (4, 4), num_bytes, LINK)
    crossing = LINK.latency_s + num_bytes / LINK.bytes_per_s
    return seconds + (crossing if have[0] != wanted[0] else 0.0)


# ---- the oracle ----------------------------------------------------------------------------------


def priced(problem: Problem, name: str, have: Form, wanted: Form) -> float:
    """Boxing, with the price of undoing a split or of moving a weight."""
    cost = problem.box(name, have, wanted)
    movable, split = problem.movable(name), isinstance(have[1], type(S(0)))
    if have[0] == wanted[0] and split and wanted[1] in (B, P):
        return cost + (ACTIVATION_GATHER_S if movable else WEIGHT_MOVE_S)
    return cost + (WEIGHT_MOVE_S if not movable and split and have[1] != wanted[1] else 0.0)


def added(problem: Problem, name: str, have: set[Form], wanted: Iterable[Form]) -> float:
    """Cost of boxing to some forms, in the given order, each from the cheapest there is."""
    cost = 0.0
    for form in wanted:
        if form not in have:
            cost += min(priced(problem, name, source, form) for source in have)
            have.add(form)
    return cost


def asked_by_all(problem: Problem) -> dict[str, set[Form]]:
    """Forms that readers without a choice ask for: boxed first, in the best order."""
    wanted: dict[str, set[Form]] = {}
    for op, rows in zip(problem.ops, problem.rows, strict=True):
        if len(rows) == 1:
            for name, sbp in zip(op.inputs, rows[0][0].inputs, strict=True):
                wanted.setdefault(name, set()).add((op.stage, sbp))
    return wanted


def total(problem: Problem, chosen: Sequence[int], homes: Mapping[str, Form]) -> float:
    """What a choice of rows and homes costs."""
    forms: dict[str, set[Form]] = {name: set(known) for name, known in problem.known.items()}
    forms |= {name: {form} for name, form in homes.items()}
    certain, cost = asked_by_all(problem), 0.0
    read = {name for op in problem.ops for name in op.inputs}
    for name in [*forms, *(op.outputs[0] or "" for op in problem.ops)]:
        if name not in forms:
            (k,) = (i for i, op in enumerate(problem.ops) if op.outputs == (name,))
            forms[name] = {(problem.ops[k].stage, problem.rows[k][chosen[k]][0].outputs[0])}
        if name in read:
            orders = itertools.permutations(sorted(certain.get(name, ()), key=str))
            ways = [(added(problem, name, set(forms[name]), order), order) for order in orders]
            cost += min(way for way, _ in ways)
            forms[name] |= certain.get(name, set())
    for op, rows, row in zip(problem.ops, problem.rows, chosen, strict=True):
        signature, own = rows[row]
        cost += own
        for name, sbp in zip(op.inputs, signature.inputs, strict=True):
            cost += added(problem, name, forms[name], [(op.stage, sbp)])
    return cost


def every_choice(problem: Problem) -> Iterator[tuple[Sequence[int], Mapping[str, Form]]]:
    """All rows of all ops, all homes of all sources."""
    read = {name for op in problem.ops for name in op.inputs}
    sources = [name for name in problem.homes if name in read]
    for homes in itertools.product(*(problem.homes[name] for name in sources)):
        chosen = dict(zip(sources, (form for form, _ in homes), strict=True))
        for rows in itertools.product(*(range(len(rows)) for rows in problem.rows)):
            yield rows, chosen


def greedy(problem: Problem) -> float:
    """Op by op, the row that costs least so far."""
    read = [name for op in problem.ops for name in op.inputs if name in problem.homes]
    homes = {name: problem.homes[name][0][0] for name in read}
    chosen = [0] * len(problem.ops)
    for k in range(len(problem.ops)):
        upto = Problem(
            problem.ops[: k + 1], problem.rows[: k + 1], problem.known, problem.homes,
            problem.box, problem.movable,
        )  # fmt: skip
        tries = [[*chosen[:k], row] for row in range(len(problem.rows[k]))]
        chosen[k] = min(tries, key=lambda rows: total(upto, rows, homes))[k]
    return total(problem, chosen, homes)


# ---- facts ---------------------------------------------------------------------------------------

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@QUICK
@given(problem=problems())
def test_the_search_finds_what_brute_force_finds(problem: Problem) -> None:
    least = min(total(problem, rows, homes) for rows, homes in every_choice(problem))
    found = solve(problem)
    assert found.exact
    assert found.cost == pytest.approx(least, rel=1e-6, abs=1e-9)


@QUICK
@given(problem=problems())
def test_the_cost_is_that_of_the_rows_and_homes_it_names(problem: Problem) -> None:
    found = solve(problem)
    rows = [
        [row for row, _ in legal].index(chosen)
        for legal, chosen in zip(problem.rows, found.rows, strict=True)
    ]
    assert found.cost == pytest.approx(total(problem, rows, found.homes), rel=1e-6, abs=1e-9)
    for op, row in zip(problem.ops, found.rows, strict=True):
        for name, sbp in zip(op.inputs, row.inputs, strict=True):
            assert (op.stage, sbp) in found.forms[name]


@QUICK
@given(problem=problems())
def test_the_search_is_never_above_greedy(problem: Problem) -> None:
    assert solve(problem).cost <= greedy(problem) + 1e-9


def chain(length: int, choose: random.Random) -> Problem:
    """A residual stream: op k reads what op k-1 and op k-2 made, with all rows of one SBP."""
    ops, rows = [], []
    for k in range(length):
        inputs = [f"t{k - 1}" if k else "s0", *([f"t{k - 2}"] if k > 1 else [])]
        ops.append(Op(f"op{k}", "op", tuple(map(Ref, inputs)), outputs=(f"t{k}",)))
        legal = [Signature((sbp,) * len(inputs), (choose.choice(SBPS),)) for sbp in SBPS]
        rows.append([(row, 0.0) for row in legal])

    def box(name: str, have: Form, wanted: Form) -> float:
        return boxing_seconds(4096, have, wanted)

    return Problem(ops, rows, {"s0": frozenset({(0, B)})}, {}, box, lambda name: True)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_chain_is_solved_exactly_and_never_above_greedy(seed: int) -> None:
    problem = chain(60, random.Random(f"chain {seed}"))
    found = solve(problem)
    assert found.exact
    assert found.cost <= greedy(problem) + 1e-9
