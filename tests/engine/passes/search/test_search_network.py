import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.network import Level
from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Feed,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    Variable,
)
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, NdSbp, S
from flowrun.engine.passes.search import locations
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.dual_bound import lower_bound
from flowrun.engine.passes.search.make_network import make_network
from flowrun.engine.passes.search.objective import Objective
from flowrun.engine.passes.search.options import (
    AxisSignatures,
    Options,
    RowTables,
    inputs_of,
    outputs_of,
)
from flowrun.engine.passes.search.search_network import SearchResult, improve, search
from flowrun.engine.passes.search.search_sbp import BYTES_ALONE, WEIGHTS, search_by_memory
from flowrun.engine.strategy import Auto, Strategy

GRIDS = ((2, 2), (2, 3), (3, 2), (4, 1), (4,))
SIZE = 64
MOST = 200  # combinations, where the update has one row
QUICK = settings(max_examples=60)
UNARY = ("aten.relu.default", "aten.t.default", "aten.neg.default")
BINARY = ("aten.mm.default", "aten.add.Tensor", "aten.mul.Tensor")


class Few(RowTables):
    """Some rows of every op, and some homes of every source."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy, draw: st.DrawFn) -> None:
        super().__init__(graph, strategy)
        self.left = MOST
        free = [v for v in graph.variables if v.kind != "state"]
        self.few_homes = {s.tensor: self._some(super(Few, self).homes(s), draw) for s in free}
        self.few_homes |= {
            f.tensor: self._some(super(Few, self).homes(f), draw) for f in graph.feeds
        }
        lives = {s for some in self.few_homes.values() for s in some}
        self.few = {}
        for op in graph.ops:
            rows = super().of(op)
            if op.phase == UPDATE:
                rows = tuple(row for row in rows if outputs_of(row)[0] in lives)
                self.few[op.name] = rows
                self.left //= max(1, len(rows))
            else:
                self.few[op.name] = self._some(rows, draw)

    def _some(self, options: Sequence, draw: st.DrawFn) -> tuple:  # type: ignore[type-arg]
        count = draw(st.integers(1, max(1, min(len(options), 4, self.left))))
        self.left //= count
        at = st.lists(st.integers(0, len(options) - 1), min_size=count, max_size=count, unique=True)
        return tuple(options[k] for k in draw(at))

    def of(self, op: Op) -> tuple[AxisSignatures, ...]:
        return self.few[op.name]

    def homes(self, source: Variable | Feed) -> tuple:  # type: ignore[type-arg]
        return self.few_homes[source.tensor]


@st.composite
def problems(draw: st.DrawFn) -> tuple[LogicalGraph, Strategy, Few, Objective]:
    """Up to 12 ops: products, sums and the update of one weight, forward, then backward."""
    names = ["x", "w"]
    ops: list[Op] = []
    num_ops = draw(st.integers(1, 11))
    for k in range(num_ops):
        target = draw(st.sampled_from(UNARY + BINARY))
        read = [draw(st.sampled_from(names)) for _ in range(1 if target in UNARY else 2)]
        phase = FORWARD if k < num_ops // 2 else BACKWARD
        ops.append(Op(f"t{k}", target, tuple(map(Ref, read)), outputs=(f"t{k}",), phase=phase))
        names.append(f"t{k}")
    update = (Ref("w"), Ref(names[-1]), Ref("m"))
    numbers = (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.0), ("nesterov", False))
    ops.append(Op("update", "flow.sgd", update, numbers, outputs=("w'", "m'"), phase=UPDATE))
    shapes = [*names, "m", "w'", "m'"]
    graph = LogicalGraph(
        tuple(ops),
        {name: LogicalTensor(name, (SIZE, SIZE), torch.float32) for name in shapes},
        (Variable("w", "w", "parameter", "w'"), Variable("m/w", "m", "state", "m'", of="w")),
        (Feed("x", "x"),),
    )
    auto = Auto(
        enabled=True,
        computation_cost_ratio=draw(st.sampled_from((0.0, 0.3, 1.0))),
        wait_time=draw(st.sampled_from((None, 0.0, 1e-5))),
        trunk=draw(st.booleans()),
        sbp_collector=draw(st.booleans()),
        memory=draw(st.sampled_from(tuple(WEIGHTS))),
    )
    hardware = replace(Hardware(), levels=(Level(0, 1e-6, 1.5e9),))
    grid = draw(st.sampled_from(GRIDS))
    axes = tuple(zip("xy", grid, strict=False))
    placement = Placement(axes, tuple(range(math.prod(grid))))
    names_of_axes = tuple(name for name, _ in axes)
    strategy = Strategy(names_of_axes, (placement,), auto=auto, hardware=hardware)
    few, objective = Few(graph, strategy, draw), Objective(graph, strategy)
    least = {op.name: float(objective.row_seconds(op, few.of(op)).min()) for op in graph.ops}
    objective.hide(least)
    return graph, strategy, few, objective


def brute_force(graph: LogicalGraph, rows: Few, objective: Objective, byte_s: float) -> float:
    """The least over all combinations of rows and homes; every tensor's boxings one by one."""
    free = [(s.tensor, rows.homes(s)) for s in (graph.variables[0], *graph.feeds)]
    options = [rows.of(op) for op in graph.ops]
    shape = [len(o) for o in options] + [len(homes) for _, homes in free]
    at = {name: len(options) + k for k, (name, _) in enumerate(free)} | {"m": len(options)}
    total = np.zeros(shape)

    def add(over: Sequence[int], value: object) -> None:
        """A function of the options at some places."""
        nonlocal total
        actual = np.empty([shape[v] for v in over])
        for where in np.ndindex(*actual.shape):
            actual[where] = value(*where)  # type: ignore[operator]
        order = sorted(range(len(over)), key=over.__getitem__)
        dims = [shape[v] if v in over else 1 for v in range(len(shape))]
        total = total + actual.transpose(order).reshape(dims)

    def form(name: str, k: int) -> Location:
        """In which a tensor is made, by option k of its maker."""
        maker = graph.producer.get(name)
        if maker is None:
            return Location(0, dict(free)["w" if name == "m" else name][k])
        return Location(0, outputs_of(rows.of(maker)[k])[maker.outputs.index(name)])

    for v, op in enumerate(graph.ops):
        seconds, held = objective.row_seconds(op, options[v]), objective.row_bytes(op, options[v])
        add([v], lambda k, s=seconds, h=held: s[k] + byte_s * h[k])
    weight, state = graph.variables
    for name, homes in free:
        if name == "w":
            both = [sum(objective.home_bytes(s, h) for s in (weight, state)) for h in homes]
            add([at[name]], lambda k, b=both: byte_s * b[k])
    for name in graph.consumers:
        maker = graph.producer.get(name)
        source = graph.ops.index(maker) if maker else at[name]
        readers = [
            v
            for v, op in enumerate(graph.ops)
            if name in op.inputs and not (op.phase == UPDATE and name in ("w", "m"))
        ]
        asks = {
            v: [
                frozenset(
                    Location(0, nd)
                    for n, nd in zip(graph.ops[v].inputs, inputs_of(r), strict=True)
                    if n == name
                )
                for r in options[v]
            ]
            for v in readers
        }
        could = {frozenset().union(*some) for some in itertools.product(*map(set, asks.values()))}
        hidden = objective.hidden.get(name, 0.0)

        @cache
        def price(
            have: Location, wanted: frozenset[Location], name: str = name, hidden: float = hidden
        ) -> float:
            missing, best = wanted - {have}, math.inf
            for order in itertools.permutations(missing):
                there, cost = {have}, 0.0
                for f in order:
                    cost += min(objective.box_seconds(name, h, f) for h in there)
                    there.add(f)
                best = min(best, cost)
            kept = sum(objective.copy_bytes(name, f) for f in missing)
            return float(objective.visible_seconds(best, hidden)) + byte_s * kept

        if objective.auto.sbp_collector:
            many = len(readers) > 1

            def paid(  # type: ignore[no-untyped-def]
                k: int, *chosen: int, name=name, asks=asks, could=could, price=price, many=many
            ) -> float:
                asked = frozenset().union(
                    *(a[c] for a, c in zip(asks.values(), chosen, strict=True))
                )
                return min(
                    price(form(name, k), s) for s in could if asked == s or (many and asked <= s)
                )

            if readers:
                add([source, *readers], paid)
        else:
            for v in readers:
                add([source, v], lambda k, c, v=v, a=asks, n=name, p=price: p(form(n, k), a[v][c]))
    update, last = graph.ops[-1], len(graph.ops) - 1
    for i, place in enumerate((0, 2)):  # the weight, its state
        add(
            [last, at["w"]],
            lambda k, h, i=i, p=place: (
                0.0
                if inputs_of(rows.of(update)[k])[p]
                == outputs_of(rows.of(update)[k])[i]
                == free[0][1][h]
                else math.inf
            ),
        )
    return float(total.min())


