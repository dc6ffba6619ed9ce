"""Shards: what each rank holds of the variables, in logical names, shapes and offsets.

Checkpoints (logical_checkpoint.py) and weights.safetensors consist of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.crossing import slices_of_ranks
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Shape, Slices


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
    def place(self) -> tuple[str, tuple[int, ...]]:
        """The tensor's name and the offsets of the region."""
        return self.name, tuple(start for start, _ in self.slices)


def make_whole_shard(name: str, value: torch.Tensor) -> Shard:
    shape = tuple(value.shape)
    return Shard(name, shape, tuple((0, size) for size in shape), value)


def collect_shards(
    plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]
) -> dict[Variable, Shard]:
    """Return the pieces that a rank holds of its `variables` (by tensor of the plan)."""
    return {
        v: Shard(
            name_shard(plan, v, rank), plan.tensors[v.tensor].shape, slices, variables[v.tensor]
        )
        for v, slices in list_held(plan, rank)
    }


def list_held(plan: Plan, rank: int) -> Iterator[tuple[Variable, Slices]]:
    """Yield the variables of a rank, and the slices of them that it holds."""
    stage = plan.stage_of(rank)
    for v in (v for v in plan.variables.values() if v.stage == stage):
        yield v, plan.placements[stage].slices(rank, plan.tensors[v.tensor].shape, v.nd_sbp)


def name_shard(plan: Plan, variable: Variable, rank: int) -> str:
    """Return the name under which a checkpoint has the piece that `rank` holds of `variable`.

    A variable of which each rank has its own has a name for each; the first rank's is the model's.
    """
    shared = not variable.own or rank == plan.placements[variable.stage].ranks[0]
    return variable.name if shared else f"rank{rank}/{variable.name}"


def choose_shards(plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Choose the pieces that a rank writes: ranks that hold one alike take turns by variable."""
    names = list(dict.fromkeys(v.name for v in plan.variables.values()))
    out = []
    for v, shard in collect_shards(plan, rank, variables).items():
        alike = [rank] if v.own else _holders(plan, v, shard)
        if rank == alike[names.index(v.name) % len(alike)]:
            out.append(shard)
    return out


def written_bytes(plan: Plan, rank: int) -> int:
    nothing = {
        name: torch.empty(0, dtype=plan.tensors[name].dtype, device="meta")
        for name in plan.variables
    }
    return sum(
        math.prod(length for _, length in shard.slices) * shard.value.itemsize
        for shard in choose_shards(plan, rank, nothing)
    )


def _holders(plan: Plan, variable: Variable, shard: Shard) -> list[int]:
    held = slices_of_ranks(plan.placements[variable.stage], variable.nd_sbp, shard.shape)
    return [rank for rank, slices in held.items() if slices == shard.slices]
