"""Snapshots: copies of the variables of every rank, in memory that outlives the ranks.

The launcher maps the memory before it forks; ranks that die leave it to those that come after them.
A rank has two buffers.  A variable is copied when its last update of a step is done, so that no
pipeline drains and no rank waits for another; a buffer whose variables are all there gets the
number of steps done as its stamp.

**Some step is whole on every rank**, at any moment after the first that was.  A rank never opens
the buffer that holds the newest such step, and under the lock only one rank opens at a time.  Where
no rank updates a step before all have updated the step before, as in every plan whose ranks need
each other's results, the newest such step is at most `every` steps back.
"""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.compile import Rehearsed
from flowrun.engine.ir.graph import UPDATE
from flowrun.engine.ir.placement import local_slices
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.launcher.job.job import Start
from flowrun.launcher.launch.restart.host_memory import available_bytes
from flowrun.launcher.report.record import Record
from flowrun.launcher.terminal.units import size

NONE = -1  # the stamp of a buffer that holds no whole step
_ALIGNMENT = 64
Views = Mapping[str, torch.Tensor]  # by tensor of the plan


class Stamps:
    """The steps done of what lies in the two buffers of each rank; shared by processes.

    updating: ranks that have variables which change; the buffers of the others stay as they are
    first filled, and their stamps count for every step.
    """

    def __init__(self, ranks: int, updating: Sequence[int]) -> None:
        self._values = memoryview(mmap.mmap(-1, 16 * ranks)).cast("q")
        self.ranks, self.updating = ranks, tuple(updating)
        self.keep(NONE)

    def of(self, rank: int) -> tuple[int, int]:
        """The stamps of a rank's buffers."""
        return self._values[2 * rank], self._values[2 * rank + 1]

    def newest(self) -> int:
        """Return the newest step that every rank holds whole; NONE if there is none."""
        if any(max(self.of(rank)) == NONE for rank in range(self.ranks)):
            return NONE
        held = (set(self.of(rank)) for rank in self.updating)
        return max(set.intersection(*held) - {NONE}, default=NONE)

    def open(self, rank: int) -> int:
        """Return the buffer that a rank may write over, which holds no whole step from now on."""
        with self._lock:
            newest, stamps = self.newest(), self.of(rank)
            buffer = 1 - stamps.index(newest) if newest in stamps else 0
            self._values[2 * rank + buffer] = NONE
        return buffer

    def close(self, rank: int, buffer: int, step: int) -> None:
        """Stamp the buffer of a rank: it holds `step` whole."""
        self._values[2 * rank + buffer] = step

    def keep(self, step: int) -> None:
        """Forget all but one step, or all (NONE), between the death of ranks and the next fork."""
        for rank in range(self.ranks):
            if step == NONE or rank in self.updating:
                for buffer, stamp in enumerate(self.of(rank)):
                    self.close(rank, buffer, stamp if stamp == step else NONE)
        # a rank that was killed may have held the lock
        self._lock = multiprocessing.get_context("fork").Lock()


class SnapshotMemory:
    """The snapshots of all ranks of a plan, on one host.  every: steps from one to the next."""

    def __init__(self, plan: Plan, every: int) -> None:
        self.plan, self.every = plan, every
        ranks = range(plan.num_ranks)
        self.stamps = Stamps(len(ranks), [rank for rank in ranks if _updaters(plan, rank)])
        self._maps = [mmap.mmap(-1, max(1, 2 * _copy_bytes(plan, rank))) for rank in ranks]

    def views(self, rank: int) -> tuple[Views, Views]:
        """The variables of a rank in each of its buffers."""
        flat = torch.frombuffer(self._maps[rank], dtype=torch.uint8)
        pieces, total = _pieces(self.plan, rank)
        found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        for buffer, views in enumerate(found):
            for piece in pieces:
                at = buffer * total + piece.start
                raw = flat[at : at + piece.num_bytes]
                views[piece.tensor] = raw.view(piece.dtype).view(piece.shape)
        return found

    @property
    def newest(self) -> MemorySnapshot | None:
        """The newest step that every rank holds whole."""
        step = self.stamps.newest()
        return None if step == NONE else MemorySnapshot(step, self)


@dataclass(frozen=True)
class MemorySnapshot:
    """A step that every rank holds whole: where ranks may begin again."""

    step: int
    memory: SnapshotMemory
    ended = False  # ranks may have died before the evaluation that was due
    folder = None
    fresh = False

    def views(self, rank: int) -> Views:
        """The variables of a rank."""
        stamps = self.memory.stamps.of(rank)
        return self.memory.views(rank)[stamps.index(self.step) if self.step in stamps else 0]

    def restore(self, rank: int, variables: Views) -> None:
        """Fill the variables of a rank."""
        for name, view in self.views(rank).items():
            variables[name].copy_(view)


