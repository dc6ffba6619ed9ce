"""Rollback: weights of a checkpoint, and the steps since left out (train.on_nonfinite=rollback).

The batch whose gradients are not finite may be the last of several that led there.  So a run goes
back to the weights that its newest checkpoint holds, and on with the step after the bad one: the
batches between have changed nothing (PaLM, arXiv 2204.02311, section 5.1).

What a run goes back to is a function of the bad step alone: only a checkpoint that was due by
train.save_every counts, not one that a preemption wrote.  A run that goes on from any checkpoint
comes to the same bad step and does the same, so that nothing of a rollback must be kept on disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrun.engine.errors import RunError
from flowrun.launcher.launch.restart.restarts import find_newest_whole
from flowrun.launcher.launch.restart.snapshot_memory import SnapshotMemory
from flowrun.launcher.launch.restart.stamps import NONE
from flowrun.launcher.recipe.schema import ROLLBACK
from flowrun.launcher.report.record import Record
from flowrun.launcher.store.checkpoint import Checkpoint, remove_partial

MOST_ROLLBACKS = 20  # to one checkpoint: its weights, too, are no good


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
        """Where the weights lie."""
        return self.weights.folder if self.weights else None

    @property
    def fresh(self) -> bool:
        """True if they are those of the beginning."""
        return self.weights is None


@dataclass(frozen=True)
class Rollbacks:
    """The rollbacks of a run so far.

    to: steps of the checkpoint gone back to last.  in_row: rollbacks to it, one after the other.
    """

    to: int = NONE
    in_row: int = 0

    def after(self, to: int) -> Rollbacks | None:
        """Return the rollbacks with one more, to a checkpoint of `to` steps; None if the run
        ends.
        """
        in_row = self.in_row + 1 if to == self.to else 1
        return Rollbacks(to, in_row) if in_row <= MOST_ROLLBACKS else None


def choose_weights(found: Sequence[Checkpoint], every: int, bad: int) -> Checkpoint | None:
    """Return the checkpoint to go back to; None: the beginning.

    found: the checkpoints of a run, oldest first.  every: train.save_every.  bad: the step that is
    not finite.
    """
    before = [checkpoint for checkpoint in found if checkpoint.step <= bad]
    due = [checkpoint for checkpoint in before if checkpoint.step % every == 0]
    return find_newest_whole(due, strict=True) or find_newest_whole(before, strict=True)


def roll_back(
    record: Record,
    rollbacks: Rollbacks,
    steps: int | None,
    error: BaseException,
    snapshots: SnapshotMemory | None = None,
) -> Rollbacks | None:
    """Put the job and the run's folder where the ranks go on, and say so; return the rollbacks with
    this one, or None if the run ends, as it does where the recipe wants no rollback.

    record: of the run; the start of its job is replaced.  rollbacks: so far.  steps: begun by
    the end of the step that is not finite; None: the fault is another.  error: what is said of it.
    snapshots: what the ranks left in memory, which is of no use.
    """
    train = record.job.recipe.train
    if train.on_nonfinite != ROLLBACK or steps is None or not isinstance(error, RunError):
        return None
    weights = choose_weights(record.checkpoints, train.save_every, steps - 1)
    first = weights.step if weights else 0
    if (again := rollbacks.after(first)) is None:
        return None
    start = record.job.start = RolledBack(steps, weights)
    if snapshots:
        snapshots.stamps.keep(NONE)
    record.go_back(
        start,
        {
            "time": time.time(),
            "where": error.where,
            "problem": error.problem,
            "reached": record.reached,
            "first": steps,
            "source": "checkpoint" if weights else "beginning",
            "left_out": [first, steps - 1],
        },
    )
    record.leave_out(range(first, steps))
    source = f"the checkpoint of step {first}" if weights else "the beginning"
    record.note(
        f"{error.where}: {error.problem.splitlines()[0]} The run goes on at step {steps} with the"
        f" weights of {source}; the updates of steps {first} to {steps - 1} are left out."
    )
    remove_partial(record.folder)
    return again
