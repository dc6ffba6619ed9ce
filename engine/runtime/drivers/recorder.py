"""Recorder: drivers that note what a rank does and when, for a trace.

A note is a TraceEvent, and only the last ones are kept; a run without a trace uses the plain
drivers.  Why an act waited is not noted: it follows from the plan (engine/trace/trace.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch

from flowrun.engine.actors.plan import COMMUNICATION, Actor, Plan
from flowrun.engine.actors.protocol import LaunchAct
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.trace.trace import (
    ActKey,
    TraceEvent,
    What,
    keep_last_steps,
    replace_with_device_times,
)


def make_notes(plan: Plan, stage: int, steps: int) -> deque[TraceEvent]:
    """Return an empty deque for the notes of a rank's last steps.

    There is room for one step more, by which readers may be ahead, and for four notes of each act,
    the most that it has.
    """
    acts = sum(plan.acts_per_step(actor) for actor in plan.stage_actors(stage))
    return deque(maxlen=4 * acts * (steps + 1) + 1)


class RecordedRank(DistributedRank):
    """A rank that notes what it does.  trace: the number of last steps that are kept."""

    def __init__(self, plan: Plan, rank: int, *arguments: Any, trace: int, **options: Any) -> None:
        super().__init__(plan, rank, *arguments, **options)
        self.trace = trace
        self.notes = make_notes(plan, self.body.stage, trace)
        self.marks: deque[tuple[ActKey, tuple[torch.cuda.Event, torch.cuda.Event]]] = deque(
            maxlen=self.notes.maxlen
        )

    def run(
        self,
        steps: int,
        on_step: Callable[[int, Results, float], None] | None = None,
        first: int = 0,
        may_begin: Callable[[int], bool] | None = None,
    ) -> list[Results]:
        with self._note(What.RUN, 0, 0):
            return super().run(steps, on_step, first, may_begin)

    def read_notes(self) -> list[TraceEvent]:
        """Return the notes of the last steps; on CUDA, compute by the device's clock."""
        notes = keep_last_steps(self.plan, self.notes, self.trace)
        if self.device.type != "cuda":
            return notes
        acts = {(note.actor, note.act) for note in notes if note.what == What.COMPUTE}
        return replace_with_device_times(notes, self._device_times(acts))

    def _device_times(self, acts: Collection[ActKey]) -> dict[ActKey, tuple[int, int]]:
        """Return the (begin, end) of acts on the device, in ns of the host's clock, late by the
        time in which the host sees an event: about 10 us.
        """
        last = self._mark()
        last.synchronize()
        now = perf_counter_ns()

        def at(mark: torch.cuda.Event) -> int:
            ago_ms: float = mark.elapsed_time(last)
            return now - round(ago_ms * 1e6)

        marked = ((act, marks) for act, marks in self.marks if act in acts)
        return {act: (at(begin), at(end)) for act, (begin, end) in marked}

    @staticmethod
    def _mark() -> torch.cuda.Event:
        """Return an event on the stream that computes."""
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    @contextmanager
    def _note(self, what: What, actor: int, act: int) -> Iterator[None]:
        begin = perf_counter_ns()
        yield
        self.notes.append(TraceEvent(what, actor, act, begin, perf_counter_ns()))

    def _compute(self, actor: Actor, act: int) -> None:
        with self._note(What.COMPUTE, actor.id, act):
            first = self._mark() if self.device.type == "cuda" else None
            super()._compute(actor, act)
            if first:
                self.marks.append(((actor.id, act), (first, self._mark())))

    def _issue(self, actor: Actor, act: int) -> None:
        with self._note(What.ISSUE, actor.id, act):
            super()._issue(actor, act)

    def _supply(self, actor: Actor, act: int) -> None:
        with self._note(What.ISSUE, actor.id, act):
            super()._supply(actor, act)

    def _report(self, scheduler: Scheduler, actor: Actor, act: int) -> None:
        with self._note(What.ISSUE, actor.id, act):
            super()._report(scheduler, actor, act)

    def _announce(self, actor: int, act: int) -> None:
        now = perf_counter_ns()
        self.notes.append(TraceEvent(What.FLIGHT, actor, act, now, now))
        super()._announce(actor, act)

    def _take(self, scheduler: Scheduler, actor_id: int, act: int) -> None:
        with self._note(What.TAKE, actor_id, act):
            super()._take(scheduler, actor_id, act)

    def _sleep(self) -> tuple[int, int]:
        begin = perf_counter_ns()
        actor, act = super()._sleep()
        self.notes.append(TraceEvent(What.SLEEP, actor, act, begin, perf_counter_ns()))
        return actor, act


class RecordedCluster(VirtualCluster):
    """A virtual cluster that notes what its ranks do.  trace: see RecordedRank."""

    def __init__(self, plan: Plan, *arguments: Any, trace: int) -> None:
        super().__init__(plan, *arguments)
        self.trace = trace
        self.notes = {
            rank: make_notes(plan, body.stage, trace) for rank, body in self.ranks.items()
        }

    def read_notes(self) -> dict[int, list[TraceEvent]]:
        """Return the notes of the last steps, by rank."""
        return {
            rank: keep_last_steps(self.plan, notes, self.trace)
            for rank, notes in self.notes.items()
        }

    def _act(self, rank: int, launched: LaunchAct) -> None:
        begin = perf_counter_ns()
        super()._act(rank, launched)
        self.notes[rank].append(TraceEvent(What.COMPUTE, *launched, begin, perf_counter_ns()))

    def _post(self, rank: int, actor: Actor, act: int) -> None:
        begin = perf_counter_ns()
        self.notes[rank].append(TraceEvent(What.ISSUE, actor.id, act, begin, begin))
        super()._post(rank, actor, act)

    def _end(self, rank: int, actor: Actor, act: int) -> None:
        if actor.kind in COMMUNICATION:
            now = perf_counter_ns()
            self.notes[rank].append(TraceEvent(What.FLIGHT, actor.id, act, now, now))
        super()._end(rank, actor, act)
