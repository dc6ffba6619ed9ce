"""What engine/runtime/drivers/logical_checkpoint.py relies on of torch.distributed.checkpoint."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from flowrun.engine.runtime.drivers import logical_checkpoint as checkpoint
from flowrun.engine.runtime.drivers.logical_checkpoint import read, write
from flowrun.engine.runtime.rank.shards import Shard, make_whole_shard


def chunk(offset: int, length: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([offset]), torch.Size([length]))


@pytest.mark.parametrize(
    ("ours", "theirs"), [(checkpoint._Saver, SavePlanner), (checkpoint._Loader, LoadPlanner)]
)
def test_a_planner_is_asked_for_what_ours_have(ours: type, theirs: type) -> None:
    asked = [n for n, v in vars(theirs).items() if getattr(v, "__isabstractmethod__", False)]
    assert "create_global_plan" in asked
    for name in asked:
        given = inspect.signature(vars(ours)[name]).parameters
        assert list(given) == list(inspect.signature(vars(theirs)[name]).parameters)


def test_a_read_item_is_an_overlap_with_its_offsets_in_the_wanted_region() -> None:
    stored = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([8]), [chunk(0, 3), chunk(3, 2), chunk(5, 3)]
    )
    items = create_read_items_for_chunk_list("a", stored, [chunk(2, 4)])
    found = [
        (item.dest_index.offset, item.storage_offsets, item.dest_offsets, item.lengths)
        for item in items
    ]
    assert [tuple(map(tuple, item)) for item in found] == [
        ((2,), (2,), (0,), (1,)),
        ((2,), (0,), (1,), (2,)),
        ((2,), (0,), (3,), (1,)),
    ]


def test_values_are_read_into_the_tensor_that_the_planner_hands_out(tmp_path: Path) -> None:
    write(tmp_path, [make_whole_shard("a", torch.arange(6.0))], alone=True)
    all_of_it = torch.zeros(8)
    read(tmp_path, [Shard("a", (6,), ((1, 4),), all_of_it[2:6])])
    assert all_of_it.tolist() == [0, 0, 1, 2, 3, 4, 0, 0]


def test_metadata_is_what_the_global_plan_gave(tmp_path: Path) -> None:
    halves = [
        Shard("a", (4, 2), ((0, 1), (0, 2)), torch.ones(1, 2)),
        Shard("a", (4, 2), ((1, 3), (0, 2)), torch.ones(3, 2)),
    ]
    write(tmp_path, halves, alone=True)
    (entry,) = FileSystemReader(tmp_path).read_metadata().state_dict_metadata.values()
    assert isinstance(entry, TensorStorageMetadata)
    assert (tuple(entry.size), entry.properties.dtype) == ((4, 2), torch.float32)
    assert [tuple(c.offsets) for c in entry.chunks] == [(0, 0), (1, 0)]


def test_files_are_named_as_the_docs_say(tmp_path: Path) -> None:
    write(tmp_path, [make_whole_shard("a", torch.ones(1))], alone=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".metadata",
        "__0.crc32",
        "__0_0.distcp",
    ]


def test_a_failure_is_no_exception_and_tells_ranks_and_causes(tmp_path: Path) -> None:
    assert not issubclass(CheckpointException, Exception)

    class Refuses(checkpoint._Saver):
        def resolve_data(self, write_item: object) -> torch.Tensor:
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointException) as caught, pytest.warns(UserWarning, match="disabled"):
        save(
            {},
            storage_writer=FileSystemWriter(tmp_path),
            planner=Refuses([make_whole_shard("a", torch.ones(1))]),
            no_dist=True,
        )
    ((rank, (cause, _)),) = caught.value.failures.items()
    assert (rank, type(cause)) == (0, OSError)
    assert not (tmp_path / ".metadata").exists()  # written last: without it nothing is read
