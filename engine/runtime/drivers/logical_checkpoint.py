"""Checkpoints: logical tensors on disk, written by any layout and read by any other.

Each rank writes a file of its shards (shard_file.py), alone: no rank waits for another, and none
knows what the others write.  A region that several ranks hold alike is in one of the files; a rank
reads the regions that it holds, from the files of any rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.crossing import overlap
from flowrun.engine.errors import RunError
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.rank.shard_file import ShardFile, Written, open_shards, write_shards
from flowrun.engine.runtime.rank.shards import Shard, collect_shards, make_whole_shard
from flowrun.engine.runtime.transport.transport import cut, within

_FILES = "rank*.safetensors"  # * is five digits or more


def file_of(folder: Path, rank: int) -> Path:
    return folder / _FILES.replace("*", f"{rank:05d}")


def write(folder: Path, rank: int, shards: Sequence[Shard]) -> Written:
    """Write the regions that a rank adds to a checkpoint; they are on the disk when this returns.
    Raises OSError if the disk refuses.
    """
    return write_shards(file_of(folder, rank), shards, {"format": "pt"})


def restore(folder: Path, plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> None:
    """Fill the variables of a rank, its pieces by tensor, from a checkpoint that has every tensor
    of the plan, but for states of parameters that did not train then: these keep their starts.

    For a variable of which each rank has its own, a rank that the checkpoint does not know takes
    the first rank's.  Raises RunError.
    """
    there = read_contents(folder)
    shards = collect_shards(plan, rank, variables)
    new = [v for v in shards if v.kind == "state" and v.of and v.name not in there]
    read(
        folder,
        [
            shard if shard.name in there else replace(shard, name=v.name)
            for v, shard in shards.items()
            if v not in new
        ],
    )
    tensors = {v.name: v.tensor for v in plan.variables.values()}
    for v in new:
        if v.start is None:  # as the weight is by now
            variables[v.tensor].copy_(variables[tensors[v.of]])


def read(folder: Path, shards: Iterable[Shard]) -> None:
    """Fill the values of regions in place; each rank reads for itself.  Raises RunError."""
    wanted = defaultdict(list)
    for shard in shards:
        wanted[shard.name].append(shard)
    left = {id(shard): shard.value.numel() for each in wanted.values() for shard in each}
    for file in _open_files(folder):
        for stored in file.shards:
            for shard in wanted.get(stored.name, ()):
                if (common := overlap(stored.slices, shard.slices)) is not None:
                    source = cut(file.value(stored), within(common, stored.slices))
                    cut(shard.value, within(common, shard.slices)).copy_(source)
                    left[id(shard)] -= source.numel()
    for name, each in wanted.items():
        if any(left[id(shard)] for shard in each):
            raise RunError(str(folder), f"it does not hold all of {name}.")


def read_contents(folder: Path) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return the logical shape and dtype of every tensor, by name.  Raises RunError."""
    return {
        stored.name: (stored.shape, stored.dtype)
        for file in _open_files(folder)
        for stored in file.shards
    }


def read_whole(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the logical values of the named tensors.  Raises RunError."""
    known = read_contents(folder)
    values = {name: torch.empty(known[name][0], dtype=known[name][1]) for name in names}
    read(folder, [make_whole_shard(name, value) for name, value in values.items()])
    return values


def _open_files(folder: Path) -> Iterator[ShardFile]:
    for path in sorted(folder.glob(_FILES.replace("*", "[0-9]*"))):
        with open_shards(path) as opened:
            yield opened
