"""Where a step went: the time of each rank's thread by what it was spent on, from a trace.

A rank sleeps when nothing can act.  The acts that it waited for then are found by going back from
the next act that computed, each time to what was needed last: communication that all its ranks had
begun was not hidden; before that, the rank waited for others; or it waited for data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, BoxWork, Plan, TransferWork
from flowrun.engine.trace.trace import (
    COMPUTE,
    FLIGHT,
    ISSUE,
    RUN,
    SLEEP,
    TAKE,
    ActKey,
    Slice,
    TraceEvent,
    slices_of,
    step_of,
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step of one rank, the mean of `steps` steps; they add up to `step_s`.

    compute_s: acts.  handling_s: beginning communication and storing what came, packing included.
    communication_s: waited for bytes under way.  ranks_s: waited for ranks that had not begun
    theirs.  data_s: waited for readers.  engine_s: all else, Python between acts.  reasons: actor
    -> seconds, of the three waits, the longest first.
    """

    rank: int
    steps: int
    step_s: float
    compute_s: float
    handling_s: float
    communication_s: float
    ranks_s: float
    data_s: float
    engine_s: float
    reasons: dict[str, float] = field(default_factory=dict)


def step_times(plan: Plan, notes: Mapping[int, Sequence[TraceEvent]]) -> tuple[StepTime, ...]:
    """One of each rank that recorded; empty if no step was recorded whole, with one before it."""
    traced = {rank: slices_of(plan, rank, own) for rank, own in notes.items()}
    first = first_whole_step(plan, traced)
    begun = {(s.rank, s.actor, s.act): s.begin for slices in traced.values() for s in slices}
    times = (
        _RankTrace(plan, rank, notes[rank], traced[rank], begun).time(first)
        for rank in sorted(notes)
        if first is not None and any(note.what == RUN for note in notes[rank])
    )
    return tuple(time for time in times if time is not None)


def first_whole_step(plan: Plan, traced: Mapping[int, Sequence[Slice]]) -> int | None:
    """The first step of which every act of every rank was recorded."""
    steps = []
    for rank, slices in traced.items():
        actors = plan.stage_actors(plan.stage_of(rank))
        acts = sum(plan.acts_per_step(actor) for actor in actors)
        counts = Counter(step_of(plan, s.actor, s.act) for s in slices)
        steps.append({step for step, count in counts.items() if count == acts})
    whole = set.intersection(*steps) if steps else set()
    return min(whole, default=None)


class _RankTrace:
    """One rank's notes, made ready to be asked.  begun: (rank, actor, act) -> when, of all."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        notes: Iterable[TraceEvent],
        slices: Sequence[Slice],
        begun: Mapping[tuple[int, int, int], int],
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.thread = sorted(
            (n for n in notes if n.what not in (FLIGHT, RUN)), key=lambda note: note.begin
        )
        self.runs = [n for n in notes if n.what == RUN]
        self.slices: dict[ActKey, Slice] = {(s.actor, s.act): s for s in slices}
        self.computed = [n for n in self.thread if n.what == COMPUTE]
        self.begun = begun

    def time(self, first: int) -> StepTime | None:
        """The mean over the steps behind the end of `first`, or from it on if it began the run:
        else what runs ahead of a step would stand for a step whose notes are gone.
        """
        steps_of = {step_of(self.plan, *act) for act in self.slices}
        steps = max(steps_of) - first + (first == 0)
        if not steps:
            return None
        ends = [s.done for act, s in self.slices.items() if step_of(self.plan, *act) == first]
        start = max(ends) if first else min(run.begin for run in self.runs)
        spent: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for note in (n for n in self.thread if n.begin >= start):
            if note.what == SLEEP:
                for what, actor, length in self._slept(note):
                    spent[what] += length
                    reasons[actor] += length
            else:
                spent[note.what] += note.end - note.begin
        total = sum(max(0, run.end - max(run.begin, start)) for run in self.runs)
        each = 1e-9 / steps
        return StepTime(
            self.rank,
            steps,
            total * each,
            spent[COMPUTE] * each,
            (spent[ISSUE] + spent[TAKE]) * each,
            spent["communication"] * each,
            spent["ranks"] * each,
            spent["data"] * each,
            (total - sum(spent.values())) * each,
            {name: length * each for name, length in reasons.most_common()},
        )

    def _slept(self, sleep: TraceEvent) -> Iterator[tuple[str, str, int]]:
        """What a sleep was for: (communication | ranks | data, actor, ns), the latest first."""
        begin, end = sleep.begin, sleep.end
        behind = bisect_left(self.computed, end, key=lambda note: note.begin)
        next_one = self.computed[behind] if behind < len(self.computed) else sleep
        found = self.slices.get((next_one.actor, next_one.act))
        while found is not None and found.done > begin and end > begin:
            if self._beside(found.actor) and found.begin < end:
                since = max(begin, found.begin)
                yield from self._divided(found, since, end)
                end = since
            found = self.slices.get(found.waited_for.of) if found.waited_for else None
        if end > begin:
            yield "ranks", "?", end - begin

    def _beside(self, actor: int) -> bool:
        described = self.plan.actors[actor]
        return described.beside or described.kind in (BOX, SEND, RECEIVE)

    def _divided(self, found: Slice, begin: int, end: int) -> Iterator[tuple[str, str, int]]:
        """A wait for one act: at first for the ranks that had not begun it, then for its bytes."""
        name = self.plan.actors[found.actor].name
        if self.plan.actors[found.actor].beside:
            yield "data", name, end - begin
            return
        joined = min(end, max(begin, self._joined(found)))
        yield "ranks", name, joined - begin
        yield "communication", name, end - joined

    def _joined(self, found: Slice) -> int:
        """When the last rank that takes part in communication had begun it, as far as recorded."""
        actor = self.plan.actors[found.actor]
        if isinstance(actor.work, BoxWork):
            group = self.plan.placements[actor.stage].group(self.rank, actor.work.step.axis)
            others = [(rank, actor.id, found.act) for rank in group]
        else:
            assert isinstance(actor.work, TransferWork)
            channel = actor.work.channel
            others = [
                (rank, other.id, found.act)
                for other in self.plan.actors
                if isinstance(other.work, TransferWork) and other.work.channel == channel
                for rank in self.plan.placements[other.stage].ranks
            ]
        return max(self.begun.get(each, found.begin) for each in others)
