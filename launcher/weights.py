"""Weights on disk: `weights.safetensors` in the run's folder, logical tensors by the model's own names, from any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flowrun.engine.placement import local_slices
from flowrun.engine.plan import Plan

FILE = "weights.safetensors"


def save(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Write logical values."""
    save_file({name: value.contiguous() for name, value in values.items()}, folder / FILE)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Read logical values."""
    return load_file(folder / FILE)


def save_shards(folder: Path, plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> None:
    """A rank writes what it holds; `join_shards` makes one file of all."""
    stage = plan.stage_of(rank)
    shards = {
        v.name: variables[v.tensor].detach().cpu().contiguous()
        for v in plan.graph.variables
        if v.stage == stage and v.kind != "state"
    }
    save_file(shards, _shard_file(folder, rank))


def join_shards(folder: Path, plan: Plan) -> bool:
    """Join the shards of all ranks to weights.safetensors.  False if some lie on another host's disk: then they stay."""
    ranks = [rank for placement in plan.placements for rank in placement.ranks]
    if not all(_shard_file(folder, rank).exists() for rank in ranks):
        return False
    values: dict[str, torch.Tensor] = {}
    for rank in ranks:
        stage = plan.stage_of(rank)
        placement = plan.placements[stage]
        shards = load_file(_shard_file(folder, rank))
        for v in plan.graph.variables:
            if v.stage != stage or v.kind == "state":
                continue
            tensor = plan.graph.tensors[v.tensor]
            view = values.setdefault(v.name, torch.empty(tensor.shape, dtype=tensor.dtype))
            slices = local_slices(tensor.shape, v.nd_sbp, placement.shape, placement.coordinate(rank))
            for dim, (start, length) in enumerate(slices):
                view = view.narrow(dim, start, length)
            view.copy_(shards[v.name])
    save(folder, values)
    for rank in ranks:
        _shard_file(folder, rank).unlink()
    return True


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"weights.rank{rank:05d}.safetensors"