class SnapshotWriter:
    """Copies the variables of a rank as they are updated.

    body: of the rank.  reports: True on the one whose report counts.  memory: where to.
    start: what the rank begins from; where it is no snapshot, the memory holds no step yet, and all
    variables are copied at once.
    """

    def __init__(
        self, body: Rank, reports: bool, memory: SnapshotMemory, start: Start | None
    ) -> None:
        plan, self.rank = memory.plan, body.rank
        self.variables, self.stamps, self.every = body.variables, memory.stamps, memory.every
        self.reports = reports
        self.views = memory.views(self.rank)
        self.updaters = _updaters(plan, self.rank)
        self.acts = {k: plan.acts_per_step(actor) for k, actor in self.updaters.items()}
        phases = {actor.phase for actor in self.updaters.values()}
        self.opens = UPDATE if UPDATE in phases else None  # the phase that opens a buffer
        self.step = NONE  # that is being written
        self.dropped = NONE  # newest step of which updates came while another was being written
        self.reported = start.step if start else 0
        self.left: set[int] = set()  # actors that have not updated yet
        self.early: dict[int, dict[int, Views]] = {}  # step -> actor -> what forward updated
        if not isinstance(start, MemorySnapshot):
            for views in self.views:
                self._copy(self.variables, views)
            self.stamps.close(self.rank, 0, self.reported)
        body.on_update = self.take

    def take(self, actor: Actor, act: int) -> None:
        """Copy what an act has updated."""
        step, part = divmod(act + 1, self.acts[actor.id])
        if part or step % self.every or self.step != step <= self.dropped:
            return
        if step != self.step and self.opens not in (None, actor.phase):
            values = {name: value.clone() for name, value in self._values(actor).items()}
            self.early.setdefault(step, {})[actor.id] = values
            return
        if self.step == NONE:
            self._open(step)
        if step != self.step:
            self.dropped = step
            return
        self._copy(self._values(actor), self.views[self.buffer])
        self.left.discard(actor.id)
        self._close()

    def report(self, steps: int) -> None:
        """Note that the launcher has the numbers of `steps` steps: a snapshot counts no other."""
        self.reported = steps
        self._close()

    def _open(self, step: int) -> None:
        self.step, self.buffer = step, self.stamps.open(self.rank)
        early = self.early.pop(step, {})
        for values in early.values():
            self._copy(values, self.views[self.buffer])
        self.left = set(self.updaters) - set(early)
        self.early = {k: values for k, values in self.early.items() if k > step}

    def _close(self) -> None:
        if self.step == NONE or self.left or (self.reports and self.reported < self.step):
            return
        self.stamps.close(self.rank, self.buffer, self.step)
        self.step = NONE

    def _values(self, actor: Actor) -> Views:
        assert isinstance(actor.work, RegionWork)
        return {name: self.variables[name] for name, _ in actor.work.updates}

    @staticmethod
    def _copy(values: Views, views: Views) -> None:
        for name in values.keys() & views.keys():
            views[name].copy_(values[name])


def map_snapshots(record: Record, training: Rehearsed) -> SnapshotMemory | None:
    """Map memory for snapshots, where the recipe wants them and the host has it.

    record: takes a note where it does not.  training: the plan, and what its ranks take.
    """
    job = record.job
    every = job.recipe.train.snapshot_every
    if not job.recipe.launch.restarts or every == 0:
        return None
    plan, peaks = training.plan, training.rehearsal.peak_bytes
    needed = sum(2 * _copy_bytes(plan, rank) for rank in range(plan.num_ranks))
    ranks = sum(peaks[plan.stage_of(rank)] for rank in range(plan.num_ranks))
    there = available_bytes() - (ranks if job.device_type == "cpu" else 0)
    if needed > there:
        record.note(
            f"train.snapshot_every: snapshots would take {size(needed)} of this host's memory, and"
            f" {size(max(0, there))} are free; a restart begins at a checkpoint."
        )
        return None
    return SnapshotMemory(plan, every or 1)


@dataclass(frozen=True)
class _Piece:
    tensor: str
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _pieces(plan: Plan, rank: int) -> tuple[list[_Piece], int]:
    """Return where the variables of a rank lie in a buffer, and the bytes of the buffer."""
    stage = plan.stage_of(rank)
    placement, found, start = plan.placements[stage], [], 0
    for v in plan.variables.values():
        if v.stage == stage:
            tensor, coordinate = plan.tensors[v.tensor], placement.coordinate(rank)
            slices = local_slices(tensor.shape, v.nd_sbp, placement.shape, coordinate)
            shape = tuple(length for _, length in slices)
            num_bytes = torch.Size(shape).numel() * tensor.dtype.itemsize
            found.append(_Piece(v.tensor, start, num_bytes, shape, tensor.dtype))
            start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return found, start


def _copy_bytes(plan: Plan, rank: int) -> int:
    return _pieces(plan, rank)[1]


def _updaters(plan: Plan, rank: int) -> dict[int, Actor]:
    """Return the actors that change variables of a rank."""
    return {
        actor.id: actor
        for actor in plan.stage_actors(plan.stage_of(rank))
        if isinstance(actor.work, RegionWork) and actor.work.updates
    }
