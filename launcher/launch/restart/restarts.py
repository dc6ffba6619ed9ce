"""Restarts: what the launcher does when ranks have died (launch.restarts).

The launcher still holds the compiled job, so it forks new ranks where the newest whole state lies.
`Attempts` decides; it knows no process and no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.rank.shards import choose_shards, make_whole_shard
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.launch.restart.snapshot_memory import MemorySnapshot, SnapshotMemory
from flowrun.launcher.launch.restart.stamps import NONE
from flowrun.launcher.report.record import Record
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store.checkpoint import Checkpoint

LONGEST_WAIT_S = 60.0
_LOOK_S = 0.1  # from one look to the next whether something is asked


class Ending(Enum):
    """Why ranks have ended: one died or lost another (DIED), the code of one raised an error
    (RAISED), a host has left (LEFT), or someone wants the run to end (STOPPED).
    """

    DIED, RAISED, LEFT, STOPPED = range(4)


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """The restarts of a run so far.

    limit: restarts in a row that reach no new step; then the run ends.
    may_change: hosts may leave, which counts as no restart.
    in_row: such restarts so far.  total: all restarts.
    furthest: most steps that were ever done.
    raised: the last attempt ended with an error of a rank's code.
    """

    limit: int
    may_change: bool = False
    in_row: int = 0
    total: int = 0
    furthest: int = 0
    raised: bool = False

    def after(self, ending: Ending, reached: int) -> Attempts | None:
        """Return the attempts with one more restart; None if the run ends.

        ending: why the ranks ended.  reached: steps done by then.  An error that a rank's code
        raises again before there is a new step would be raised each time.
        """
        if ending is Ending.LEFT:
            after = replace(self, total=self.total + 1, furthest=max(reached, self.furthest))
            return after if self.may_change else None
        progress = reached > self.furthest
        in_row = 0 if progress else self.in_row
        again = ending is Ending.RAISED and self.raised and not progress
        if ending is Ending.STOPPED or again or in_row >= self.limit:
            return None
        return replace(
            self,
            in_row=in_row + 1,
            total=self.total + 1,
            furthest=max(reached, self.furthest),
            raised=ending is Ending.RAISED,
        )

    @property
    def wait_s(self) -> float:
        """Seconds before this restart: none before the first in a row, then 1, 2, 4 and so on."""
        return min(LONGEST_WAIT_S, 2.0 ** (self.in_row - 2)) if self.in_row > 1 else 0.0


def go_back(record: Record, snapshots: SnapshotMemory | None) -> None:
    """Put the job where its ranks begin again, as far as this host knows.

    record: of the run; the start of its job is replaced.  snapshots: what the ranks left in memory.
    """
    start = record.job.start = choose_start(record.checkpoints, snapshots)
    if snapshots:
        snapshots.stamps.keep(start.step if isinstance(start, MemorySnapshot) else NONE)


def restart(record: Record, attempts: Attempts, error: RunError, start: Start | None) -> None:
    """Put the run's folder where the ranks begin again, and say so.

    record: forgets the steps that will be done again.  attempts: with this restart.  error: why the
    ranks ended.  start: what all hosts go on from.
    """
    first, reached = start.step if start else 0, record.reached
    kept = "snapshot" if isinstance(start, MemorySnapshot) else "checkpoint"
    source = kept if start else "beginning"
    record.go_back(
        start,
        {
            "restart": record.restarts + 1,
            "time": time.time(),
            "where": error.where,
            "problem": error.problem,
            "reached": reached,
            "first": first,
            "source": source,
        },
    )
    count = f"Restart {attempts.in_row} of {attempts.limit}" if attempts.in_row else "Goes on"
    why = "" if attempts.may_change else f"{error.where}: {error.problem.splitlines()[0]} "
    record.note(f"{why}{count} from step {first} ({source}), {reached - first} back.")


def back_off(seconds: float, is_asked: Callable[[], bool]) -> None:
    """Wait, but no longer than until the run is asked for something."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not is_asked():
        time.sleep(min(left, _LOOK_S))


class RanksLost(RunError):
    """The error of ranks that die whenever they are started, where fewer ranks may go on."""


def give_up(
    record: Record, snapshots: SnapshotMemory | None, ending: Ending, error: RunError
) -> RunError:
    """Save the newest state as a checkpoint, which any layout reads, and return the error.

    record: of the run.  snapshots: what its ranks left in memory.  ending: why they ended.
    error: what is blamed.
    """
    if ending is Ending.STOPPED:
        return error
    checkpoints.remove_partial(record.folder)
    start = choose_start(record.checkpoints, snapshots)
    if isinstance(start, MemorySnapshot) and start.step:
        try:
            _save(record, start)
        except (OSError, RunError) as refused:
            record.note(f"the snapshot of step {start.step} could not be saved: {refused}")
    fewest = record.job.recipe.launch.min_ranks
    if ending is Ending.DIED and fewest and fewest < record.job.recipe.num_ranks:
        return RanksLost(error.where, error.problem)
    return error


def _save(record: Record, start: MemorySnapshot) -> None:
    job, plan = record.job, start.memory.plan
    folder, files = checkpoints.partial_folder(record.folder, start.step), {}
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(plan.num_ranks):
        written = write_rank(job, plan, folder, rank, start.views(rank))
        files[logical_checkpoint.file_of(folder, rank).name] = written
    record.complete_checkpoint(folder, start.step, files)


def write_rank(
    job: Job, plan: Plan, folder: Path, rank: int, held: Mapping[str, Tensor]
) -> tuple[int, int]:
    """Write what a rank left in memory as its file of a checkpoint; return bytes and checksum.

    job, plan: what the rank did.  folder: of the checkpoint.  held: tensor of the graph -> what the
    rank holds.
    """
    shards = choose_shards(plan, rank, held)
    unused = job.unused if rank == 0 else ()
    shards += [make_whole_shard(name, job.materials.initial[name]) for name in unused]
    return logical_checkpoint.write(folder, rank, shards)


def choose_start(found: Sequence[Checkpoint], snapshots: SnapshotMemory | None) -> Start | None:
    """Return the newest whole state of a run; None if there is none.

    found: its checkpoints, oldest first.  snapshots: what its ranks left in memory.
    """
    snapshot = snapshots.newest if snapshots else None
    newer = [checkpoint for checkpoint in found if not snapshot or checkpoint.step >= snapshot.step]
    checkpoint = find_newest_whole(newer, bool(snapshot))
    return checkpoint or snapshot


def find_newest_whole(found: Sequence[Checkpoint], strict: bool = False) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, of those of a run; None if it has none.

    Where none is whole it is the oldest, unless `strict`: what is wrong with it is said by the
    ranks that read it.
    """
    there = [checkpoint for checkpoint in found if checkpoint.folder.is_dir()]
    whole = next((checkpoint for checkpoint in reversed(there) if not checkpoint.damage()), None)
    return whole or (None if strict else next(iter(there), None))
