"""Snapshots: copies of the variables of ranks, in memory that outlives the ranks.

The launcher maps the memory before it forks; ranks that die leave it to those that come after them.

A rank has two buffers, and copies a variable when its last update of a step is done; a buffer whose
variables are all there gets the number of steps done as its stamp.

**Some step is whole on every rank**, at any moment after the first that was.  A rank never opens
the buffer that holds the newest such step, and under the lock only one rank opens at a time.  Where
no rank updates a step before all have updated the step before, as in every plan whose ranks need
each other's results, the newest such step is at most the steps between two snapshots back.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowrun.engine.actors.plan import Actor, Plan
from flowrun.engine.compile import Rehearsed
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.rank.shards import list_held
from flowrun.engine.runtime.transport.pending import num_bytes, tensors_in
from flowrun.launcher.job.job import Job
from flowrun.launcher.terminal.units import size

NONE = -1  # the stamp of a buffer that holds no whole step


class Stamps:
    """The steps done of what lies in the two buffers of each rank; shared by processes.

    ranks: of one host.  updating: those that have variables which change; the buffers of the others
    stay as they are first filled, and their stamps count for every step.
    """

    def __init__(self, ranks: Sequence[int], updating: Sequence[int]) -> None:
        self._values = memoryview(mmap.mmap(-1, 8 * (2 * len(ranks) + 1))).cast("q")
        self._index = {rank: k for k, rank in enumerate(ranks)}
        self.ranks, self.updating = tuple(ranks), tuple(updating)
        self.keep(NONE)

    def of(self, rank: int) -> tuple[int, int]:
        """The stamps of a rank's buffers."""
        k = 2 * self._index[rank]
        return self._values[k], self._values[k + 1]

    def newest(self) -> int:
        """Return the newest step that every rank holds whole; NONE if there is none."""
        if any(max(self.of(rank)) == NONE for rank in self.ranks):
            return NONE
        held = (set(self.of(rank)) for rank in self.updating)
        return max(set.intersection(*held) - {NONE}, default=NONE)

    def open(self, rank: int) -> int:
        """Return the buffer where a rank may write a step, which holds no whole step from now on:
        never the one that holds the newest of all.
        """
        with self._lock:
            kept, stamps = self.newest(), self.of(rank)
            buffer = 1 - stamps.index(kept) if kept in stamps else 0
            self._values[2 * self._index[rank] + buffer] = NONE
        return buffer

    def close(self, rank: int, buffer: int, step: int) -> None:
        """Stamp the buffer of a rank: it holds `step` whole."""
        self._values[2 * self._index[rank] + buffer] = step

    def keep(self, step: int) -> None:
        """Forget all but one step, or all (NONE), between the death of ranks and the next fork."""
        for rank in self.ranks:
            if step == NONE or rank in self.updating:
                for buffer, stamp in enumerate(self.of(rank)):
                    self.close(rank, buffer, stamp if stamp == step else NONE)
        # a rank that was killed may have held the lock
        self._lock = multiprocessing.get_context("fork").Lock()


Views = Mapping[str, torch.Tensor]  # by tensor of the plan


class SnapshotMemory:
    """The snapshots of the ranks of a plan, in the memory of one host.

    every: steps from one to the next.
    """

    def __init__(self, plan: Plan, every: int) -> None:
        self.plan, self.every = plan, every
        ranks = range(plan.num_ranks)
        self.stamps = Stamps(ranks, [rank for rank in ranks if find_updaters(plan, rank)])
        self._maps = {rank: mmap.mmap(-1, max(1, 2 * count_bytes(plan, rank))) for rank in ranks}

    def views(self, rank: int) -> tuple[Views, Views]:
        """The variables of a rank in each of its buffers."""
        names, shapes, dtypes = _held(self.plan, rank)
        both = torch.frombuffer(self._maps[rank], dtype=torch.uint8).tensor_split(2)
        one, other = (dict(zip(names, tensors_in(x, shapes, dtypes), strict=True)) for x in both)
        return one, other

    def read(self, rank: int, step: int) -> Views:
        """The variables of a rank after `step` steps, which it holds: in any buffer of one whose
        variables stay.
        """
        stamps = self.stamps.of(rank)
        buffer = stamps.index(step) if step in stamps else max((0, 1), key=stamps.__getitem__)
        return self.views(rank)[buffer]

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
        return self.memory.read(rank, self.step)

    def restore(self, rank: int, variables: Views) -> None:
        """Fill the variables of a rank."""
        for name, view in self.views(rank).items():
            variables[name].copy_(view)


def _held(plan: Plan, rank: int) -> tuple[list[str], list[Shape], list[torch.dtype]]:
    """Return the variables that a rank holds, and the shapes and dtypes of its pieces."""
    held = {v.tensor: tuple(n for _, n in slices) for v, slices in list_held(plan, rank)}
    return [*held], [*held.values()], [plan.tensors[name].dtype for name in held]


def count_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes of a buffer of a rank; its tensors are aligned in both of them."""
    _, shapes, dtypes = _held(plan, rank)
    return -(-num_bytes(shapes, dtypes) // 64) * 64


def map_snapshots(
    job: Job, training: Rehearsed, note: Callable[[str], None]
) -> SnapshotMemory | None:
    """Map memory for snapshots, where the recipe wants them and the host has it.

    training: the plan, and what its ranks take.  note: takes a line where the host has it not.
    """
    every, plan = job.recipe.train.snapshot_every, training.plan
    alone = job.recipe.launch.num_hosts == 1 and not job.others  # one plan changes all variables
    if not (job.recipe.launch.restarts and alone) or every == 0:
        return None
    needed = sum(2 * count_bytes(plan, rank) for rank in range(plan.num_ranks))
    peaks = training.rehearsal.peak_bytes
    taken = sum(peaks[plan.stage_of(rank)] for rank in range(plan.num_ranks))
    there = available_bytes() - (taken if job.device_type == "cpu" else 0)
    if needed > there:
        note(
            f"train.snapshot_every: snapshots would take {size(needed)} of this host's memory, and"
            f" {size(max(0, there))} are free; a restart begins at a checkpoint."
        )
        return None
    return SnapshotMemory(plan, 1 if every is None else every)


def find_updaters(plan: Plan, rank: int) -> dict[int, Actor]:
    """Return the actors that change variables of a rank."""
    return {actor.id: actor for actor in plan.stage_actors(plan.stage_of(rank)) if actor.updates}


def available_bytes() -> int:
    """Return the memory that this host, or the control group of this process, can still give; all
    there can be where nothing counts it.
    """
    found = [sys.maxsize]
    if sys.platform == "linux":
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(rows["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            most = int((group / "memory.max").read_text())
            found.append(most - int((group / "memory.current").read_text()))
    return min(found)
