"""Which state a run's ranks begin at: the newest that is whole, in memory or on a disk.

Rollback (train.on_nonfinite=rollback): the batch whose gradients are not finite may be the last of
several that led there.  So a run goes back to the weights that its newest checkpoint holds, and on
with the step after the bad one: the batches between have changed nothing (PaLM, arXiv 2204.02311,
section 5.1).  What it goes back to is a function of the bad step alone: only a checkpoint that was
due by train.save_every counts, not one that a preemption wrote.  A run that begins at any
checkpoint comes to the same bad step and does the same, so that nothing of a rollback must be kept
on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.ranks.rank_saves import list_shards
from flowrun.launcher.ranks.snapshot_memory import NONE, MemorySnapshot, SnapshotMemory
from flowrun.launcher.report.record import Record
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store.checkpoint import Checkpoint
from flowrun.launcher.supervise.life.events import ROLLED_BACK, StartPoint


@dataclass(frozen=True)
class RolledBack:
    """A state to go on from.

    step: steps that are done or left out.  weights: the checkpoint that holds them; None: they are
    those of the beginning.
    """

    step: int
    weights: Checkpoint | None
    ended = False  # an evaluation or a checkpoint may be due after the bad step

    @property
    def folder(self) -> Path | None:
        return self.weights.folder if self.weights else None

    @property
    def fresh(self) -> bool:
        return self.weights is None


def place_of(start: Start | None) -> StartPoint:
    """Describe a state to the machine."""
    if start is None:
        return StartPoint()
    if isinstance(start, RolledBack):
        weights = start.weights.step if start.weights else 0
        return StartPoint(start.step, ROLLED_BACK, weights=weights)
    if isinstance(start, MemorySnapshot):
        return StartPoint(start.step, "snapshot")
    return StartPoint(start.step, "checkpoint", start.step)


def find_start(
    found: Sequence[Checkpoint], snapshots: SnapshotMemory | None, bad: int
) -> Checkpoint | MemorySnapshot | None:
    """Return the newest whole state of a run; None if there is none.  What is older in memory is
    forgotten.  Where none is whole it is the oldest checkpoint: what is wrong with it is said by
    the ranks that read it.

    found: its checkpoints, oldest first.  snapshots: what its ranks left in memory.  bad: steps
    begun by the end of a bad one, from which on nothing in memory counts; 0: none was bad.  A rank
    that reports and trains nothing takes no snapshots that could hold such a step back.
    """
    stamps = snapshots and snapshots.stamps
    if stamps and 0 < bad <= stamps.newest():
        stamps.keep(NONE)
    snapshot = snapshots.newest if snapshots else None
    newer = [checkpoint for checkpoint in found if not snapshot or checkpoint.step >= snapshot.step]
    oldest = next((checkpoint for checkpoint in newer if checkpoint.folder.is_dir()), None)
    start = checkpoints.find_whole(newer) or snapshot or oldest
    if stamps:
        stamps.keep(start.step if isinstance(start, MemorySnapshot) else NONE)
    return start


def find_rollback(found: Sequence[Checkpoint], every: int, steps: int) -> RolledBack:
    """Return the state after a bad step, with the weights of a checkpoint or of the beginning.

    found: the checkpoints of a run, oldest first.  every: train.save_every.  steps: begun by the
    end of the bad one.
    """
    before = [checkpoint for checkpoint in found if checkpoint.step <= steps - 1]
    due = [checkpoint for checkpoint in before if checkpoint.step % every == 0]
    weights = checkpoints.find_whole(due) or checkpoints.find_whole(before)
    return RolledBack(steps, weights)


def save_snapshot(record: Record, job: Job, snapshots: SnapshotMemory | None, bad: int) -> None:
    """Save what ranks of a job left in memory as a checkpoint, which any layout reads, if it is the
    newest state.  bad: see find_start.  Raises OSError, RunError.
    """
    folder = record.folder
    checkpoints.remove_partial(folder)
    start = find_start(record.checkpoints, snapshots, bad)
    if not isinstance(start, MemorySnapshot) or not start.step:
        return
    plan, partial = start.memory.plan, checkpoints.partial_folder(folder, start.step)
    partial.mkdir(parents=True, exist_ok=True)
    files = {}
    for rank in range(plan.num_ranks):
        shards = list_shards(job, plan, rank, start.views(rank))
        name = logical_checkpoint.file_of(partial, rank).name
        files[name] = logical_checkpoint.write(partial, rank, shards)
    record.complete_checkpoint(start.step, files)
