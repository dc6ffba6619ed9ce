import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.passes.layout.elimination import CostTable, Least, minimise

QUICK = settings(max_examples=100)
Network = tuple[list[int], list[CostTable]]


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Up to 6 variables of up to 3 values, and up to 8 tables over up to 3 of them."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    tables = []
    for _ in range(draw(st.integers(0, 8))):
        over = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3, unique=True))
        shape = [sizes[v] for v in over]
        cost = st.integers(0, 9) | st.just(math.inf)
        entries = draw(st.lists(cost, min_size=math.prod(shape), max_size=math.prod(shape)))
        tables.append(CostTable(tuple(over), np.array(entries, dtype=float).reshape(shape)))
    return sizes, tables


def total(tables: Sequence[CostTable], choice: Sequence[int]) -> float:
    return sum(float(table.values[tuple(choice[v] for v in table.over)]) for table in tables)


@QUICK
@given(network=networks())
def test_elimination_finds_what_brute_force_finds(network: Network) -> None:
    sizes, tables = network
    solution = minimise(sizes, tables)
    assert solution.exact
    assert solution.cost == min(total(tables, c) for c in itertools.product(*map(range, sizes)))
    assert solution.cost == total(tables, solution.choice)


@st.composite
def crowded(draw: st.DrawFn) -> Network:
    """A network, with up to 200 more variables of one value, each beside some of the others."""
    sizes, tables = draw(networks())
    lone = range(len(sizes), len(sizes) + draw(st.integers(65, 200)))
    near = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3, unique=True))
    shape = [sizes[v] for v in near]
    for v in lone:
        costs = np.arange(math.prod(shape), dtype=float) * (v % 3)
        at = v % (len(near) + 1)
        over = (*near[:at], v, *near[at:])
        tables.append(CostTable(over, costs.reshape([*shape[:at], 1, *shape[at:]])))
    return [*sizes, *[1] * len(lone)], tables


@QUICK
@given(network=crowded())
def test_neighbours_of_one_value_are_no_dims(network: Network) -> None:
    sizes, tables = network
    least = min(total(tables, c) for c in itertools.product(*map(range, sizes)))
    solution = minimise(sizes, tables)
    assert solution.exact and solution.cost == total(tables, solution.choice) == least
    assert minimise(sizes, tables, max_entries=2).cost >= least


@pytest.mark.parametrize("hub", [1, 2])
def test_an_op_that_reads_a_hundred_gradients_has_a_layout(hub: int) -> None:
    """All are neighbours of each other once the hub is eliminated, whatever the sizes."""
    sizes = [hub, *(1 + v % 4 // 3 for v in range(100))]
    tables = [CostTable((0, v), np.ones((hub, sizes[v]))) for v in range(1, 101)]
    tables += [CostTable((v, v + 1), np.ones((sizes[v], sizes[v + 1]))) for v in range(1, 100)]
    assert minimise(sizes, tables).cost == 199


@QUICK
@given(network=networks())
def test_too_wide_a_network_still_gets_a_choice_and_its_cost(network: Network) -> None:
    sizes, tables = network
    solution = minimise(sizes, tables, max_entries=2)
    assert solution.cost == total(tables, solution.choice)
    assert solution.cost >= minimise(sizes, tables).cost


@pytest.mark.parametrize(
    ("variables", "bound"), [(8, {"until": 0.0}), (5, {"max_entries": 3**4})], ids=["late", "wide"]
)
def test_a_network_that_is_cut_short_is_not_called_exact(variables: int, bound: Any) -> None:
    pairs = itertools.combinations(range(variables), 2)
    tables = [CostTable(pair, np.eye(3)) for pair in pairs]
    assert minimise([3] * variables, tables).exact
    short = minimise([3] * variables, tables, **bound)
    assert not short.exact and short.cost == total(tables, short.choice)


def test_more_large_tables_than_allowed_are_not_tried() -> None:
    tables = [CostTable(pair, np.eye(3)) for pair in itertools.combinations(range(5), 2)]
    assert minimise([3] * 5, tables, 3**4, most_large=0) == Least((), math.inf, exact=False)
    assert minimise([3] * 5, tables, 3**4, most_large=1).choice


def test_what_everybody_reads_leaves_last() -> None:
    """Two variables that all links of a long chain read: cut in a bad order, all hangs together."""
    hubs, links = (0, 1), range(2, 200)
    tables = [CostTable((hub, link), np.eye(20, 4)) for hub in hubs for link in links]
    tables += [CostTable((link, link + 1), np.eye(4)) for link in links[:-1]]
    solution = minimise([20, 20, *[4] * len(links)], tables, max_entries=20 * 20 * 4 * 4)
    assert solution.exact
    assert solution.cost == pytest.approx(0.0)
