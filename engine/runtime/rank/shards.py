"""Shards: what each rank holds of the variables, in logical names, shapes and offsets.

What a checkpoint (checkpoint.py) and weights.safetensors are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Shape, Slices, local_slices

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A region of a logical tensor.  shape: of the whole; value: has the lengths of `slices`."""

    name: str
    shape: Shape
    slices: Slices
    value: torch.Tensor

    @property
    def place(self) -> tuple[str, Offsets]:
        """Name and offsets."""
        return self.name, tuple(start for start, _ in self.slices)


def whole(name: str, value: torch.Tensor) -> Shard:
    """A tensor as the one region of itself."""
    shape = tuple(value.shape)
    return Shard(name, shape, tuple((0, size) for size in shape), value)


def held(plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> dict[Variable, Shard]:
    """What a rank holds of every variable: parameters, buffers and states."""
    stage = plan.stage_of(rank)
    placement = plan.placements[stage]
    grid, coordinate = placement.shape, placement.coordinate(rank)
    out = {}
    for v in plan.variables.values():
        if v.stage == stage:
            shape = plan.tensors[v.tensor].shape
            slices = local_slices(shape, v.nd_sbp, grid, coordinate)
            out[v] = Shard(name_of(plan, v, rank), shape, slices, variables[v.tensor])
    return out


def name_of(plan: Plan, variable: Variable, rank: int) -> str:
    """Of a variable, as a rank holds it.  What is each rank's own has as many names; that of the
    first rank is the model's.
    """
    shared = not variable.own or rank == plan.placements[variable.stage].ranks[0]
    return variable.name if shared else f"rank{rank}/{variable.name}"


def to_write(plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> list[Shard]:
    """What a rank writes of what it holds: of ranks that hold a region alike, one has its turn."""
    names = list(dict.fromkeys(v.name for v in plan.variables.values()))
    out = []
    for v, shard in held(plan, rank, variables).items():
        alike = [rank] if v.own else _holders(plan, v, shard)
        if rank == alike[names.index(v.name) % len(alike)]:
            out.append(shard)
    return out


def _holders(plan: Plan, variable: Variable, shard: Shard) -> list[int]:
    """Ranks that hold the same region."""
    placement = plan.placements[variable.stage]
    grid, nd_sbp = placement.shape, variable.nd_sbp
    return [
        rank
        for rank in placement.ranks
        if local_slices(shard.shape, nd_sbp, grid, placement.coordinate(rank)) == shard.slices
    ]
