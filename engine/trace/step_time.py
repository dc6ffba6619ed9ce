"""Attribution of step time: seconds of each rank's thread by cause, from a trace.

A rank sleeps when no actor can act.  The causes of a sleep are found by walking back from the next
act that computed, at each act to the need that was met last.  Time in which all ranks of a
communication had begun it is exposed communication; time before that is waiting for ranks; time in
a reader is waiting for data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, BoxWork, Plan, TransferWork
from flowrun.engine.trace.trace import ActKey, Slice, TraceEvent, What, build_slices, step_number


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one rank's step by cause, means over `steps` steps; they add up to `step_s`.

    compute_s: running acts.
    handling_s: starting communication and storing what arrived, packing included.
    communication_s: waiting for bytes in flight.
    ranks_s: waiting for ranks that had not yet begun their part of a communication.
    data_s: waiting for readers.
    engine_s: the rest, Python between acts.
    reasons: actor name -> seconds of the three waits, longest first.
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


def measure_steps(plan: Plan, events: Mapping[int, Sequence[TraceEvent]]) -> tuple[StepTime, ...]:
    """Return the step times of each rank that recorded; none unless a complete step, and the step
    before it, were recorded.
    """
    traced = {rank: build_slices(plan, rank, own) for rank, own in events.items()}
    first = first_whole_step(plan, traced)
    begun = {(s.rank, s.actor, s.act): s.begin for slices in traced.values() for s in slices}
    times = (
        _RankTrace(plan, rank, events[rank], traced[rank], begun).time(first)
        for rank in sorted(events)
        if first is not None and any(event.what == What.RUN for event in events[rank])
    )
    return tuple(time for time in times if time is not None)


def first_whole_step(plan: Plan, traced: Mapping[int, Sequence[Slice]]) -> int | None:
    steps = []
    for rank, slices in traced.items():
        actors = plan.stage_actors(plan.stage_of(rank))
        acts = sum(plan.acts_per_step(actor) for actor in actors)
        counts = Counter(step_number(plan, s.actor, s.act) for s in slices)
        steps.append({step for step, count in counts.items() if count == acts})
    whole = set.intersection(*steps) if steps else set()
    return min(whole, default=None)


class _RankTrace:
    """Events and slices of one rank, indexed by act.

    begun: (rank, actor, act) -> beginning in ns, for acts of all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        events: Sequence[TraceEvent],
        slices: Sequence[Slice],
        begun: Mapping[tuple[int, int, int], int],
    ) -> None:
        self.plan = plan
        self.rank = rank
        of_thread = (e for e in events if e.what not in (What.FLIGHT, What.RUN))
        self.thread = sorted(of_thread, key=lambda event: event.begin)
        self.runs = [e for e in events if e.what == What.RUN]
        self.slices: dict[ActKey, Slice] = {(s.actor, s.act): s for s in slices}
        self.computed = [e for e in self.thread if e.what == What.COMPUTE]
        self.begun = begun

    def time(self, first: int) -> StepTime | None:
        """Return the means over the steps after `first`; over `first` too if it began the run.

        Otherwise the end of `first` is where counting starts: acts that ran ahead of a step would
        count without those of the step before, which are no longer recorded.
        """
        steps_of = {step_number(self.plan, *act) for act in self.slices}
        steps = max(steps_of) - first + (first == 0)
        if not steps:
            return None
        ends = [s.done for act, s in self.slices.items() if step_number(self.plan, *act) == first]
        start = max(ends) if first else min(run.begin for run in self.runs)
        spent: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for event in (e for e in self.thread if e.begin >= start):
            if event.what == What.SLEEP:
                for cause, actor, length in self._split_sleep(event):
                    spent[cause] += length
                    reasons[actor] += length
            else:
                spent[event.what] += event.end - event.begin
        total = sum(max(0, run.end - max(run.begin, start)) for run in self.runs)
        each = 1e-9 / steps
        return StepTime(
            rank=self.rank,
            steps=steps,
            step_s=total * each,
            compute_s=spent[What.COMPUTE] * each,
            handling_s=(spent[What.ISSUE] + spent[What.TAKE]) * each,
            communication_s=spent["communication"] * each,
            ranks_s=spent["ranks"] * each,
            data_s=spent["data"] * each,
            engine_s=(total - sum(spent.values())) * each,
            reasons={name: length * each for name, length in reasons.most_common()},
        )

    def _split_sleep(self, sleep: TraceEvent) -> Iterator[tuple[str, str, int]]:
        """Yield (communication | ranks | data, actor name, ns) for parts of a sleep, last first."""
        begin, end = sleep.begin, sleep.end
        following = bisect_left(self.computed, end, key=lambda event: event.begin)
        next_one = self.computed[following] if following < len(self.computed) else sleep
        act_slice = self.slices.get((next_one.actor, next_one.act))
        while act_slice is not None and act_slice.done > begin and end > begin:
            if self._is_asynchronous(act_slice.actor) and act_slice.begin < end:
                since = max(begin, act_slice.begin)
                yield from self._split_wait(act_slice, since, end)
                end = since
            act_slice = self.slices.get(act_slice.waited_for.of) if act_slice.waited_for else None
        if end > begin:
            yield "ranks", "?", end - begin

    def _is_asynchronous(self, actor: int) -> bool:
        described = self.plan.actors[actor]
        return described.runs_in_thread or described.kind in (BOX, SEND, RECEIVE)

    def _split_wait(self, act_slice: Slice, begin: int, end: int) -> Iterator[tuple[str, str, int]]:
        """Split a wait for one act: first for ranks that had not begun it, then for its bytes."""
        name = self.plan.actors[act_slice.actor].name
        if self.plan.actors[act_slice.actor].runs_in_thread:
            batches = self.plan.actors[act_slice.actor].makes_batches
            yield "data" if batches else "communication", name, end - begin
            return
        complete = min(end, max(begin, self._last_begin(act_slice)))
        yield "ranks", name, complete - begin
        yield "communication", name, end - complete

    def _last_begin(self, act_slice: Slice) -> int:
        """Return when the last rank of a communication began it, in ns, as far as recorded."""
        actor = self.plan.actors[act_slice.actor]
        if isinstance(actor.work, BoxWork):
            group = self.plan.placements[actor.stage].group(self.rank, actor.work.step.axis)
            others = [(rank, actor.id, act_slice.act) for rank in group]
        else:
            assert isinstance(actor.work, TransferWork)
            channel = actor.work.channel
            others = [
                (rank, other.id, act_slice.act)
                for other in self.plan.actors
                if isinstance(other.work, TransferWork) and other.work.channel == channel
                for rank in self.plan.placements[other.stage].ranks
            ]
        return max(self.begun.get(each, act_slice.begin) for each in others)
