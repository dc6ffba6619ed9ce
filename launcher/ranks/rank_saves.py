"""What a rank saves: its part of checkpoints, and of the weights that the run ends with.

A checkpoint is off the path of the steps: the rank copies what it saves, and trains on while a
thread writes the copy.  The thread runs where the core would be idle; at most one checkpoint is
under way.  No rank waits for another: the launcher knows when all have written.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.drivers.pulse import Activity, Pulse
from flowrun.engine.runtime.process.give_way import give_way
from flowrun.engine.runtime.rank.shards import Shard, choose_shards, make_whole_shard
from flowrun.launcher.job.job import Job
from flowrun.launcher.ranks.failure import with_peers
from flowrun.launcher.ranks.rank_events import FileWritten, Remarked, WeightsWritten
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.tensor_file import write

Tell = Callable[[Notice], None]


class BackgroundSave:
    """Writes the checkpoints of one rank, one at a time.

    rank: names its file.  send: takes what is to be known of them.  failed: called with the error
    of one that is not written.  late_s: seconds after which the disk is late with one.  aside:
    False to write before training continues, without a copy.
    """

    def __init__(
        self,
        rank: int,
        send: Tell,
        failed: Callable[[BaseException], None],
        late_s: float,
        aside: bool = True,
    ) -> None:
        self._rank, self._send, self._failed = rank, send, failed
        self.late_s, self._aside = late_s, aside
        self._copies: dict[object, torch.Tensor] = {}  # memory that the next checkpoint takes again
        self._thread: threading.Thread | None = None
        self._step = 0
        self._began_s = 0.0  # on the monotonic clock; inf: it was named as late

    def save(self, folder: Path, step: int, shards: Iterable[Shard]) -> None:
        """Save the regions of this rank; they may change as soon as this returns.

        folder: the checkpoint, which exists.  step: steps done.  shards: the regions.
        """
        if self.is_busy and self._rank == 0:
            said = (
                f"the checkpoint of step {step} waits for that of step {self._step}, which the disk"
                " has not taken yet; a larger train.save_every would not wait"
            )
            self._send(Remarked(said))
        self.finish()
        kept = [self._copy(shard) for shard in shards] if self._aside else list(shards)
        self._step, self._began_s = step, time.monotonic()
        self._thread = threading.Thread(
            target=self._write, args=(folder, step, kept), name="checkpoint", daemon=True
        )
        self._thread.start()
        give_way(self._thread)
        if not self._aside:
            self.finish()

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is under way."""
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> None:
        """Name a checkpoint that is late, while training continues; before each step."""
        if time.monotonic() - self._began_s > self.late_s and self.is_busy:
            self._began_s = math.inf
            said = (
                f"rank {self._rank}: its file of the checkpoint of step {self._step} is not on the"
                f" disk after {self.late_s:.0f} s; training continues"
            )
            self._send(Remarked(said))

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, which nothing of this rank delays then."""
        if self._thread is not None:
            give_way(self._thread, 0)
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
            written = logical_checkpoint.write(folder, self._rank, shards)
            name = logical_checkpoint.file_of(folder, self._rank).name
            self._send(FileWritten(step, name, written))
        except OSError as error:
            where = f"rank {self._rank}, checkpoint of step {step}"
            self._failed(RunError(where, f"{error.filename}: {error.strerror}."))
        except BaseException as error:  # or the rank would train on without it
            self._failed(error)


class RankSaves:
    """Saves what a rank of a job holds.  Every rank calls each method, at the same steps."""

    def __init__(
        self,
        job: Job,
        trained: DistributedRank,
        folder: Path,
        pulse: Pulse,
        send: Tell,
        fail: Callable[[BaseException], None],
        limit_s: float,
    ) -> None:
        """fail: called in a thread with the error of a checkpoint that is not written.  limit_s:
        seconds after which one is named that is late; 0: never.
        """
        self._job, self._trained, self._folder = job, trained, folder
        self._pulse, self._send, self._rank = pulse, send, trained.rank
        late_s, aside = limit_s or math.inf, job.recipe.train.save_aside
        self.background = BackgroundSave(trained.rank, send, fail, late_s, aside)

    def save_checkpoint(self, step: int) -> None:
        """Save this rank's part of a checkpoint to its host's folder, from which the first host
        fetches it if it does not see it.

        step: number of steps done.
        """
        self._pulse.enter(Activity.SAVING)
        folder = checkpoints.partial_folder(self._folder, step)
        for each in (folder.parent, folder):  # and not the run's folder, if it was removed
            each.mkdir(exist_ok=True)
        self.background.save(folder, step, self._shards())

    def save_weights(self, steps: int) -> None:
        """Write this rank's regions of the weights after `steps` steps, if train.save is on."""
        if not self._job.recipe.train.save:
            return
        self._pulse.enter(Activity.SAVING_WEIGHTS)
        import torch.distributed as dist

        about = self._job.about(steps)
        if self._job.recipe.launch.num_hosts > 1:
            self._save_weights_apart(about)
            return
        files = weights.plan_files(self._folder, self._job.saved, about)
        if self._rank == 0:
            for file in files:
                file.begin()
        with with_peers(self._rank, "saving weights"):
            dist.barrier()  # the files are there
        write(files, self._shards())
        with with_peers(self._rank, "saving weights"):
            dist.barrier()  # every rank has written
        if self._rank == 0:
            for file in files:
                file.complete()

    def _save_weights_apart(self, about: checkpoints.About) -> None:
        """Several hosts: write a file of this rank's own; the first host joins those of all."""
        import torch.distributed as dist

        if not int(os.environ["LOCAL_RANK"]):
            weights.drop_shards(self._folder)
        with with_peers(self._rank, "saving weights"):
            dist.barrier()  # old ones are gone
        shards = [shard for shard in self._shards() if shard.name in self._job.saved]
        file = weights.save_shards(self._folder, self._rank, shards, about)
        self._send(WeightsWritten(self._rank, file.name))

    def _shards(self) -> list[Shard]:
        trained = self._trained
        return list_shards(self._job, trained.plan, self._rank, trained.body.variables)


def list_shards(
    job: Job, plan: Plan, rank: int, variables: Mapping[str, torch.Tensor]
) -> list[Shard]:
    """Return what a rank saves: its part of all variables; the first rank also what forward does
    not read.
    """
    shards, initial = choose_shards(plan, rank, variables), job.materials.initial
    unused = job.unused if rank == 0 else ()
    return [*shards, *(make_whole_shard(name, initial[name]) for name in unused)]
