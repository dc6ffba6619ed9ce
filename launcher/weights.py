"""Weights on disk: `weights.safetensors` in the run's folder, logical tensors by the model's own
names, from any layout; their moving averages (optim.ema) in `ema.safetensors`.

Each rank writes its shards to a file that says which slices of which tensors they are; files of all
ranks make one.  Where hosts share no disk: python -m flowrun.launcher.weights FOLDER OTHER_FOLDER …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrun.engine.graph import Variable
from flowrun.engine.placement import local_slices
from flowrun.engine.plan import Plan

FILE = "weights.safetensors"
AVERAGES = "ema.safetensors"
_EMA = "ema/"


def save(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Write logical values; those named ema/… to a file of their own, by the weight's name."""
    averages = {n.removeprefix(_EMA): v.contiguous() for n, v in values.items() if _kept(n)}
    weights = {n: v.contiguous() for n, v in values.items() if not _kept(n)}
    save_file(weights, folder / FILE)
    if averages:
        save_file(averages, folder / AVERAGES)


def saved(plan: Plan) -> list[Variable]:
    """What is written: parameters, buffers and moving averages."""
    return [v for v in plan.graph.variables if v.kind != "state" or _kept(v.name)]


def averages(plan: Plan) -> dict[str, str]:
    """Parameter -> its moving average, for those that have one."""
    return {v.of: v.name for v in plan.graph.variables if _kept(v.name)}


def _kept(name: str) -> bool:
    return name.startswith(_EMA)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Read logical values."""
    return load_file(folder / FILE)


def save_shards(folder: Path, plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> None:
    """A rank writes what it holds, and of each tensor its logical shape and slices."""
    stage = plan.stage_of(rank)
    placement = plan.placements[stage]
    shards, about = {}, {"num_ranks": str(plan.num_ranks)}
    for v in saved(plan):
        if v.stage == stage:
            shape = plan.graph.tensors[v.tensor].shape
            slices = local_slices(shape, v.nd_sbp, placement.shape, placement.coordinate(rank))
            shards[v.name] = variables[v.tensor].detach().cpu().contiguous()
            about[v.name] = json.dumps([shape, slices])
    save_file(shards, _shard_file(folder, rank), about)


def has_all(folder: Path, num_ranks: int) -> bool:
    """True if the shards of all ranks lie in a folder."""
    return all(_shard_file(folder, rank).exists() for rank in range(num_ranks))


def join_shards(folders: Sequence[Path], num_ranks: int) -> Path:
    """Join the shards of all ranks, from any of the folders, to one file in the first of them.

    The shards go.  Raises FileNotFoundError for a rank that has none.
    """
    files = [_find(folders, rank) for rank in range(num_ranks)]
    values: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as shards:
            about = shards.metadata()
            for name in shards.keys():  # noqa: SIM118  (not a mapping)
                shape, slices = json.loads(about[name])
                part = shards.get_tensor(name)
                view = values.setdefault(name, torch.empty(shape, dtype=part.dtype))
                for dim, (start, length) in enumerate(slices):
                    view = view.narrow(dim, start, length)
                view.copy_(part)
    save(folders[0], values)
    for file in files:
        file.unlink()
    return folders[0] / FILE


def _find(folders: Iterable[Path], rank: int) -> Path:
    for folder in folders:
        if _shard_file(folder, rank).exists():
            return _shard_file(folder, rank)
    raise FileNotFoundError(f"no folder has the shards of rank {rank}: {_shard_file(Path(), rank)}")


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"weights.rank{rank:05d}.safetensors"


def main(arguments: Sequence[str]) -> int:
    """Join the shards that lie in several folders, one for each host."""
    folders = [Path(text) for text in arguments]
    here = sorted(file for folder in folders for file in folder.glob("weights.rank*.safetensors"))
    if not here:
        print("python -m flowrun.launcher.weights FOLDER …: no weights.rank*.safetensors there.")
        return 2
    with safe_open(here[0], "pt") as shards:
        num_ranks = int(shards.metadata()["num_ranks"])
    try:
        print(join_shards(folders, num_ranks))
    except FileNotFoundError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
