"""Shards: what each rank holds of the variables, in logical names, shapes and offsets.

Checkpoints (logical_checkpoint.py) and weights.safetensors consist of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Shape, Slices, local_slices

Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A region of a logical tensor.

    shape: that of the whole tensor.  value: the region, which has the lengths of `slices`.
    """

    name: str
    shape: Shape
    slices: Slices
    value: torch.Tensor

    @property
    def place(self) -> tuple[str, Offsets]:
        """The tensor's name and the offsets of the region."""
        return self.name, tuple(start for start, _ in self.slices)


def make_whole_shard(name: str, value: torch.Tensor) -> Shard:
    """Return a whole tensor as one region."""
    shape = tuple(value.shape)
    return Shard(name, shape, tuple((0, size) for size in shape), value)


def collect_shards(
    plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]
) -> dict[Variable, Shard]:
    """Return the pieces that a rank holds of parameters, buffers and states.

    plan, rank: the rank.  variables: its tensors, by tensor of the plan.
    """
    stage = plan.stage_of(rank)
    placement = plan.placements[stage]
    grid, coordinate = placement.shape, placement.coordinate(rank)
    out = {}
    for v in plan.variables.values():
        if v.stage == stage:
            shape = plan.tensors[v.tensor].shape
            slices = local_slices(shape, v.nd_sbp, grid, coordinate)
            out[v] = Shard(name_shard(plan, v, rank), shape, slices, variables[v.tensor])
    return out


def name_shard(plan: Plan, variable: Variable, rank: int) -> str:
    """Return the name under which a checkpoint has the piece that `rank` holds of `variable`.

    A variable of which each rank of `plan` has its own has a name for each rank; the first rank's
    name is the model's.
    """
    shared = not variable.own or rank == plan.placements[variable.stage].ranks[0]
    return variable.name if shared else f"rank{rank}/{variable.name}"


def choose_shards(plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Choose the pieces that a rank writes: ranks that hold a region alike take turns by variable.

    plan, rank: the rank.  variables: its tensors, by tensor of the plan.
    """
    names = list(dict.fromkeys(v.name for v in plan.variables.values()))
    out = []
    for v, shard in collect_shards(plan, rank, variables).items():
        alike = [rank] if v.own else _holders(plan, v, shard)
        if rank == alike[names.index(v.name) % len(alike)]:
            out.append(shard)
    return out


def written_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of the pieces that `rank` of `plan` writes."""
    dtypes = {v.tensor: plan.tensors[v.tensor].dtype for v in plan.variables.values()}
    nothing = {name: torch.empty(0, dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    return sum(
        math.prod(length for _, length in shard.slices) * shard.value.itemsize
        for shard in choose_shards(plan, rank, nothing)
    )


def _holders(plan: Plan, variable: Variable, shard: Shard) -> list[int]:
    """Return the ranks that hold the same region of a variable."""
    placement = plan.placements[variable.stage]
    grid, nd_sbp = placement.shape, variable.nd_sbp
    return [
        rank
        for rank in placement.ranks
        if local_slices(shard.shape, nd_sbp, grid, placement.coordinate(rank)) == shard.slices
    ]