def relaxed_network(
    graph: LogicalGraph, options: Options, objective: Objective, most: int = 0
) -> Network:
    """A network for a bound, as if every tensor with more than `most` sets had too many."""
    with patch.object(locations, "MAX_SETS", most):
        return make_network(graph, options, objective, relaxed=True)


@QUICK
@given(problem=problems(), most=st.integers(0, 6))
def test_the_search_finds_what_brute_force_finds(
    problem: tuple[LogicalGraph, Strategy, Few, Objective], most: int
) -> None:
    graph, strategy, rows, objective = problem
    net = make_network(graph, Options.of(graph, rows), objective)
    actual, byte_s = search_by_memory(
        lambda byte_s, *better: search(net, None, byte_s), net, strategy
    )
    read_s = 1 / strategy.hardware.memory_bytes_per_s
    assert byte_s == WEIGHTS[strategy.auto.memory] * read_s
    least = brute_force(graph, rows, objective, byte_s)
    assert actual.gap == 0.0
    assert actual.cost == pytest.approx(least, rel=1e-9, abs=1e-12)
    seconds, held = net.cost(actual.choice)
    assert seconds + byte_s * held == pytest.approx(actual.cost)
    looser = relaxed_network(graph, Options.of(graph, rows), objective, most)
    relaxed = search(looser, None, byte_s)
    rounding_s = len(net.terms) * 2.0**-47
    assert relaxed.bound <= least + rounding_s, "a bound for graphs that are not solved exactly"
    assert lower_bound(looser.sizes, looser.tables(byte_s), 2 * least) <= least + rounding_s
    late = search(net, None, byte_s, until=0.0)
    assert late.bound - rounding_s <= least <= late.cost + rounding_s
    seconds, held = net.cost(late.choice)
    assert seconds + byte_s * held == pytest.approx(late.cost, abs=rounding_s)


