"""Pieces: what a rank holds of variables, one after the other in a buffer of bytes; and what ranks
of two hosts hold alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Slices, local_slices

_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """A piece that a rank holds of a tensor lies in a buffer.

    tensor: of the plan.  start, num_bytes: in the buffer.  shape, dtype: of the piece.
    """

    tensor: str
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def count_bytes(plan: Plan, rank: int, lent: Mapping[str, int]) -> int:
    """Return the bytes of a buffer of a rank.

    plan, rank: whose.  lent: tensors that are not there.
    """
    return lay_out(plan, rank, lent)[1]


def find_lent(
    plan: Plan, ranks: Sequence[int], lenders: Sequence[int]
) -> dict[int, dict[str, int]]:
    """Return for each rank the tensors that a lender holds alike, with the number of that rank.

    plan: of all.  ranks: those of one host.  lenders: those of another.
    """
    held = {region: rank for rank in lenders for region in find_regions(plan, rank).values()}
    return {
        rank: {
            v.tensor: held[region]
            for v, region in find_regions(plan, rank).items()
            if region in held and not v.own
        }
        for rank in ranks
    }


def find_regions(plan: Plan, rank: int) -> dict[Variable, tuple[str, Slices]]:
    """Return which slices of which tensors of the plan a rank holds."""
    stage = plan.stage_of(rank)
    placement = plan.placements[stage]
    grid, coordinate = placement.shape, placement.coordinate(rank)
    return {
        v: (v.tensor, local_slices(plan.tensors[v.tensor].shape, v.nd_sbp, grid, coordinate))
        for v in plan.variables.values()
        if v.stage == stage
    }


def lay_out(plan: Plan, rank: int, lent: Mapping[str, int]) -> tuple[list[Piece], int]:
    """Return where the variables of a rank lie in a buffer, and the bytes of the buffer.

    plan, rank: whose.  lent: tensors that are not there.
    """
    pieces, start = [], 0
    for v, (tensor, slices) in find_regions(plan, rank).items():
        if tensor not in lent:
            dtype = plan.tensors[v.tensor].dtype
            shape = tuple(length for _, length in slices)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            pieces.append(Piece(tensor, start, num_bytes, shape, dtype))
            start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return pieces, start


def count_copied_bytes(plan: Plan, hosts: int) -> list[int]:
    """Return for each host the bytes of its state that the next one does not hold as well.

    hosts: a ring, over which the ranks are divided in order.
    """
    local = plan.num_ranks // hosts
    ranks = [range(host * local, (host + 1) * local) for host in range(hosts)]
    nexts = [*ranks[1:], ranks[0]]
    copied = []
    for here, after in zip(ranks, nexts, strict=True):
        lent = find_lent(plan, here, after) if hosts > 1 else {}
        copied.append(sum(count_bytes(plan, rank, lent[rank]) for rank in here) if lent else 0)
    return copied
