"""A rank's checkpoints, off the path of its steps: it copies what it saves, and trains on while a
thread writes the copy.

The thread runs where the core would be idle; at most one checkpoint is under way.  No rank waits
for another: the launcher knows when all have written.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.rank.shard_file import Written
from flowrun.engine.runtime.rank.shards import Shard

_NICE = 15  # a thirtieth of a core that the rank computes on, and all of one where it waits


class BackgroundSave:
    """Writes the checkpoints of one rank, one at a time.

    rank: names its file.  written: called when a file is on the disk.  failed: called with the
    error of one that is not.  waited: called with the steps of two checkpoints when the second has
    to wait for the first.  aside: False to write before training goes on, and without a copy.
    """

    def __init__(
        self,
        *,
        rank: int,
        written: Callable[[Path, int, str, Written], None],
        failed: Callable[[BaseException], None],
        waited: Callable[[int, int], None],
        aside: bool = True,
    ) -> None:
        self._rank = rank
        self._written = written
        self._failed = failed
        self._waited = waited
        self._aside = aside
        self._copies: dict[object, torch.Tensor] = {}  # memory that the next checkpoint takes again
        self._thread: threading.Thread | None = None
        self._step = 0

    def save(self, folder: Path, step: int, shards: Iterable[Shard]) -> None:
        """Save the regions of this rank; they may change as soon as this returns.

        folder: the checkpoint, which exists.  step: steps done.  shards: the regions.
        """
        if self._thread is not None and self._thread.is_alive():
            self._waited(step, self._step)
        self.finish()
        kept = [self._copy(shard) for shard in shards] if self._aside else list(shards)
        self._step = step
        self._thread = threading.Thread(
            target=self._write, args=(folder, step, kept), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not self._aside:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, shard: Shard) -> Shard:
        value = shard.value.detach()
        if shard.place not in self._copies:
            self._copies[shard.place] = torch.empty(
                value.shape, dtype=value.dtype, pin_memory=value.is_cuda
            )
        return replace(shard, value=self._copies[shard.place].copy_(value))

    def _write(self, folder: Path, step: int, shards: Sequence[Shard]) -> None:
        try:
            if sys.platform == "linux":  # there a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            written = logical_checkpoint.write(folder, self._rank, shards)
            name = logical_checkpoint.file_of(folder, self._rank).name
            self._written(folder, step, name, written)
        except OSError as error:
            where = f"rank {self._rank}, checkpoint of step {step}"
            self._failed(RunError(where, f"{error.filename}: {error.strerror}."))
        except BaseException as error:
            self._failed(error)
