from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.actors.plan import Plan
from flowrun.engine.runtime.rank.replicas import ReplicaDifference, compare, digest
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import mlp

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    value = (torch.arange(70_001) % 7).to(dtype).reshape(-1, 1)
    before = digest(value)
    assert digest(value.clone()) == before
    value.view(-1).view(torch.uint8)[-1] ^= 1
    assert digest(value) != before


def test_words_that_change_places_change_the_digest() -> None:
    value = torch.arange(8.0)
    assert digest(value.roll(2)) != digest(value) != digest(value[:6])
    assert digest(torch.tensor(2.0)) and not digest(torch.empty(0))


def plan_of(ranks: int) -> Plan:
    """Data parallel: every rank holds every weight."""
    return compiled(mlp(), Layout(data=ranks)).plan


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        ((5, 5, 5, 5), None),
        ((5, 5, 7, 5), ((2,), (0, 1, 3))),
        ((5, 8, 7, 5), ((0, 1, 2, 3), ())),
        ((5, 7, 7, 5), ((0, 1, 2, 3), ())),
        ((6, 7, 7, 7), ((0,), (1, 2, 3))),
    ],
)
def test_a_rank_that_differs_from_most_is_guilty(
    digests: tuple[int, ...], found: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> None:
    plan = plan_of(4)
    at, name = next((v.tensor, v.name) for v in plan.variables.values() if v.kind == "parameter")
    held = {r: dict.fromkeys(plan.variables, 1) | {at: digests[r]} for r in range(4)}
    assert compare(plan, held) == ([ReplicaDifference(name, *found)] if found else [])


@pytest.fixture(scope="module")
def sharded() -> Plan:
    """ZeRO 3: each rank holds a piece of its own."""
    return compiled(mlp(), Layout(data=4, zero=3)).plan


@given(rank=st.integers(0, 3), value=st.integers(0, 2**63))
def test_pieces_that_no_other_rank_has_are_not_compared(
    sharded: Plan, rank: int, value: int
) -> None:
    plan = sharded
    held = {r: dict.fromkeys(plan.variables, 0) for r in range(4)}
    split = next(v for v in plan.variables.values() if v.kind == "state")
    held[rank][split.tensor] = value
    assert compare(plan, held) == []
    own = next(iter(plan.variables.values()))
    alone = replace(plan, variables={own.tensor: replace(own, own=True)})
    assert compare(alone, held) == []