def test_the_bound_pays_once_for_a_way_of_two_forms() -> None:
    """A product reads x as S(0) and as S(1); both are slices of the B that another op reads."""
    ops = (
        Op("relu", "aten.relu.default", (Ref("x"),), outputs=("y",)),
        Op("mm", "aten.mm.default", (Ref("x"), Ref("x")), outputs=("z",)),
    )
    tensors = {name: LogicalTensor(name, (SIZE, SIZE), torch.float32) for name in "xyz"}
    graph = LogicalGraph(ops, tensors, (), (Feed("x", "x"),))
    asked = {"relu": ((B, B),), "mm": ((B, S(1)), (B, S(0)))}

    class Fixed(RowTables):
        def of(self, op: Op) -> tuple[AxisSignatures, ...]:
            rows = super().of(op)
            return (next(row for row in rows if tuple(inputs_of(row)) == asked[op.name]),)

        def homes(self, source: Variable | Feed) -> tuple[NdSbp, ...]:
            return ((S(0), B),)

    placement = Placement((("x", 2), ("y", 2)), (0, 1, 2, 3))
    hardware = replace(Hardware(), levels=(Level(0, 1e-6, 1.5e9),))
    auto = Auto(enabled=True, computation_cost_ratio=0.0, sbp_collector=True)
    strategy = Strategy(("x", "y"), (placement,), auto=auto, hardware=hardware)
    rows, objective = Fixed(graph, strategy), Objective(graph, strategy)
    options = Options.of(graph, rows)
    exact = search(make_network(graph, options, objective))
    relaxed = search(relaxed_network(graph, options, objective))
    assert 0 < relaxed.bound <= exact.cost


