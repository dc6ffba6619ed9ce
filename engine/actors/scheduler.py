"""Scheduler: the actors of one rank, their protocol states, and which of them act next.

Shared by the rehearsal and both drivers; knows no clock, thread or tensor.  Ready actors act by
priority: backward and update > forward > weight_grad, then older micro-batch, then plan order.
Updates are not kept back to fill gaps, as weight gradients are: one that waits for a collective
fills no gap better than backward does.  Where a stage has several chunks, forward and backward take
turns, which 1f1b holds forwards to (schedules.py).  Communication is issued at once, in the order
that the rehearsal fixed for each queue; where all has one order, a receive waits for the compute
that goes before it, too.

Those of a blocking axis take turns with compute, as on one stream: one of them or one act at a
time, a micro-batch's collectives first, a step's when nothing else can be computed.  All blocking
axes of a stage have one order: so the first that is not done yet waits for no later one, on any of
its ranks, and its ranks may compute until they come to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial

from flowrun.engine.actors.plan import COMMUNICATION, RECEIVE, Actor, Plan, RegionWork
from flowrun.engine.actors.protocol import (
    LaunchAct,
    begin,
    can_act,
    counted_state,
    end,
    go_on,
    idle,
    initial_state,
    missing,
    wire,
)
from flowrun.engine.ir.graph import BACKWARD, COUNT, FORWARD, UPDATE, WEIGHT_GRAD, WEIGHTS

PRIORITY = {COUNT: 0, WEIGHTS: 0, UPDATE: 0, BACKWARD: 0, FORWARD: 1, WEIGHT_GRAD: 2}

TURNING = (FORWARD, BACKWARD, WEIGHT_GRAD)


class Scheduler:
    """The actors of one rank of one stage.

    They act from step `first` until `steps` have been done; acts are counted from step 0.
    may_begin: asked with a number of steps when an actor is about to begin the last of them; once
    it says no, the rank comes to rest before that step.  None: nobody is asked.
    granted: the steps that it may do so far.  last: those that it does if nobody refuses one.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        steps: int,
        first: int = 0,
        may_begin: Callable[[int], bool] | None = None,
    ) -> None:
        self.plan = plan
        self._stage = stage
        self.actors = {actor.id: actor for actor in plan.stage_actors(stage)}
        self.per_step = {k: plan.acts_per_step(actor) for k, actor in self.actors.items()}
        self.specs = wire(self.per_step, plan.rings(stage), steps)
        self._some = {k: spec.some for k, spec in self.specs.items()}
        self.acts = {k: first * n for k, n in self.per_step.items()}  # finished ones
        self.states = {k: initial_state(spec, self.acts[k]) for k, spec in self.specs.items()}
        self.order = {axis: acts for (where, axis), acts in plan.order if where == stage}
        self.issued = dict.fromkeys(self.order, 0)
        self._due = plan.due[stage] if plan.due else ()
        self._axes = {k: plan.queue(actor) for k, actor in self.actors.items()}
        self._blocking = {k for k, actor in self.actors.items() if plan.blocks(actor)}
        self._blocked: set[int] = set()  # under way: acts of compute and what takes turns with it
        self._priority = {k: PRIORITY[a.phase] for k, a in self.actors.items() if a.computes}
        self._pace, self._often, self._paced_acts = _pace_of(self.actors.values(), self.per_step)
        self._paced = 0  # acts of these begun, from `first` on, as `issued`
        self._turns = self._interleave(stage) if plan.schedule.orders else {}
        self._backward = self._next_turns()
        self._early: list[int] = []  # forwards that an earlier turn's backward goes before
        self._compute: list[tuple[int, int, int]] = []  # heap of (priority, turn, actor)
        self._communicate: list[int] = []
        self._seeks = True  # one of them may be in turn that was not when last asked
        self._supply: list[int] = []
        self._unfinished = 0
        self.granted, self.last = first, steps
        self._may_begin = may_begin
        self._resting = self._begin_idle()
        self._grant()

    @classmethod
    def from_counts(
        cls, plan: Plan, stage: int, steps: int, *, begun: Sequence[int], done: Sequence[int]
    ) -> Scheduler:
        """Return the scheduler of a rank by its counts; it knows what waits, not what is next.

        begun, done: acts by actor.
        """
        scheduler = cls(plan, stage, steps)
        scheduler.acts = {k: done[k] for k in scheduler.actors}
        busy = {k for k in scheduler.actors if begun[k] > done[k]}
        specs, acts = scheduler.specs, scheduler.acts
        scheduler.states = {k: counted_state(specs, acts, k, running=k in busy) for k in specs}
        for axis, order in scheduler.order.items():
            scheduler.issued[axis] = _first_missing(order, begun, scheduler.per_step)
        scheduler._backward = scheduler._next_turns()
        scheduler._paced = sum(begun[k] for k in scheduler._pace)
        scheduler._blocked = busy & (scheduler._priority.keys() | scheduler._blocking)
        return scheduler

    def end_act(self, actor: int) -> None:
        """An act has ended: take all messages that follow from it on this rank.

        An actor is queued by the token that was the last to come; tokens leave by its acts alone.
        """
        specs, states = self.specs, self.states
        self._blocked.discard(actor)
        acts = self.acts[actor] = self.acts[actor] + 1
        state, sent = end(specs[actor], states[actor], acts)
        states[actor] = state
        if actor in self._backward:
            self._backward[actor] = self._turns[actor](acts)
            early, self._early = self._early, []
            for forward in early:
                self._queue(forward)
        if acts == self.granted * self.per_step[actor]:
            self._rest(actor)
        elif can_act(specs[actor], state):
            self._queue(actor)
        for to, tokens in sent:
            before, some = states[to], self._some[to]
            after = states[to] = before + tokens  # as `receive`
            if after & some == some != before & some:  # it can act, and could not
                self._queue(to)
        if self._resting:
            self._grant()

    def _rest(self, actor: int) -> None:
        """Hold an actor back that has done all that is granted."""
        self._unfinished -= 1
        if self.granted < self.last:
            self._resting.append(actor)
        if idle(self.states[actor]):  # it is not at its limit
            self.states[actor] = begin(self.states[actor])

    def _grant(self) -> None:
        """Let the actors that are held back continue, by one step or as far as they may."""
        if self.granted == self.last:
            return
        resting, self._resting = self._resting, []
        if self._may_begin is None:
            self.granted = self.last
        elif self._may_begin(self.granted + 1):
            self.granted += 1
        else:
            self.last = self.granted
            return
        self._unfinished += len(resting)
        for actor in resting:
            state = self.states[actor] = go_on(self.states[actor])
            if can_act(self.specs[actor], state):
                self._queue(actor)

    def release_compute(self, actor: int) -> None:
        """Free the compute: others may compute during the rest of this act."""
        self._blocked.discard(actor)

    def next_compute(self) -> LaunchAct | None:
        """Take the ready computing actor of highest priority."""
        if self._blocked:
            return None
        return self._launch(heapq.heappop(self._compute)[2]) if self._compute else None

    @property
    def may_compute(self) -> bool:
        """True if `next_compute` returns an act."""
        return bool(self._compute)

    def next_communication(self) -> LaunchAct | None:
        """Take a collective or transfer that may be issued now."""
        if not self._seeks:
            return None
        for k, actor in enumerate(self._communicate):
            if self._in_turn(actor) and not self._gives_way(actor):
                del self._communicate[k]
                return self._launch(actor)
        self._seeks = bool(self._blocking)  # these give way to others, too
        return None

    def ends_after(self, actor: int, act: int) -> int:
        """Return how many more acts of compute are to begin before a collective ends, as in the
        rehearsal (Plan.foresees_end); 0 or less: none.
        """
        step, place = divmod(act, self.per_step[actor])
        return step * self._paced_acts + self._ended[actor, place] - self._paced

    def next_supply(self) -> LaunchAct | None:
        """Take a ready actor whose acts run next to compute."""
        return self._launch(self._supply.pop(0)) if self._supply else None

    def is_finished(self) -> bool:
        """True if every actor has done its last act."""
        return not self._unfinished

    def waits(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return what each unfinished idle actor waits for: ("input" | "credit", register), or
        ("turn", axis) for its place in a group's order.
        """
        waiting = ((k, state) for k, state in self.states.items() if idle(state))
        return {k: missing(self.specs[k], s) or (("turn", self._axes[k]),) for k, s in waiting}

    def busy(self) -> list[int]:
        """Return the actors whose act has begun."""
        done = {k for k, n in self.per_step.items() if self.acts[k] == self.granted * n}
        return [k for k, state in self.states.items() if not idle(state) and k not in done]

    def actor_before(self, actor: int) -> int | None:
        """Return the actor that goes before one that could act; None if none does."""
        if self._blocked and (actor in self._priority or actor in self._blocking):
            return min(self._blocked)
        order = self.order.get(self._axes[actor])
        first = order[self.issued[self._axes[actor]] % len(order)][0] if order else actor
        if first == actor and not self._in_turn(actor):  # it is not due
            return min(self._pace, key=lambda k: self.acts[k] / self.per_step[k])
        return self._goes_before(actor) if first == actor else first

    def moment(self, since: Sequence[int]) -> tuple[object, ...]:
        """Return all that decides what comes next, with acts counted from `since`, by actor."""
        return (
            tuple([acts - since[k] for k, acts in self.acts.items()]),
            tuple(self.states.values()),
            tuple([actor for *_, actor in sorted(self._compute)]),
            tuple(self._early),
            tuple(self._communicate),
            tuple(self._supply),
        )

    def skip_ahead(self, acts: int, turns: Mapping[int, int]) -> None:
        """Fast-forward actors of micro-batches by `acts` acts, and axes by turns; queues stay."""
        for k, n in self.per_step.items():
            self.acts[k] += acts if n > 1 else 0
        for axis, count in turns.items():
            self.issued[axis] += count
        self._paced += acts * self._often
        self._seeks = True
        self._backward = self._next_turns()
        self._compute = [self._urgency(actor) for *_, actor in self._compute]
        heapq.heapify(self._compute)

    def repeats_due(self, place: int, earlier: int, acts: int) -> bool:
        """Return whether a place of the one order is due `acts` acts after an earlier one."""
        return not self._due or self._due[place] == self._due[earlier] + acts * self._often

    @cached_property
    def _ended(self) -> dict[tuple[int, int], int]:
        """`ended` of this stage's acts: a rank asks for it, the rehearsal does not."""
        (order,) = self.order.values()
        return dict(zip(order, self.plan.ended[self._stage], strict=True))

    @cached_property
    def _communicates(self) -> set[int]:
        """Actors that communicate."""
        return {k for k, actor in self.actors.items() if actor.kind in COMMUNICATION}

    @cached_property
    def _receives(self) -> set[int]:
        """Actors whose acts are due after compute."""
        return {k for k, a in self.actors.items() if self._due and a.kind == RECEIVE}

    def _begin_idle(self) -> list[int]:
        """Begin the acts that no token is missing for, and return their actors."""
        ready = [k for k, state in self.states.items() if idle(state)]
        self.states |= {k: begin(self.states[k]) for k in ready}
        return ready

    def _interleave(self, stage: int) -> dict[int, Callable[[int], int]]:
        """Give the acts of a stage the priority of their schedule.

        Returns actor -> the turn of each of its acts.
        """
        schedule = self.plan.schedule
        acts_in_turn: dict[int, Callable[[int], int]] = {}
        for k in self._priority:
            actor = self.actors[k]
            if isinstance(actor.work, RegionWork) and actor.phase in TURNING:
                chunk = actor.work.ops[0].chunk
                acts_in_turn[k] = partial(schedule.turn, actor.phase, stage, chunk)
                self._priority[k] = schedule.priority(actor.phase, chunk)
        return acts_in_turn

    def _next_turns(self) -> dict[int, int]:
        """Return the turn of the next act of each actor of backward, where turns are kept."""
        of = self.actors if self.plan.schedule.keeps_turns else {}
        backward = (k for k, a in of.items() if a.phase == BACKWARD and not a.per_step)
        return {k: self._turns[k](self.acts[k]) for k in backward if k in self._turns}

    def _goes_before(self, actor: int) -> int | None:
        """Return the backward that a forward has to let go before; None if it may act."""
        if not self._backward or self.actors[actor].phase != FORWARD or actor not in self._turns:
            return None
        first = min(self._backward, key=self._backward.__getitem__)
        return first if self._backward[first] < self._turns[actor](self.acts[actor]) else None

    def _urgency(self, actor: int) -> tuple[int, int, int]:
        """Return the sort key of a ready actor: the least computes next."""
        act = self.acts[actor]
        turn = self._turns[actor](act) if actor in self._turns else act
        return self._priority[actor], turn, actor

    def _launch(self, actor: int) -> LaunchAct:
        self.states[actor] = begin(self.states[actor])
        if actor in self._priority or actor in self._blocking:
            self._blocked.add(actor)
        if actor in self._pace:
            self._paced += 1
            self._seeks |= bool(self._due)
        axis = self._axes[actor]
        if axis in self.issued:
            self.issued[axis] += 1
        return LaunchAct(actor, self.acts[actor])

    def _gives_way(self, actor: int) -> bool:
        """Return whether a blocking collective waits; one of a step does for all compute."""
        if actor not in self._blocking:
            return False
        return bool(self._blocked) or (self.actors[actor].per_step and bool(self._compute))

    def _in_turn(self, actor: int) -> bool:
        axis = self._axes[actor]
        if (order := self.order.get(axis)) is None:
            return True
        step, place = divmod(self.issued[axis], len(order))
        first, act = order[place]
        if first != actor or act != self.acts[actor] % self.per_step[actor]:
            return False
        if actor not in self._receives:
            return True
        return self._paced >= step * self._paced_acts + self._due[place]

    def _queue(self, actor: int) -> None:
        if self._backward and self._goes_before(actor) is not None:
            self._early.append(actor)
        elif actor in self._priority:
            heapq.heappush(self._compute, self._urgency(actor))
        elif actor in self._communicates:
            self._communicate.append(actor)
            self._seeks = True
        else:
            self._supply.append(actor)


def _pace_of(
    actors: Iterable[Actor], per_step: Mapping[int, int]
) -> tuple[dict[int, int], int, int]:
    """Return the actors by whose acts receives are due, with their acts in a step; how many of them
    act in each micro-batch; the sum of the acts.
    """
    pace = {actor.id: per_step[actor.id] for actor in actors if actor.paces}
    return pace, sum(n > 1 for n in pace.values()), sum(pace.values())


def _first_missing(
    order: Sequence[tuple[int, int]], begun: Sequence[int], per_step: Mapping[int, int]
) -> int:
    """Return the place, counted from step 0, of the first act in an order that has not begun."""
    step = min(begun[actor] // per_step[actor] for actor, _ in order)
    in_order = enumerate(order)
    missing = (k for k, (actor, act) in in_order if begun[actor] <= step * per_step[actor] + act)
    return step * len(order) + next(missing)
