"""What a rank does for snapshots: it copies its variables as they are updated.

A variable is copied when its last update of a step is done, so that no pipeline drains and no rank
waits for another.
"""

from __future__ import annotations

from flowrun.engine.actors.plan import Actor
from flowrun.engine.ir.graph import UPDATE
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.launcher.job.job import Start
from flowrun.launcher.ranks.snapshot_memory import (
    NONE,
    MemorySnapshot,
    SnapshotMemory,
    Views,
    find_updaters,
)


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
        self.updaters = find_updaters(plan, self.rank)
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
        return {name: self.variables[name] for name, _ in actor.updates}

    @staticmethod
    def _copy(values: Views, views: Views) -> None:
        for name in values.keys() & views.keys():
            views[name].copy_(values[name])