@pytest.mark.parametrize(
    ("bound", "proof"),
    [
        (1.0, "proved least"),
        (0.8, "at most 25.0% above the least"),
        (0.99991, "at most 0.1% above the least"),
        (0.0, "not proved least"),
    ],
)
def test_a_gap_is_a_share_of_the_least_rounded_up(bound: float, proof: str) -> None:
    assert SearchResult((), 1.0, bound).proof == proof


@QUICK
@given(problem=problems(), data=st.data())
def test_improving_a_choice_axis_by_axis_does_not_lose_to_it(
    problem: tuple[LogicalGraph, Strategy, Few, Objective], data: st.DataObject
) -> None:
    """What the search does where elimination is cut short, on graphs whose least is known."""
    graph, _, rows, objective = problem
    net = make_network(graph, Options.of(graph, rows), objective)
    tables = net.tables()
    chosen = [
        data.draw(st.integers(0, len(o) - 1)) for o in (*net.options.rows, *net.options.homes)
    ]
    start = net.with_sets(tuple(chosen))
    before = sum(net.cost(start)[:1])
    best, cost = improve(net, tables, start, before)
    assert cost <= before and cost == pytest.approx(net.cost(best)[0])
    rounding_s = len(net.terms) * 2.0**-47  # elimination rounds entries to multiples of 2**-46 s
    assert cost >= search(net).cost * (1 - 1e-9) - rounding_s


@QUICK
@given(problem=problems(), share=st.floats(0, 1))
def test_adaptive_fits_the_memory_if_anything_does(
    problem: tuple[LogicalGraph, Strategy, Few, Objective], share: float
) -> None:
    graph, strategy, rows, objective = problem
    net = make_network(graph, Options.of(graph, rows), objective)
    fastest, leanest = (net.cost(search(net, None, byte_s).choice) for byte_s in (0.0, BYTES_ALONE))
    limit = math.ceil(leanest[1] + share * (fastest[1] - leanest[1]))
    hardware = replace(strategy.hardware, memory_bytes=limit)
    asked = replace(strategy, hardware=hardware, auto=replace(strategy.auto, memory="adaptive"))
    actual, byte_s = search_by_memory(lambda byte_s, *better: search(net, None, byte_s), net, asked)
    seconds, held = net.cost(actual.choice)
    assert held <= limit
    assert fastest[0] <= seconds <= leanest[0] * (1 + 1e-9)
    assert bool(byte_s) == (fastest[1] > limit)


@QUICK
@given(problem=problems())
def test_the_heavier_a_byte_the_fewer_are_held(
    problem: tuple[LogicalGraph, Strategy, Few, Objective],
) -> None:
    graph, strategy, rows, objective = problem
    net = make_network(graph, Options.of(graph, rows), objective)
    read_s = 1 / strategy.hardware.memory_bytes_per_s
    every = [net.cost(search(net, None, w * read_s).choice) for w in WEIGHTS.values()]
    for (seconds, held), (slower_s, fewer) in itertools.pairwise(every):
        assert fewer <= held and slower_s >= seconds * (1 - 1e-9)
