"""Experts whose tokens travel: every row on simulated ranks, and what happens without slots."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flowrun.engine.ir.signature import NdSignature
from flowrun.engine.ops import registry
from flowrun.engine.ops.experts.routed import ROOM, Routes, find_slots, send, take
from flowrun.engine.ops.proof.simulated_ranks import OpSample, row_failure, sample

GRIDS = ((2,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2))


def experts(room: float, dtype: torch.dtype = torch.float64) -> list[OpSample]:
    """Forward and backward of 23 tokens that choose 3 of 12 experts; of one alone, some."""
    draws = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=draws, dtype=dtype)
    chosen = torch.rand(23, 12, generator=draws).topk(3).indices
    chosen[:5] = torch.tensor([4, 0, 1])
    given = normal(23, 2), chosen, normal(23, 3)
    gate, up, down = normal(12, 2, 4), normal(12, 2, 4), normal(12, 4, 6)
    few, many, grad = ("gelu", 12, up, down), ("silu", 12, gate, up, down), normal(23, 6)
    made = [
        sample("flowrun.experts.default", *given, *few),
        sample("flowrun.experts_backward.default", grad, *given, *few),
        sample("flowrun.gated_experts.default", *given, *many),
        sample("flowrun.gated_experts_backward.default", grad, *given, *many),
    ]
    return [replace(one, op=replace(one.op, kwargs=((ROOM, room),))) for one in made]


def rows_of(given: OpSample, grid: tuple[int, ...]) -> list[NdSignature]:
    """The rows by which tokens travel."""
    rows = partial(registry.signatures, given.op)
    lifted = registry.lift(
        lambda axis, ins, outs: rows(ins, outs, grid[axis]), given.in_shapes, given.out_shapes, grid
    )
    return [NdSignature.of(axes) for axes in lifted if any(row.travels for row in axes)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("given", experts(9.0), ids=lambda given: given.op.target)
def test_every_row_holds_by_which_tokens_travel(given: OpSample, grid: tuple[int, ...]) -> None:
    rows = rows_of(given, grid)
    assert rows
    assert [(str(row), why) for row in rows if (why := row_failure(given, row, grid))] == []


def test_a_rank_with_too_few_slots_names_the_key_and_a_number_that_does() -> None:
    chosen = torch.tensor([[0, 1], [0, 2], [1, 3], [0, 1]])
    few = Routes(experts=4, ranks=2, sources=(1,), pairs=8, slots=5)
    with pytest.raises(RuntimeError, match=r"6 of the 8 choices.*5 slots.*room=1\.5 or more"):
        find_slots(chosen, few)
    rows, enough = torch.randn(4, 1, 3), replace(few, slots=6)
    slots = find_slots(chosen, enough)
    assert torch.equal(take(send(rows, slots, 0, enough), slots), rows.expand(-1, 2, -1))
    none = torch.tensor([[-1, 4], [3, 0]], dtype=torch.int32)
    assert find_slots(none, enough).tolist() == [[0, 6], [7, 1]]
