import os
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.logical_checkpoint import read_whole
from flowrun.engine.runtime.rank.shard_file import Written
from flowrun.engine.runtime.rank.shards import Shard, make_whole_shard
from flowrun.launcher.ranks.rank_events import FileWritten, Remarked
from flowrun.launcher.ranks.rank_saves import BackgroundSave
from flowrun.launcher.ranks.wire import Notice

_WAIT_S = 60  # until a test fails


@dataclass
class Disk:
    """A disk that takes files when it may, and what a rank tells of it."""

    may: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def saves(self, aside: bool = True) -> BackgroundSave:
        return BackgroundSave(0, self._hear, self.failed.append, 3600.0, aside)

    def _hear(self, event: Notice) -> None:
        if isinstance(event, Remarked):
            self.remarks.append(event.text)
            self.may.set()
        elif isinstance(event, FileWritten):
            self.written.append(event.step)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    slow, write = Disk(), logical_checkpoint.write

    def write_late(folder: Path, rank: int, shards: list[Shard]) -> Written:
        assert slow.may.wait(_WAIT_S)
        return write(folder, rank, shards)

    monkeypatch.setattr(logical_checkpoint, "write", write_late)
    return slow


def folder_of(step: int, at: Path) -> Path:
    folder = at / f"{step}"
    folder.mkdir()
    return folder


def test_training_goes_on_and_the_values_are_those_of_the_step(disk: Disk, tmp_path: Path) -> None:
    weight, saving = torch.ones(3), disk.saves()
    saving.save(folder_of(1, tmp_path), 1, [make_whole_shard("w", weight)])
    weight += 1  # while the disk takes nothing
    assert disk.written == []
    disk.may.set()
    saving.finish()
    assert disk.written == [1]
    assert read_whole(tmp_path / "1", ["w"])["w"].tolist() == [1, 1, 1]


def may_raise_priorities() -> bool:
    found = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    return bool(found and int(found[1], 16) >> 23 & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="there a thread has a priority of its own")
def test_a_file_gives_way_to_the_steps_until_its_rank_waits_for_it(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice, saving, join = [], disk.saves(), threading.Thread.join

    def note(thread: threading.Thread) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, thread.native_id or 0))

    def note_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        note(thread)
        disk.may.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", note_and_join)
    saving.save(folder_of(1, tmp_path), 1, [make_whole_shard("w", torch.ones(3))])
    note(next(thread for thread in threading.enumerate() if thread.name == "checkpoint"))
    saving.finish()
    assert nice == [15, 0 if may_raise_priorities() else 15]


def test_a_second_one_waits_and_says_so(disk: Disk, tmp_path: Path) -> None:
    weight, saving = torch.ones(3), disk.saves()
    saving.save(folder_of(1, tmp_path), 1, [make_whole_shard("w", weight)])
    weight += 1
    saving.save(folder_of(2, tmp_path), 2, [make_whole_shard("w", weight)])
    saving.finish()
    assert disk.written == [1, 2]
    (said,) = disk.remarks
    assert said.startswith("the checkpoint of step 2 waits for that of step 1, which the disk has")
    found = [read_whole(tmp_path / name, ["w"])["w"].tolist() for name in ("1", "2")]
    assert found == [[1, 1, 1], [2, 2, 2]]


def test_without_a_copy_it_is_on_the_disk_before_training_goes_on(
    disk: Disk, tmp_path: Path
) -> None:
    disk.may.set()
    disk.saves(aside=False).save(folder_of(1, tmp_path), 1, [make_whole_shard("w", torch.ones(3))])
    assert disk.written == [1]


def test_a_disk_that_refuses_is_told(disk: Disk, tmp_path: Path) -> None:
    disk.may.set()
    saving = disk.saves()
    saving.save(tmp_path / "removed", 1, [make_whole_shard("w", torch.ones(3))])
    saving.finish()
    (error,) = disk.failed
    assert isinstance(error, RunError)
    assert error.where == "rank 0, checkpoint of step 1"
    assert error.problem.endswith("removed/rank00000.safetensors: No such file or directory.")
    assert disk.written == []


def test_a_writer_that_the_disk_blocks_is_named_once_while_training_goes_on(
    disk: Disk, tmp_path: Path
) -> None:
    saving = disk.saves()
    saving.late_s = 0.0
    saving.look()
    saving.save(folder_of(8, tmp_path), 8, [make_whole_shard("w", torch.ones(3))])
    saving.late_s = 3600.0
    saving.look()
    assert disk.remarks == []
    saving.late_s = -1.0
    for _ in range(2):
        saving.look()
    assert disk.remarks == [
        "rank 0: its file of the checkpoint of step 8 is not on the disk after -1 s; training"
        " continues"
    ]
    saving.finish()
    assert disk.written == [8]
