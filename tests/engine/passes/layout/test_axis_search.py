import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.boxing.boxing import path_seconds
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import Op, Ref
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import Signature
from flowrun.engine.passes.layout.axis_search import (
    ACTIVATION,
    WEIGHT,
    AxisLocation,
    AxisLocations,
    Problem,
    TensorOnAxis,
    solve,
)

SBPS: tuple[Sbp, ...] = (B, P, S(0), S(1))
LINK = Link(latency_s=1e-4, bytes_per_s=1e9)


def _signature(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[:-1]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 6 ops in a random graph of up to 3 sources, 1 to 3 rows an op, in up to 2 stages."""
    sources = [f"s{k}" for k in range(draw(st.integers(1, 3)))]
    size = st.one_of(st.sampled_from((1 << 12, 1 << 18)), st.integers(1, 1 << 20))
    sizes = {name: draw(size) for name in sources}
    stage = 0
    ops: list[Op] = []
    rows: list[list[tuple[Signature, float]]] = []
    there = list(sources)
    for k in range(draw(st.integers(1, 6))):
        stage = max(stage, draw(st.integers(0, 4)) // 4)
        inputs = draw(st.lists(st.sampled_from(there), min_size=1, max_size=2, unique=True))
        result = f"t{k}"
        sizes[result] = draw(size)
        ops.append(Op(f"op{k}", "op", tuple(map(Ref, inputs)), outputs=(result,), stage=stage))
        row = st.tuples(*[st.sampled_from(SBPS)] * (len(inputs) + 1), st.integers(0, 3))
        least = draw(st.sampled_from((1, 2, 2, 3)))
        drawn = draw(st.lists(row, min_size=least, max_size=3, unique_by=_signature))
        rows.append([(Signature(r[:-2], (r[-2],)), r[-1] * 1e-4) for r in drawn])
        there.append(result)
    known = {name: frozenset({(0, B)}) for name in sources[:1]}
    home = st.lists(st.sampled_from(SBPS[::2]), min_size=1, max_size=2, unique=True)
    homes = {name: [(0, sbp) for sbp in draw(home)] for name in sources[1:]}
    weights = set(sources[2:])

    return Problem(
        ops=ops,
        rows=rows,
        known=known,
        homes=homes,
        like=lambda name: TensorOnAxis((sizes[name],), (), 1),
        box=box,
        intent=lambda name: WEIGHT if name in weights else ACTIVATION,
        alike=lambda stage: 0,
    )


def box(tensor: TensorOnAxis, have: AxisLocation, wanted: AxisLocation) -> float:
    return boxing_seconds(tensor.shape[0], have, wanted)


def alone(name: str) -> TensorOnAxis:
    """No tensor is like another, and each has 4096 bytes."""
    return TensorOnAxis((4096, sum(name.encode())), (), 1)


def boxing_seconds(num_bytes: int, have: AxisLocation, wanted: AxisLocation) -> float:
    """Of a square of numbers on 2 ranks; a crossing to another stage costs once more."""
    seconds = path_seconds((have[1],), (wanted[1],), (2,), (4, 4), num_bytes, [LINK])
    crossing = LINK.message_seconds(num_bytes)
    return seconds + (crossing if have[0] != wanted[0] else 0.0)


# ---- the oracle ----------------------------------------------------------------------------------


class BruteForce:
    """Every choice of rows and homes of a small problem, and what each costs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # of a tensor, the forms there, asked
        self.costs: dict[tuple[str, AxisLocations, AxisLocations], float] = {}
        # all that the readers of a tensor may together ask
        self.could: dict[str, set[AxisLocations]] = {}
        rows = itertools.product(*([row for row, _ in rows] for rows in problem.rows))
        for chosen in rows:
            for name, forms in self.asked(chosen).items():
                self.could.setdefault(name, set()).add(forms)

    def choices(self) -> Iterator[tuple[Sequence[int], Mapping[str, AxisLocation]]]:
        """All rows of all ops, all homes of all sources."""
        sources = [name for name in self.problem.homes if name in self.could]
        for homes in itertools.product(*(self.problem.homes[name] for name in sources)):
            chosen = dict(zip(sources, homes, strict=True))
            for rows in itertools.product(*(range(len(rows)) for rows in self.problem.rows)):
                yield rows, chosen

    def asked(self, rows: Sequence[Signature]) -> dict[str, AxisLocations]:
        """The forms of each tensor that its readers ask for."""
        asked: dict[str, AxisLocations] = {}
        for op, row in zip(self.problem.ops, rows, strict=True):
            for name, sbp in zip(op.inputs, row.inputs, strict=True):
                asked[name] = asked.get(name, frozenset()) | {(op.stage, sbp)}
        return asked

    def total(self, chosen: Sequence[int], homes: Mapping[str, AxisLocation]) -> float:
        """What a choice costs: rows, and every tensor's boxings to all that is asked for, by way of
        anything that could be.
        """
        problem = self.problem
        rows = [legal[at][0] for legal, at in zip(problem.rows, chosen, strict=True)]
        have = {**problem.known, **{name: frozenset({form}) for name, form in homes.items()}}
        for op, row in zip(problem.ops, rows, strict=True):
            have[op.outputs[0] or ""] = frozenset({(op.stage, row.outputs[0])})
        own = sum(legal[at][1] for legal, at in zip(problem.rows, chosen, strict=True))
        return own + sum(
            min(self.boxed(name, have[name], forms) for forms in self.could[name] if forms >= asked)
            for name, asked in self.asked(rows).items()
        )

    def boxed(self, name: str, have: AxisLocations, wanted: AxisLocations) -> float:
        """Cost of boxing to some forms, in the best order, each from the cheapest there is."""
        key = (name, have, wanted)
        if key not in self.costs:
            orders = itertools.permutations(wanted - have)
            self.costs[key] = min(self.in_order(name, have, order) for order in orders)
        return self.costs[key]

    def in_order(self, name: str, have: AxisLocations, order: Iterable[AxisLocation]) -> float:
        there, cost = set(have), 0.0
        for form in order:
            cost += min(priced(self.problem, name, source, form) for source in there)
            there.add(form)
        return cost


def priced(problem: Problem, name: str, have: AxisLocation, wanted: AxisLocation) -> float:
    """Boxing, with the price of undoing a split or of moving a weight."""
    cost = problem.box(problem.like(name), have, wanted)
    intent, split = problem.intent(name), isinstance(have[1], type(S(0)))
    if have[0] == wanted[0] and split and wanted[1] in (B, P):
        return cost + intent.gather_s
    return cost + (intent.move_s if split and have[1] != wanted[1] else 0.0)


# ---- facts ---------------------------------------------------------------------------------------

QUICK = settings(max_examples=200)


@QUICK
@given(problem=problems())
def test_the_search_finds_what_brute_force_finds(problem: Problem) -> None:
    oracle = BruteForce(problem)
    least = min(oracle.total(rows, homes) for rows, homes in oracle.choices())
    solution = solve(problem)
    assert solution.exact
    assert solution.cost == pytest.approx(least, rel=1e-6, abs=1e-9)


@QUICK
@given(problem=problems())
def test_the_cost_is_that_of_the_rows_and_homes_it_names(problem: Problem) -> None:
    solution = solve(problem)
    rows = [
        [row for row, _ in legal].index(chosen)
        for legal, chosen in zip(problem.rows, solution.rows, strict=True)
    ]
    total = BruteForce(problem).total(rows, solution.homes)
    assert solution.cost == pytest.approx(total, rel=1e-6, abs=1e-9)
    for op, row in zip(problem.ops, solution.rows, strict=True):
        for name, sbp in zip(op.inputs, row.inputs, strict=True):
            assert (op.stage, sbp) in solution.forms[name]


def of_activations(ops: Sequence[Op], rows: Any, sources: Sequence[str], sbp: Sbp = B) -> Problem:
    """A problem on one stage whose sources are there with one SBP."""
    return Problem(
        ops=ops,
        rows=rows,
        known={name: frozenset({(0, sbp)}) for name in sources},
        homes={},
        box=box,
        like=alone,
        intent=lambda name: ACTIVATION,
    )


def residual(length: int, choose: random.Random) -> Problem:
    """A residual stream: op k reads what op k-1 and op k-2 made, with all rows of one SBP."""
    ops, rows = [], []
    for k in range(length):
        inputs = [f"t{k - 1}" if k else "s0", *([f"t{k - 2}"] if k > 1 else [])]
        ops.append(Op(f"op{k}", "op", tuple(map(Ref, inputs)), outputs=(f"t{k}",)))
        legal = [Signature((sbp,) * len(inputs), (choose.choice(SBPS),)) for sbp in SBPS]
        rows.append([(row, 0.0) for row in legal])
    return of_activations(ops, rows, ["s0"])


@pytest.mark.parametrize("seed", range(3))
def test_a_long_chain_costs_what_its_shortest_path_costs(seed: int) -> None:
    """Rows of one chain, as a graph of (op, row): its tensors have one reader each."""
    choose = random.Random(f"chain {seed}")
    ops = [Op(f"op{k}", "op", (Ref(f"t{k - 1}"),), outputs=(f"t{k}",)) for k in range(200)]
    rows = [[(Signature((s,), (choose.choice(SBPS),)), 0.0) for s in SBPS] for _ in ops]
    problem = of_activations(ops, rows, ["t-1"])
    cheapest = {(0, B): 0.0}
    for legal in rows:
        costs: dict[AxisLocation, float] = {}
        for row, _ in legal:
            asked, result = (0, row.inputs[0]), (0, row.outputs[0])
            reached = min(c + priced(problem, "", have, asked) for have, c in cheapest.items())
            costs[result] = min(reached, costs.get(result, reached))
        cheapest = costs
    solution = solve(problem)
    assert solution.exact
    assert solution.cost == pytest.approx(min(cheapest.values()))


@pytest.mark.parametrize("seed", range(3))
def test_a_long_residual_stream_is_solved_exactly(seed: int) -> None:
    solution = solve(residual(200, random.Random(f"residual {seed}")))
    assert solution.exact


def test_a_sum_over_many_branches_is_solved_exactly_branch_by_branch() -> None:
    """As in clipping: every gradient is read by its sum of squares and by its update, and all
    updates wait for the sum over all.
    """
    ops, rows = [], []
    names = range(60)
    for k in names:
        ops.append(Op(f"square{k}", "op", (Ref(f"g{k}"),), outputs=(f"q{k}",)))
        rows.append([(Signature((s,), (P if s == S(0) else s,)), 0.0) for s in SBPS])
    ops.append(Op("norm", "op", tuple(Ref(f"q{k}") for k in names), outputs=("norm",)))
    rows.append([(Signature((s,) * 60, (s,)), 0.0) for s in (B, P)])
    for k in names:
        ops.append(Op(f"update{k}", "op", (Ref(f"g{k}"), Ref("norm")), outputs=(f"w{k}",)))
        rows.append([(Signature((s, B), (s,)), 0.0) for s in (B, S(0))])
    solution = solve(of_activations(ops, rows, [f"g{k}" for k in names], P))
    scatter, reduce = boxing_seconds(4096, (0, P), (0, S(0))), boxing_seconds(4096, (0, P), (0, B))
    assert solution.exact
    assert solution.cost == pytest.approx(60 * scatter + reduce)
