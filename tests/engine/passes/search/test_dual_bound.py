import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.passes.layout.elimination import CostTable, minimise
from flowrun.engine.passes.search import dual_bound
from flowrun.engine.passes.search.dual_bound import CLOSE_ENOUGH, lower_bound

QUICK = settings(max_examples=200)
Network = tuple[list[int], list[CostTable]]
COSTS = st.integers(0, 9) | st.just(math.inf)


@st.composite
def networks(draw: st.DrawFn, tree: bool = False) -> Network:
    """Up to 7 variables of up to 4 values, with tables over one, none, or a pair of them; of a tree
    over each variable and one before it.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    pairs = list(itertools.permutations(range(len(sizes)), 2))
    if tree:
        chosen = [(draw(st.integers(0, v - 1)), v) for v in range(1, len(sizes))]
    else:
        chosen = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    alone = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=4))
    tables = []
    for over in ((), *((v,) for v in alone), *chosen):
        shape = [sizes[v] for v in over]
        entries = draw(st.lists(COSTS, min_size=math.prod(shape), max_size=math.prod(shape)))
        tables.append(CostTable(tuple(over), np.array(entries, dtype=float).reshape(shape)))
    return sizes, tables


def costs(sizes: Sequence[int], tables: Sequence[CostTable]) -> list[float]:
    return [
        sum(float(t.values[tuple(choice[v] for v in t.over)]) for t in tables)
        for choice in itertools.product(*map(range, sizes))
    ]


@QUICK
@given(network=networks(), data=st.data())
def test_no_choice_costs_less_than_the_bound(network: Network, data: st.DataObject) -> None:
    every = [cost for cost in costs(*network) if math.isfinite(cost)]
    known = data.draw(st.sampled_from(every)) if every else 100.0
    bound = lower_bound(*network, known)
    assert 0 <= bound <= min(every, default=known) + 1e-9


@QUICK
@given(network=networks(tree=True))
def test_of_a_tree_the_bound_is_the_least_cost(network: Network) -> None:
    least = min(costs(*network))
    if math.isfinite(least):
        assert lower_bound(*network, least) >= least * (1 - CLOSE_ENOUGH) - 1e-9


def test_a_chain_of_blocks_is_proved_beside_a_variable_that_all_share() -> None:
    """Residuals go past each op of a block; the home of a tied weight is read at both ends."""
    chance = np.random.default_rng(0)
    tables = [CostTable((v,), chance.random(8)) for v in range(121)]
    for v in range(119):
        metric = np.abs(np.subtract.outer(np.arange(8.0), np.arange(8.0)))
        tables += [CostTable((v, u), metric) for u in (v + 1, v + 2) if u < 120]
    tables += [CostTable((120, v), np.where(np.eye(8), 0.0, math.inf)) for v in (0, 119)]
    least = minimise([8] * 121, tables)
    assert least.exact
    assert lower_bound([8] * 121, tables, least.cost) >= (1 - CLOSE_ENOUGH) * least.cost


def test_a_bound_that_is_cut_short_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ring of odd length one pair at least is equal; a linear program may not see it."""
    tables = [CostTable((v, (v + 1) % 5), np.eye(2)) for v in range(5)]
    assert 0 <= lower_bound([2] * 5, tables, 3.0) <= 1.0
    chain = [CostTable((v, v + 1), 1 + np.eye(4)) for v in range(50)]
    made: list[float] = []
    sweep = dual_bound._Sweeps.sweep
    monkeypatch.setattr(
        dual_bound._Sweeps, "sweep", lambda self: made.append(sweep(self)) or made[-1]
    )
    assert lower_bound([4] * 51, chain, 100.0, until=0.0) <= 50.0 and len(made) == 2


def test_without_a_known_choice_there_is_no_bound() -> None:
    assert lower_bound([2], [CostTable((0,), np.full(2, math.inf))], math.inf) == 0.0
