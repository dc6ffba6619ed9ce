"""What experts cost whose tokens travel."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flowrun.engine.cost.expansion_cost import expansion_cost
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.ops.experts.routed import ROOM
from flowrun.engine.ops.proof.simulated_ranks import sample


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [(2,), (2, 2)], ids=str)
def test_buffers_travel_in_their_dtype_as_far_as_all_axes_have_divided_tokens(
    dtype: torch.dtype, grid: tuple[int, ...]
) -> None:
    normal = partial(torch.randn, dtype=dtype)
    chosen = torch.rand(24, 12).topk(3).indices
    given = normal(24, 2), chosen, normal(24, 3), "gelu", 12, normal(12, 2, 4), normal(12, 4, 6)
    made = sample("flowrun.experts.default", *given)
    of_tokens, of_experts = (S(0), S(0))[: len(grid)], (S(0), B)[: len(grid)]
    in_sbp = (of_tokens,) * 3 + (of_experts,) * 2
    op = replace(made.op, kwargs=((ROOM, 1.0),), in_sbp=in_sbp, out_sbp=(of_tokens,))
    links = (Link(bytes_per_s=1.0, spread_bytes_per_s=1.0),) * len(grid)
    cost = expansion_cost(op, made.tensors, grid, links, Hardware())
    ranks = 2 if grid == (2,) else 4
    slots = 24 // ranks * 3  # of a rank, for all others
    rows = (2 + 6) * dtype.itemsize + chosen.itemsize  # there, and back
    assert cost.boxing_s == slots * rows / 2  # one half stays
    assert cost.moves == 3 and cost.work_s > 0
