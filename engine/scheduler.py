"""Scheduler: the actors of one rank, their protocol states, and which of them act next.

Shared by the three drivers (virtual clock, virtual cluster, torch.distributed); knows no clock,
thread or tensor.  Ready actors act by priority: backward and update > forward > weight_grad, then
older micro-batch, then plan order.  Collectives are issued at once, in the order that the rehearsal
fixed for each group.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from flowrun.engine.graph import BACKWARD, FORWARD, UPDATE, WEIGHT_GRAD, WEIGHTS
from flowrun.engine.plan import BOX, RECEIVE, SEND, Actor, BoxWork, Plan
from flowrun.engine.protocol import (
    ActorSpec,
    ActorState,
    Done,
    Launch,
    Message,
    can_act,
    initial_state,
    launch,
    missing,
    step,
)

PRIORITY = {WEIGHTS: 0, UPDATE: 0, BACKWARD: 0, FORWARD: 1, WEIGHT_GRAD: 2}
COMMUNICATION = (BOX, SEND, RECEIVE)


class Scheduler:
    """The actors of one rank of one stage.

    They act from step `first` until `steps` have been done; acts are counted from step 0.
    """

    def __init__(self, plan: Plan, stage: int, steps: int | None, first: int = 0) -> None:
        self.plan = plan
        self.actors: dict[int, Actor] = {actor.id: actor for actor in plan.stage_actors(stage)}
        self.specs: dict[int, ActorSpec] = {
            k: plan.spec(actor, steps) for k, actor in self.actors.items()
        }
        self.states: dict[int, ActorState] = {
            k: initial_state(spec, plan.sources, first * plan.acts_per_step(self.actors[k]))
            for k, spec in self.specs.items()
        }
        self.producers: dict[int, int] = plan.producers
        self.order = {axis: acts for (where, axis), acts in plan.order if where == stage}
        self.issued = dict.fromkeys(self.order, 0)
        self._axes = {k: _axis(actor) for k, actor in self.actors.items()}
        self._compute: list[tuple[int, int, int]] = []  # heap of (priority, micro-batch, actor)
        self._communicate: list[int] = []
        self._supply: list[int] = []
        self._queued: set[int] = set()
        for actor in self.actors:
            self._consider(actor)

    def deliver(self, messages: Iterable[Message]) -> None:
        """Take messages, and all that follow from them on this rank."""
        pending = deque(messages)
        while pending:
            message = pending.popleft()
            to = message.to
            self.states[to], sent = step(self.specs[to], self.states[to], message, self.producers)
            pending += sent
            self._consider(to)

    def done(self, actor: int) -> None:
        """An act has ended."""
        self.deliver((Done(actor),))

    def next_compute(self) -> Launch | None:
        """Take the ready computing actor of highest priority."""
        if not self._compute:
            return None
        _, _, actor = heapq.heappop(self._compute)
        return self._launch(actor)

    def next_communication(self) -> Launch | None:
        """Take a collective or transfer that may be issued now."""
        for k, actor in enumerate(self._communicate):
            if self._in_turn(actor):
                del self._communicate[k]
                return self._launch(actor)
        return None

    def next_supply(self) -> Launch | None:
        """Take a ready actor that acts beside compute."""
        return self._launch(self._supply.pop(0)) if self._supply else None

    def finished(self) -> bool:
        """True if every actor has done its last act."""
        return all(
            s.limit is not None and self.states[k].acts >= s.limit for k, s in self.specs.items()
        )

    def waits(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """What each unfinished idle actor waits for; ("turn", axis) if it waits for its place in a
        group's order.
        """
        out: dict[int, tuple[tuple[str, int], ...]] = {}
        for k, spec in self.specs.items():
            state = self.states[k]
            if not state.busy and not (spec.limit is not None and state.acts >= spec.limit):
                out[k] = missing(spec, state) or (("turn", self._axes[k]),)
        return out

    def _launch(self, actor: int) -> Launch:
        self._queued.discard(actor)
        act = self.states[actor].acts
        self.states[actor] = launch(self.states[actor])
        axis = self._axes[actor]
        if axis in self.issued:
            self.issued[axis] += 1
        return Launch(actor, act)

    def _in_turn(self, actor: int) -> bool:
        axis = self._axes[actor]
        if axis not in self.order:
            return True
        acts = self.plan.acts_per_step(self.actors[actor])
        order = self.order[axis]
        return order[self.issued[axis] % len(order)] == (actor, self.states[actor].acts % acts)

    def _consider(self, actor: int) -> None:
        if actor in self._queued or not can_act(self.specs[actor], self.states[actor]):
            return
        self._queued.add(actor)
        described = self.actors[actor]
        if described.kind in COMMUNICATION:
            self._communicate.append(actor)
        elif described.beside:
            self._supply.append(actor)
        else:
            heapq.heappush(
                self._compute, (PRIORITY[described.phase], self.states[actor].acts, actor)
            )


def _axis(actor: Actor) -> int:
    """The axis of a collective, -1 for other actors."""
    return actor.work.step.axis if isinstance(actor.work, BoxWork) else -1
