"""Snapshots: copies of the variables of ranks, in memory that outlives the ranks.

The launcher maps the memory before it forks; ranks that die leave it to those that come after them.
A rank has two buffers, and which of them holds what is in their stamps (stamps.py).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.compile import Rehearsed
from flowrun.engine.runtime.rank.pieces import count_bytes, find_lent, lay_out
from flowrun.launcher.job.job import Job
from flowrun.launcher.launch.restart.host_memory import available_bytes
from flowrun.launcher.launch.restart.stamps import NONE, Stamps
from flowrun.launcher.recipe.schema import nodes_of
from flowrun.launcher.report.record import Record
from flowrun.launcher.terminal.units import size

Views = Mapping[str, torch.Tensor]  # by tensor of the plan


class SnapshotMemory:
    """The snapshots of ranks of a plan, in the memory of one host.

    every: steps from one to the next.  ranks: whose; None: all of the plan.  aimed: see Stamps.
    lender: the snapshots of other ranks, in the memory of the same host: what those hold as well,
    as ranks do that divide a batch, is not there twice.
    """

    def __init__(
        self,
        plan: Plan,
        every: int,
        ranks: Sequence[int] | None = None,
        aimed: bool = False,
        lender: SnapshotMemory | None = None,
    ) -> None:
        self.plan, self.every, self.lender = plan, every, lender
        ranks = range(plan.num_ranks) if ranks is None else ranks
        self.stamps = Stamps(ranks, [rank for rank in ranks if find_updaters(plan, rank)], aimed)
        self.lent = find_lent(plan, ranks, lender.stamps.ranks if lender else ())
        self.bytes = {rank: count_bytes(plan, rank, self.lent[rank]) for rank in ranks}
        self._maps = {rank: mmap.mmap(-1, max(1, 2 * self.bytes[rank])) for rank in ranks}

    def views(self, rank: int) -> tuple[Views, Views]:
        """The variables of a rank in each of its buffers, without those that are lent."""
        flat = torch.frombuffer(self._maps[rank], dtype=torch.uint8)
        pieces, total = lay_out(self.plan, rank, self.lent[rank])
        found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        for buffer, views in enumerate(found):
            for piece in pieces:
                at = buffer * total + piece.start
                raw = flat[at : at + piece.num_bytes]
                views[piece.tensor] = raw.view(piece.dtype).view(piece.shape)
        return found

    def raw(self, rank: int, buffer: int) -> memoryview:
        """The bytes of a buffer of a rank."""
        size = self.bytes[rank]
        return memoryview(self._maps[rank])[buffer * size : (buffer + 1) * size]

    def holds(self, rank: int, step: int) -> bool:
        """Return whether all variables of a rank are here, as they were after `step` steps."""
        lenders = set(self.lent[rank].values())
        return self.stamps.holds(rank, step) and all(
            self.lender is not None and self.lender.holds(other, step) for other in lenders
        )

    def find_buffer(self, rank: int, step: int) -> int:
        """Return the buffer where a rank holds `step`: any of one whose variables stay."""
        stamps = self.stamps.of(rank)
        return stamps.index(step) if step in stamps else max((0, 1), key=stamps.__getitem__)

    def runs(self, rank: int, lent: Mapping[str, int]) -> list[tuple[int, int]]:
        """Return from where to where the bytes of a buffer are not of tensors that are lent."""
        pieces, total = lay_out(self.plan, rank, {})
        ends = [piece.start for piece in pieces[1:]] + [total]
        return [
            (piece.start, end)
            for piece, end in zip(pieces, ends, strict=True)
            if piece.tensor not in lent
        ]

    def read(self, rank: int, step: int) -> Views:
        """The variables of a rank after `step` steps, which it holds."""
        found = dict(self.views(rank)[self.find_buffer(rank, step)])
        for tensor, other in self.lent[rank].items():
            assert self.lender is not None
            found[tensor] = self.lender.read(other, step)[tensor]
        return found

    @property
    def newest(self) -> MemorySnapshot | None:
        """The newest step that every rank holds whole."""
        step = self.stamps.newest()
        return None if step == NONE else MemorySnapshot(step, self)

    def forget_from(self, step: int) -> None:
        """Forget all if the newest is of `step` steps or more, of which the last was bad.

        A rank that reports and trains nothing takes no snapshots that could hold such a step back.
        """
        if self.stamps.newest() >= step:
            self.stamps.keep(NONE)


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
        return self.memory.read(rank, self.step)

    def restore(self, rank: int, variables: Views) -> None:
        """Fill the variables of a rank."""
        for name, view in self.views(rank).items():
            variables[name].copy_(view)


def map_snapshots(record: Record, training: Rehearsed) -> SnapshotMemory | None:
    """Map memory for snapshots, where the recipe wants them and the host has it; those of several
    hosts are mapped in each round (neighbour_copies.py).

    record: takes a note where it does not.  training: the plan, and what its ranks take.
    """
    job, plan = record.job, training.plan
    every = find_interval(job)
    if not every or nodes_of(record.asked.launch).most > 1:
        return None
    ranks = range(plan.num_ranks)
    needed = sum(2 * count_bytes(plan, rank, {}) for rank in ranks)
    if why := find_shortage(job, training, ranks, needed):
        record.note(f"train.snapshot_every: snapshots {why}; a restart begins at a checkpoint.")
        return None
    return SnapshotMemory(plan, every)


def find_interval(job: Job) -> int:
    """Return the steps from one snapshot to the next; 0: the recipe wants none."""
    every = job.recipe.train.snapshot_every
    if not job.recipe.launch.restarts:
        return 0
    return 1 if every is None else every


def find_shortage(job: Job, training: Rehearsed, ranks: Sequence[int], needed: int) -> str:
    """Say why this host has not the memory; empty if it has.

    job, training: what its ranks do.  ranks: those of this host.  needed: bytes for snapshots.
    """
    peaks, plan = training.rehearsal.peak_bytes, training.plan
    taken = sum(peaks[plan.stage_of(rank)] for rank in ranks) if job.device_type == "cpu" else 0
    there = available_bytes() - taken
    if needed <= there:
        return ""
    return f"would take {size(needed)} of this host's memory, and {size(max(0, there))} are free"


def find_updaters(plan: Plan, rank: int) -> dict[int, Actor]:
    """Return the actors that change variables of a rank."""
    return {
        actor.id: actor
        for actor in plan.stage_actors(plan.stage_of(rank))
        if isinstance(actor.work, RegionWork) and actor.work.updates
    }
