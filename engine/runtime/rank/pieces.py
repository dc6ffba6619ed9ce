"""Pieces: what a rank holds of variables, one after the other in a buffer of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.placement import local_slices

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


def count_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of a buffer of a rank."""
    return lay_out(plan, rank)[1]


def lay_out(plan: Plan, rank: int) -> tuple[list[Piece], int]:
    """Return where the variables of a rank lie in a buffer, and the bytes of the buffer."""
    stage = plan.stage_of(rank)
    placement = plan.placements[stage]
    grid, coordinate = placement.shape, placement.coordinate(rank)
    pieces, start = list[Piece](), 0
    for v in plan.variables.values():
        if v.stage != stage:
            continue
        tensor = plan.tensors[v.tensor]
        slices = local_slices(tensor.shape, v.nd_sbp, grid, coordinate)
        shape = tuple(length for _, length in slices)
        num_bytes = torch.Size(shape).numel() * tensor.dtype.itemsize
        pieces.append(Piece(v.tensor, start, num_bytes, shape, tensor.dtype))
        start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return pieces, start
