"""extrapolate: two plans of few equal blocks on few stages -> what the whole is foreseen to take.

Grid, shards, micro-batches and schedule are as in the whole.  A stage's work, memory and bytes are
linear in its blocks; a further stage adds what one more adds to the filling and draining of the
pipeline, and the micro-batches that the schedule lets others hold for it.  How many blocks the
first stage of the whole has, the slowest between and the last, is asked of the compiler's own cuts;
in each rehearsal acts are stretched so that the stages share the work as these do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flowrun.engine.actors.plan import RECEIVE, SEND, Actor
from flowrun.engine.actors.schedules import make_schedule
from flowrun.engine.compile import Rehearsed
from flowrun.engine.cost.live import Live
from flowrun.engine.ir.graph import BACKWARD, FORWARD
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.strategy import OwnSchedule, Strategy
from flowrun.launcher.place.outcome import Outcome, Spent, moving_share, repeated_seconds
from flowrun.launcher.place.space import Candidate


@dataclass(frozen=True)
class ReducedDepthPlan:
    """A plan of `each` blocks a stage."""

    each: int
    found: Rehearsed
    strategy: Strategy

    @property
    def stages(self) -> range:
        return range(len(self.found.plan.placements))

    @cached_property
    def work_s(self) -> tuple[float, ...]:
        """Seconds that a rank computes in a step, by stage."""
        plan, work = self.found.plan, [0.0 for _ in self.stages]
        for actor in (actor for actor in plan.actors if actor.computes):
            work[actor.stage] += actor.seconds * plan.acts_per_step(actor)
        return tuple(work)

    @cached_property
    def stash(self) -> tuple[int, ...]:
        """Bytes of a rank that wait for the backward of one micro-batch, by stage."""
        live = [Live(self.found.plan, stage) for stage in self.stages]
        return tuple(sum(map(each.footprint.storage_bytes, each.slots)) for each in live)

    def stretch(self, shares: Sequence[float]) -> Rehearsed:
        """Return the plan with as much work in all, of which each stage has its share."""
        total = sum(self.work_s)
        factor = [share * total / work for share, work in zip(shares, self.work_s, strict=True)]

        def seconds(actor: Actor) -> float:
            between = actor.kind in (SEND, RECEIVE)
            return actor.seconds if between else actor.seconds * factor[actor.stage]

        plan = replace(self.found.plan, order=())
        return Rehearsed(plan, rehearse(plan, seconds, count_memory=False))

    @property
    def repeated_s(self) -> float:
        """The seconds that recomputation runs again on all stages, in a step."""
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


def _fill_seconds(found: Rehearsed) -> float:
    """The seconds that a further stage adds to a step: by these the first activation reaches the
    third stage later than the second, and the last gradient the first later than the second.
    """
    plan, last = found.plan, found.plan.micro_batches - 1
    if len(plan.placements) < 3:
        return 0.0
    came = {
        (plan.actors[event.actor].phase, event.stage, event.act): event.end
        for event in found.rehearsal.first_step
        if plan.actors[event.actor].kind == RECEIVE
    }
    fill_s = came[FORWARD, 2, 0] - came[FORWARD, 1, 0]
    drain_s = came[BACKWARD, 0, last] - came[BACKWARD, 1, last]
    return max(0.0, fill_s) + max(0.0, drain_s)


def extrapolate(
    candidate: Candidate,
    blocks: int,
    cuts: Sequence[float],
    plans: tuple[ReducedDepthPlan, ReducedDepthPlan],
    limit: int,
) -> Outcome:
    """Extrapolate a candidate from plans of few blocks.

    blocks: of the whole.  cuts: the number of blocks on each of its stages.  plans: of the
    candidate, with fewer blocks and with more.  limit: bytes that a rank has, 0: not limited.
    """
    few, more = plans
    stages, here = candidate.branch.stages, len(more.stages)

    def linear(low: float, high: float, each: float) -> float:
        """Extend a line through two plans to `each` blocks a stage."""
        return low + (high - low) * (each - few.each) / (more.each - few.each)

    def whole(low: float, high: float) -> float:
        """Turn a figure of all stages of a plan into that of all stages of the whole."""
        return linear(low, high, blocks / here)

    most = _thin_out(cuts, here)
    work = [max(0.0, linear(*each)) for each in zip(few.work_s, more.work_s, most, strict=True)]
    shares = [each / sum(work) for each in work]
    low, high = few.stretch(shares), more.stretch(shares)
    along = (sum(work) - sum(few.work_s)) / (sum(more.work_s) - sum(few.work_s))

    def at_work(one: float, other: float) -> float:
        return max(0.0, one + (other - one) * along)

    fill_s = (stages - here) * at_work(_fill_seconds(low), _fill_seconds(high))
    step_s = at_work(low.rehearsal.step_s, high.rehearsal.step_s) + fill_s
    work_s = whole(sum(few.work_s), sum(more.work_s)) / stages
    repeated_s = whole(few.repeated_s, more.repeated_s) / stages
    moving_s = max(0.0, step_s - work_s - fill_s) * moving_share(high, [1] * here)
    few_bytes, more_bytes = (plan.found.rehearsal.bound_bytes for plan in plans)
    needed = [
        round(
            linear(few_bytes[k], more_bytes[k], most[k])
            + _further_held(candidate, here, k) * linear(few.stash[k], more.stash[k], most[k])
        )
        for k in more.stages
    ]
    fullest = max(more.stages, key=needed.__getitem__)
    stage = stages - 1 if fullest == here - 1 else fullest
    return Outcome(
        candidate,
        step_s,
        needed[fullest],
        max(0, needed[fullest] - limit) if limit else 0,
        rank=stage * candidate.branch.stage_ranks,
        stage=stage,
        sent_bytes=whole(few.boxed_bytes, more.boxed_bytes) + more.crossing_bytes * (stages - 1),
        bubble=1 - work_s / step_s,
        spent=Spent(work_s - repeated_s, repeated_s, moving_s, step_s - work_s - moving_s),
        extrapolated=True,
    )


def _thin_out(cuts: Sequence[float], here: int) -> tuple[float, ...]:
    """Keep the first stage, the slowest between, and the last; as many as a plan has."""
    return (cuts[0], max(cuts[1:-1]), cuts[-1]) if here == 3 else tuple(cuts)


def _further_held(candidate: Candidate, here: int, stage: int) -> int:
    """Micro-batches that a stage of the whole holds beyond those that it holds in a plan of few."""
    stages = candidate.branch.stages
    behind = here - stage if stage == here - 1 else stages - stage
    more = most_in_flight(candidate, stages, behind)
    return more - most_in_flight(candidate, here, here - stage)


def most_in_flight(candidate: Candidate, stages: int, behind: int) -> int:
    """Return the micro-batches that a stage of a candidate may hold for backward.

    stages: of the plan.  behind: number of stages from this one on.
    """
    in_flight = scale_in_flight(candidate.in_flight, candidate.branch.stages, stages)
    count = candidate.branch.micro_batches
    return make_schedule(in_flight, stages, 1, count).slots(stages - behind)


def scale_in_flight(
    in_flight: int | str | OwnSchedule, stages: int, here: int
) -> int | str | OwnSchedule:
    """Scale an in_flight of `stages` stages to the fewer stages `here`, rounded up.

    A micro-batch is on its way for a time that grows with the stages, so that equally many for each
    stage keep the stages equally busy.
    """
    return math.ceil(in_flight * here / stages) if isinstance(in_flight, int) else in_flight
