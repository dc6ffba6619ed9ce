"""Checkpoints: logical tensors on disk, written by any layout and read by any other.

torch.distributed.checkpoint writes and reads the files; the planners here describe to it, in
logical names, shapes and offsets, what each rank holds.  A tensor that several ranks hold alike is
written once; a rank reads the regions that it holds, from the files of any rank.  Each rank writes
checksums of its files, by which `check` finds what has changed since.  No other file imports that
package.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import RunError
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.rank.readers import cut
from flowrun.engine.runtime.rank.shards import Offsets, Shard, collect_shards, make_whole_shard

METADATA = ".metadata"
_SUMS = ".crc32"  # suffix of a rank's file of checksums: {file: CRC-32}

# ---- disk ----------------------------------------------------------------------------------------


def write(folder: Path, shards: Iterable[Shard], alone: bool) -> None:
    """Write regions that together make whole tensors.

    folder: the checkpoint.  shards: the regions that this process writes.
    alone: True if this process has all regions; otherwise every rank of the default group calls
    this function, and all have written when it returns.  Raises RunError if a disk refuses.
    """
    disk, planner = FileSystemWriter(folder), _Saver(shards)
    _run_package(folder, lambda: save({}, storage_writer=disk, planner=planner, no_dist=alone))
    rank = 0 if alone else dist.get_rank()
    own = [*folder.glob(f"__{rank}_*.distcp"), *([folder / METADATA] if rank == 0 else [])]
    sums = {file.name: _compute_checksum(file) for file in own}
    (folder / f"__{rank}{_SUMS}").write_text(json.dumps(sums))
    if not alone:
        dist.barrier()


def restore(folder: Path, plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]) -> None:
    """Fill the variables of a rank from a checkpoint that has every tensor of the plan.

    folder: the checkpoint.  plan, rank: the rank that reads.  variables: its pieces by tensor,
    filled in place.  For a variable of which each rank has its own, a rank that the checkpoint
    does not know takes the first rank's.  Raises RunError.
    """
    there = read_contents(folder)
    read(
        folder,
        [
            shard if shard.name in there else replace(shard, name=v.name)
            for v, shard in collect_shards(plan, rank, variables).items()
        ],
    )


def read(folder: Path, shards: Iterable[Shard]) -> None:
    """Fill the values of regions in place; each rank reads for itself.  Raises RunError."""
    disk, planner = _NamedTensorReader(folder), _Loader(shards)
    _run_package(folder, lambda: load({}, storage_reader=disk, planner=planner, no_dist=True))


def read_contents(folder: Path) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return the logical shape and dtype of every tensor, by name.  Raises RunError."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in _read_metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_whole(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the logical values of the named tensors.  Raises RunError."""
    known = read_contents(folder)
    values = {name: torch.empty(known[name][0], dtype=known[name][1]) for name in names}
    read(folder, [make_whole_shard(name, value) for name, value in values.items()])
    return values


def check(folder: Path) -> None:
    """Check that every file exists and is as it was written.  Raises RunError at the first fault.

    A checkpoint without checksums, of an older flowrun, is checked for files and sizes alone.
    """
    ends: dict[str, int] = {}
    for region in _read_metadata(folder).storage_data.values():
        path, end = region.relative_path, region.offset + region.length
        ends[path] = max(ends.get(path, 0), end)
    for path, end in ends.items():
        _check_size(folder / path, end)
    sums: dict[str, int] = {}
    for file in folder.glob(f"__*{_SUMS}"):
        sums |= _read_sums(file)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib releases the GIL
        found = pool.map(_compute_checksum, (folder / name for name in sums))
        for (name, expected), checksum in zip(sums.items(), found, strict=True):
            if checksum != expected:
                raise RunError(str(folder / name), "it has changed since it was written.")
    if sums and (unknown := ends.keys() - sums.keys()):
        raise RunError(str(folder / min(unknown)), "the checksum that was written of it is gone.")


def _check_size(file: Path, end: int) -> None:
    if not file.is_file():
        raise RunError(str(file), "it is missing.")
    if file.stat().st_size < end:
        raise RunError(str(file), f"it has {file.stat().st_size:,} bytes of {end:,}.")


