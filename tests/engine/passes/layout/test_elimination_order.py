import math

from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.passes.layout.elimination_order import order_variables

Near = dict[int, set[int]]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[int], Near]:
    """Up to 9 variables, of which the last may be everybody's neighbour."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    n = len(sizes)
    variable = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(variable, variable), max_size=20))
    pairs += [(v, n - 1) for v in range(n - 1)] * draw(st.integers(0, 1))
    near: Near = {v: set() for v in range(n)}
    for one, other in pairs:
        if one != other:
            near[one].add(other)
            near[other].add(one)
    return sizes, near


@given(networks())
def test_the_least_table_leaves_first_then_the_fewest_new_pairs(
    network: tuple[list[int], Near],
) -> None:
    sizes, near = network
    order = [v for v, _ in order_variables(sizes, near)]
    near = {v: set(others) for v, others in near.items()}
    for leaving in order:

        def urgency(v: int) -> tuple[int, int, int]:
            entries = math.prod((sizes[u] for u in near[v]), start=sizes[v])
            pairs = sum(u not in near[w] for u in near[v] for w in near[v] if u != w)
            return entries, pairs, v

        assert leaving == min(near, key=urgency)
        others = near.pop(leaving)
        for u in others:
            near[u] = (near[u] | others) - {u, leaving}
    assert not near
