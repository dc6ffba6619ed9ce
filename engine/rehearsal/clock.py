"""Clock: all stages of a plan on one virtual clock.

One rank stands for all ranks of its stage (they differ only by coordinate), so the cost is flat in
the number of ranks.  A rank computes one act at a time.  Collectives and messages run next to it,
over a link for each level of the network and direction (link_traffic.py); the share of compute that
they take makes acts longer.  What makes batches ready runs next to it too.  A transfer ends when
both ends have posted it.  Where cores are fewer than what wants them, they are shared
(shared_cores.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from flowrun.engine.actors.deadlock import deadlock
from flowrun.engine.actors.plan import Actor, Counts, Orders, Plan
from flowrun.engine.ir.graph import COUNT
from flowrun.engine.rehearsal.clock_state import ActTable, ClockState, Event
from flowrun.engine.rehearsal.period import Period

_AHEAD = 4  # steps of an endless training after the last that counts: for what runs ahead


class Clock:
    """Runs a number of steps, or as many of an endless training.

    endless: then events and the order of collectives are not recorded.  count_memory: count live
    bytes.  skip_repeats: what repeats is run once.
    """

    def __init__(
        self,
        plan: Plan,
        cost: Callable[[Actor], float],
        steps: int,
        *,
        skip_repeats: bool,
        endless: bool = False,
        count_memory: bool = False,
    ) -> None:
        self.plan = plan
        self.steps = steps
        self.count_memory = count_memory
        # what reads a step ahead would idle in the last
        self.endless = endless or any(actor.phase == COUNT for actor in plan.actors)
        self.table = ActTable.of(plan, cost)
        last = steps + (_AHEAD if self.endless else 0)
        self.state = ClockState(
            plan, self.table, last, records=not endless, count_memory=count_memory
        )
        self.period = Period(self.state) if skip_repeats else None
        self.ends = len(plan.axes) + 1  # a queue of compute that begins and collectives that end

    def run(self) -> None:
        """Run to the end, or until steps repeat.  Raises PlanError if the plan cannot end."""
        state, period, stage = self.state, self.period, self.table.stage
        idle = set(range(len(state.ranks)))  # stages that may have something to compute now
        self._communicate_all(idle)
        while actors := self._next(idle):
            if more := self._delay(actors[0]):
                self._lengthen(actors, more)
                self._share_cores()
                continue
            whole = False
            for actor in actors:
                whole |= self._end(actor)
            ended = sorted({stage[actor] for actor in actors})
            self._communicate_all(ended)
            idle.update(ended)
            self._share_cores()
            if whole and self.endless and not state.left[self.steps - 1]:
                return
            if period and period.look(actors, whole):
                return
        if not all(rank.is_finished() for rank in state.ranks):
            raise deadlock(self.plan, state.ranks)

    def _next(self, idle: set[int]) -> tuple[int, ...]:
        """Go to what ends next, and return its actors: all that ends at one moment does before
        anything more is computed, on the idle stages.
        """
        state = self.state
        if idle and not (state.heap and state.heap[0][0] <= state.now):
            self._compute(sorted(idle))
            idle.clear()
            self._share_cores()
        if not state.heap:
            return ()
        state.now, _, actors = heapq.heappop(state.heap)
        return actors

    @property
    def step_s(self) -> float:
        """Seconds of a step that repeats; else the time between the ends of steps 2 and 3."""
        if self.period and self.period.step_s is not None:
            return self.period.step_s
        return self.state.step_ends[2] - self.state.step_ends[1]

    def order(self) -> tuple[Orders, Counts, Counts]:
        """Return `order`, `due` and `ended` of Plan, as the last step had them."""
        stages, orders = len(self.state.ranks), []
        due: list[tuple[int, ...]] = [()] * stages
        ended: list[tuple[int, ...]] = [()] * stages
        for stage, queue in sorted(self.state.issued):
            places = self._places(stage, queue) if queue != self.ends else ()
            if places:
                order, due[stage] = zip(*places, strict=True)
                ends = dict(self._places(stage, self.ends))
                ended[stage] = tuple([ends.get(act, 0) for act in order])
                orders.append(((stage, queue), order))
        counts = (tuple(due), tuple(ended)) if self.plan.one_order else ((), ())
        return tuple(orders), *counts

    def _places(self, stage: int, queue: int) -> list[tuple[tuple[int, int], int]]:
        """Return the acts of communication that the last step wrote down in a queue, and how many
        of compute before each.
        """
        last, per_step, computes = self.steps - 1, self.table.acts, self.table.computes
        issued = self.state.issued.get((stage, queue), ())
        acts = [(k, n % per_step[k]) for k, n in issued if n // per_step[k] == last]
        paced = itertools.accumulate(self.table.paces[k] for k, _ in acts)
        return [(act, n) for act, n in zip(acts, paced, strict=True) if not computes[act[0]]]

    def _communicate_all(self, stages: Iterable[int]) -> None:
        """Issue all communication of stages that may be, and supply what feeds them."""
        for stage in stages:
            rank = self.state.ranks[stage]
            while launched := rank.next_communication():
                self._communicate(stage, *launched)
            while launched := rank.next_supply():
                self._begin(stage, *launched)

    def _compute(self, stages: Iterable[int]) -> None:
        """Begin the act that is next on each stage that computes nothing."""
        state = self.state
        for stage in stages:
            rank = state.ranks[stage]
            if state.computing[stage]:
                continue
            if launched := rank.next_compute():
                state.computing[stage] = True
                state.traffic.computes(stage, state.now)
                if self.plan.one_order:
                    state.record(*launched, self.ends)
                self._begin(stage, *launched)

    def _begin(self, stage: int, actor: int, act: int) -> None:
        state, seconds = self.state, self.table.seconds[actor]
        if self.count_memory:
            state.memory[stage].begin(actor, act)
        self._run(state.now, seconds, actor)
        if state.cores and self.table.needs_core[actor]:
            state.cores.begin(actor, seconds, state.now)

    def _lengthen(self, actors: tuple[int, ...], more: float) -> None:
        state = self.state
        state.push(state.now + more, actors)
        if state.cores:
            state.cores.lengthen(actors[0], more, state.now)

    def _share_cores(self) -> None:
        """Recompute end times after acts began or ended."""
        state = self.state
        if not state.cores:
            return
        ends = state.cores.ends()
        for k, (_, begun, actors) in enumerate(state.heap):
            if actors[0] in ends:
                state.heap[k] = ends[actors[0]], begun, actors
        heapq.heapify(state.heap)

    def _run(self, start: float, seconds: float, *actors: int) -> None:
        for actor in actors:
            self.state.began[actor] = start
        self.state.push(start + seconds, actors)

    def _delay(self, actor: int) -> float:
        """Seconds by which communication delays the end of an act that should end now."""
        if not self.table.computes[actor]:
            return 0.0
        return self.state.traffic.longer(self.table.stage[actor], self.state.now)

    def _communicate(self, stage: int, actor: int, act: int) -> None:
        state, table = self.state, self.table
        if self.count_memory:  # a message waits for its other end in memory
            state.memory[stage].begin(actor, act)
        also: tuple[int, ...] = ()
        if table.channel[actor] >= 0:
            meeting = table.channel[actor], act
            other = state.posted.pop(meeting, None)
            if other is None:
                state.posted[meeting] = actor
                return
            also = (other,)
        for each in (actor, *also):
            state.record(each, act, table.queue[actor])
        seconds, spared = table.seconds[actor], 0.0
        if state.cores and state.cores.has_room(actor):
            spared = table.crowding_s[actor]
        start = state.traffic.take(actor, state.now, seconds, spared)
        self._run(start, seconds - spared, actor, *also)

    def _end(self, actor: int) -> bool:
        """End an act; True if it was the last of its step."""
        state, table = self.state, self.table
        stage = table.stage[actor]
        rank = state.ranks[stage]
        act, began = rank.acts[actor], state.began.pop(actor)
        if table.computes[actor]:
            state.computing[stage] = False
            if self.plan.one_order:
                state.record(actor, act, len(self.plan.axes))
        if state.cores and table.needs_core[actor]:
            state.cores.end(actor, state.now)
        if table.ends_foreseen[actor]:
            state.record(actor, act, self.ends)
        if self.count_memory:
            state.memory[stage].end(actor, act)
        if state.records:
            state.events.append(Event(stage, actor, act, began, state.now))
        rank.end_act(actor)
        step, place = divmod(act, table.acts[actor])
        state.count_place(place, table.acts[actor])
        state.step_ends[step] = max(state.step_ends[step], state.now)
        state.left[step] -= 1
        return not state.left[step]
