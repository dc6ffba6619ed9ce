"""extrapolate: two plans of few equal blocks on few stages -> what the whole is foreseen to take.

Grid, shards, micro-batches and schedule are as in the whole.  A stage's work, memory and bytes are
linear in its blocks; a further stage adds what one more adds to the filling and draining of the
pipeline, and credits where the schedule gives them.  In each rehearsal the acts of a stage are
stretched so that one has the mean work of all, and others less: what lies before and behind the
blocks weighs on none alone.  The whole goes at the pace of its slowest stage, as ops can be cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from flowrun.engine.clock import computes
from flowrun.engine.compile import Rehearsed
from flowrun.engine.cost.live import Live
from flowrun.engine.cost.seconds import repeated_seconds
from flowrun.engine.plan import RECEIVE, SEND, Actor
from flowrun.engine.rehearsal import rehearse
from flowrun.engine.strategy import Strategy
from flowrun.launcher.auto.outcome import Outcome, Spent, moving_share
from flowrun.launcher.auto.space import Candidate

SLACK = 0.9  # a clock among equals takes long to repeat itself (engine/period.py)


@dataclass(frozen=True)
class Short:
    """A plan of `each` blocks a stage."""

    each: int
    found: Rehearsed
    strategy: Strategy

    @property
    def stages(self) -> range:
        """Of the plan."""
        return range(len(self.found.plan.placements))

    @cached_property
    def work_s(self) -> tuple[float, ...]:
        """Seconds that a rank computes in a step, by stage."""
        plan, work = self.found.plan, [0.0 for _ in self.stages]
        for actor in filter(computes, plan.actors):
            work[actor.stage] += actor.seconds * plan.acts_per_step(actor)
        return tuple(work)

    @property
    def mean_s(self) -> float:
        """The same, of stages of equal work."""
        return sum(self.work_s) / len(self.work_s)

    @cached_property
    def stretched(self) -> Rehearsed:
        """With the mean work on one stage, the second where there are three, and less on others."""
        slowest = len(self.stages) // 2

        def seconds(actor: Actor) -> float:
            if actor.kind in (SEND, RECEIVE):
                return actor.seconds
            share = 1.0 if actor.stage == slowest else SLACK
            return actor.seconds * share * self.mean_s / self.work_s[actor.stage]

        plan = replace(self.found.plan, order=())
        return Rehearsed(plan, rehearse(plan, seconds))

    @property
    def step_s(self) -> float:
        """Of stages of the mean work."""
        return self.stretched.rehearsal.step_s

    @property
    def moving(self) -> float:
        """Share of waits in which messages are under way."""
        return moving_share(self.stretched, [1 for _ in self.stages])

    @cached_property
    def fill_s(self) -> float:
        """What a further stage adds to a step: the second begins so much before the third, and is
        done with its last micro-batch so much behind it.
        """
        if len(self.stages) < 3:
            return 0.0
        begins, ends = [math.inf] * 3, [0.0] * 3
        for event in self.stretched.rehearsal.first_step:
            actor = self.found.plan.actors[event.actor]
            if computes(actor) and not actor.per_step:
                begins[event.stage] = min(begins[event.stage], event.start)
                ends[event.stage] = max(ends[event.stage], event.end)
        return max(0.0, begins[2] - begins[1]) + max(0.0, ends[1] - ends[2])

    @cached_property
    def stash(self) -> tuple[int, ...]:
        """Bytes of a rank that wait for the backward of one micro-batch, by stage."""
        live = [Live(self.found.plan, stage) for stage in self.stages]
        return tuple(sum(map(each.footprint.storage_bytes, each.slots)) for each in live)

    @property
    def repeated_s(self) -> float:
        """What recomputation runs again on all stages, in a step."""
        plan, hardware = self.found.plan, self.strategy.hardware
        return sum(repeated_seconds(plan, stage, hardware) for stage in self.stages)

    @property
    def boxed_bytes(self) -> float:
        """Sent within stages, in a step."""
        plan = self.found.plan
        inside = (actor for actor in plan.actors if actor.kind not in (SEND, RECEIVE))
        return sum(actor.sent_bytes * plan.acts_per_step(actor) for actor in inside)

    @property
    def crossing_bytes(self) -> float:
        """Sent from a stage to the next and back, in a step."""
        cuts = len(self.stages) - 1
        return (self.found.rehearsal.sent_bytes - self.boxed_bytes) / cuts if cuts else 0.0


def extrapolated(
    candidate: Candidate, blocks: int, slowest: float, plans: tuple[Short, Short], limit: int
) -> Outcome:
    """blocks: of the whole.  slowest: work of its slowest stage over the mean.  plans: of the
    candidate, with fewer blocks and with more.
    """
    few, more = plans
    stages, here = candidate.branch.stages, len(more.stages)
    have = few.each * here, more.each * here

    def whole(low: float, high: float) -> float:
        """Of what is linear in blocks."""
        return low + (high - low) * (blocks - have[0]) / (have[1] - have[0])

    work_s = whole(sum(few.work_s), sum(more.work_s)) / stages
    along = (slowest * work_s - few.mean_s) / (more.mean_s - few.mean_s)

    def at_work(low: float, high: float) -> float:
        """Of what is linear in the work of the slowest stage."""
        return max(0.0, low + (high - low) * along)

    fill_s = (stages - here) * at_work(few.fill_s, more.fill_s) / slowest  # of stages as they come
    step_s = at_work(few.step_s, more.step_s) + fill_s
    repeated_s = whole(few.repeated_s, more.repeated_s) / stages
    moving_s = max(0.0, step_s - work_s - fill_s) * more.moving
    needed = [_bytes(candidate, few, more, stage, slowest * work_s) for stage in more.stages]
    most = max(more.stages, key=needed.__getitem__)
    stage = stages - 1 if most == here - 1 else most
    return Outcome(
        candidate,
        step_s,
        needed[most],
        max(0, needed[most] - limit) if limit else 0,
        stage * candidate.branch.stage_ranks,
        stage,
        whole(few.boxed_bytes, more.boxed_bytes) + more.crossing_bytes * (stages - 1),
        1 - work_s / step_s,
        Spent(work_s - repeated_s, repeated_s, moving_s, step_s - work_s - moving_s),
        extrapolated=True,
    )


def _bytes(candidate: Candidate, few: Short, more: Short, stage: int, work_s: float) -> int:
    """Of a rank of the stage of the whole that this one stands for: the first, the second, the
    last.
    """
    per_block = (more.work_s[stage] - few.work_s[stage]) / (more.each - few.each)
    further = max(0.0, more.each + (work_s - more.work_s[stage]) / per_block) - more.each

    def at(low: float, high: float) -> float:
        return high + (high - low) / (more.each - few.each) * further

    here, stages = len(more.stages), candidate.branch.stages
    behind = here - stage if stage == here - 1 else stages - stage
    more_credits = most_in_flight(candidate, stages, behind)
    more_credits -= most_in_flight(candidate, here, here - stage)
    bound = (few.found.rehearsal.bound_bytes[stage], more.found.rehearsal.bound_bytes[stage])
    return round(at(*bound) + more_credits * at(few.stash[stage], more.stash[stage]))


def most_in_flight(candidate: Candidate, stages: int, behind: int) -> int:
    """Micro-batches that a stage may hold for backward (registers.py), of so many stages; behind:
    those from this one on.
    """
    count = candidate.branch.micro_batches
    if stages == 1:
        return 1
    if isinstance(candidate.in_flight, int):  # as many as there are stages
        return min(stages, count)
    return min(behind if candidate.in_flight == "1f1b" else 2 * stages, count)