def _read_sums(file: Path) -> dict[str, int]:
    try:
        found = {str(name): int(value) for name, value in json.loads(file.read_text()).items()}
    except (ValueError, AttributeError, TypeError):
        raise RunError(str(file), "it holds no checksums.") from None
    for name in found:
        _check_size(file.with_name(name), 0)
    return found


def _compute_checksum(file: Path) -> int:
    """Return the CRC-32 of a file, which finds the faults of a disk, not forgery."""
    found = 0
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            found = zlib.crc32(piece, found)
    return found


class _NamedTensorReader(FileSystemReader):
    """A reader that unpickles metadata safely; its base class calls any function in a pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint.  Raises RunError."""
        found = _read_metadata(Path(self.path))
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


def _read_metadata(folder: Path) -> Metadata:
    """Return which tensors a checkpoint has, and in which files.  Raises RunError."""
    file = folder / METADATA
    try:
        with file.open("rb") as opened:
            found = _Unpickler(opened).load()
    except FileNotFoundError:
        why = "it is missing; its name begins with a dot, so cp DIR/* leaves it out."
        raise RunError(str(file), why) from None
    except Exception as error:  # a broken pickle may raise any error
        raise RunError(str(file), f"it is damaged: {type(error).__name__}: {error}.") from error
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise RunError(str(file), f"it holds a {type(found).__name__}.")
    return found


class _Unpickler(pickle.Unpickler):
    """An unpickler of exactly the classes that flowrun's .metadata files hold."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that a checkpoint may hold.  Raises UnpicklingError for any other."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _HELD.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")


_HELD: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
}


def _run_package(folder: Path, work: Callable[[], object]) -> None:
    """Call the package; its CheckpointException becomes a RunError."""
    try:
        with warnings.catch_warnings():
            # A process that writes or reads alone is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            work()
    except CheckpointException as error:  # it is no Exception: other handlers would miss it
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RunError(f"rank {rank}, {folder}", f"{type(cause).__name__}: {cause}") from cause


# ---- planners ------------------------------------------------------------------------------------


class _Saver(SavePlanner):
    """A planner that lists the regions to write and returns their values."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = {shard.place: shard for shard in shards if shard.value.numel()}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Do nothing: the regions are known.  See SavePlanner.set_up_planner."""

    def create_local_plan(self) -> SavePlan:
        """Return an item for each region of this rank."""
        return SavePlan([_make_write_item(shard) for shard in self.shards.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """List the regions of each tensor, from the items of all ranks."""
        entries: dict[str, Any] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            entry = TensorStorageMetadata(data.properties, data.size, [])
            entries.setdefault(item.index.fqn, entry).chunks.append(data.chunk)
        return all_plans, Metadata(entries)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """Return the values of a region."""
        return self.shards[_locate(write_item.index)].value.detach()


class _Loader(LoadPlanner):
    """A planner that finds the parts of regions on disk that fill the given regions."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = {shard.place: shard for shard in shards if shard.value.numel()}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep the metadata of the checkpoint.  See LoadPlanner.set_up_planner."""
        assert metadata is not None
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return an item for each overlap of a region on disk with a region to fill."""
        items: list[ReadItem] = []
        for shard in self.shards.values():
            entry = self.metadata.state_dict_metadata[shard.name]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(shard.name, entry, [_make_chunk(shard)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Fail: a checkpoint holds only tensors."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the view into which the values of an overlap are read."""
        region = tuple(zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return cut(self.shards[_locate(read_item.dest_index)].value, region)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the values were read into the view."""


def _make_write_item(shard: Shard) -> WriteItem:
    chunk = _make_chunk(shard)
    return WriteItem(
        MetadataIndex(shard.name, chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties(shard.value.dtype), torch.Size(shard.shape)
        ),
    )


def _make_chunk(shard: Shard) -> ChunkStorageMetadata:
    """Return the offsets and lengths of a region in the package's form."""
    return ChunkStorageMetadata(
        torch.Size(start for start, _ in shard.slices),
        torch.Size(length for _, length in shard.slices),
    )


def _locate(index: MetadataIndex) -> tuple[str, Offsets]:
    return index.fqn, tuple(index.offset or ())
