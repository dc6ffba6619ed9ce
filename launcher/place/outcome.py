"""A candidate has a Bound before it is planned, and an Outcome after that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND, Plan, RegionWork
from flowrun.engine.compile import Rehearsed, missing_bytes
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.strategy import Strategy
from flowrun.launcher.place.space import Candidate


@dataclass(frozen=True, slots=True)
class Bound:
    """seconds of a step, bytes of a rank: a plan has at least these.  expected_s: about what a step
    takes, to order by.
    """

    seconds: float
    bytes: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of a step by what a rank spends them on; the mean over all ranks.

    work: acts that compute, but for `repeated`, what recomputation runs again.  bytes: waits while
    messages of the rank are under way.  bubble: other waits.
    """

    work: float
    repeated: float
    bytes: float
    bubble: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate, planned and rehearsed.

    bytes: of the rank that may need most, which is `rank`, of `stage`; missing: of these.
    sent_bytes: of all ranks, a step.  bubble: share of a step in which ranks do not compute.
    expected_s: what its bound expected, which the search knows.  problem: why there is no plan;
    empty where there is.
    extrapolated: from plans of few of the model's blocks.  estimate: for a whole plan, the outcome
    that was extrapolated before.
    """

    candidate: Candidate
    step_s: float = 0.0
    bytes: int = 0
    missing: int = 0
    _: KW_ONLY
    rank: int = 0
    stage: int = 0
    sent_bytes: float = 0.0
    bubble: float = 0.0
    spent: Spent = Spent(0.0, 0.0, 0.0, 0.0)
    expected_s: float = 0.0
    problem: str = ""
    extrapolated: bool = False
    estimate: Outcome | None = None

    @property
    def fits(self) -> bool:
        """There is a plan, and memory for it."""
        return not self.problem and not self.missing


def outcome_of(candidate: Candidate, found: Rehearsed, strategy: Strategy) -> Outcome:
    """Turn the rehearsal of a candidate's plan into an outcome.  strategy: of the candidate."""
    rehearsal, placements = found.rehearsal, found.plan.placements
    needed = rehearsal.bound_bytes
    stage = max(range(len(needed)), key=needed.__getitem__)
    ranks = [len(placement.ranks) for placement in placements]
    idle = sum(n * b for n, b in zip(ranks, rehearsal.bubble, strict=True)) / sum(ranks)
    return Outcome(
        candidate,
        rehearsal.step_s,
        needed[stage],
        missing_bytes(found, strategy),
        rank=placements[stage].ranks[0],
        stage=stage,
        sent_bytes=rehearsal.sent_bytes,
        bubble=idle,
        spent=_split_step(found, strategy, ranks, idle),
    )


def _split_step(found: Rehearsed, strategy: Strategy, ranks: list[int], idle: float) -> Spent:
    """Split a steady step as the first, whose timeline is known, splits its waits."""
    step_s, share = found.rehearsal.step_s, moving_share(found, ranks)
    repeated = sum(
        n * repeated_seconds(found.plan, stage, strategy.hardware) for stage, n in enumerate(ranks)
    ) / sum(ranks)
    work = step_s * (1 - idle) - repeated
    return Spent(work, repeated, step_s * idle * share, step_s * idle * (1 - share))


def repeated_seconds(plan: Plan, stage: int, hardware: Hardware) -> float:
    """Return the seconds that a rank of a stage recomputes in a step."""
    grid = plan.placements[stage].shape
    total = 0.0
    for actor in plan.stage_actors(stage):
        if isinstance(actor.work, RegionWork):
            again = [op for op in actor.work.ops if op.name.endswith("/again")]
            acts = plan.acts_per_step(actor)
            sized = (SizedOp.local(op, plan.tensors, grid) for op in again)
            total += acts * sum(each.seconds(hardware) for each in sized)
    return total


def moving_share(found: Rehearsed, ranks: Sequence[int]) -> float:
    """Share of all waits in the first step in which messages of the rank are under way.  ranks: of
    each stage.
    """
    ends_s = found.rehearsal.first_step_s
    # of each stage: when, how many acts more compute, how many more messages move
    changes = [[(ends_s, 0, 0)] for _ in ranks]
    for event in found.rehearsal.first_step:
        actor = found.plan.actors[event.actor]
        moves = actor.kind in (BOX, SEND, RECEIVE)
        if moves or not actor.runs_in_thread:
            changes[event.stage].append((event.start, not moves, moves))
            changes[event.stage].append((event.end, moves - 1, -moves))
    waits = moving = 0.0
    for of_stage, count in zip(changes, ranks, strict=True):
        waits_s, moving_s = _waits(sorted(of_stage), ends_s)
        waits += count * waits_s
        moving += count * moving_s
    return moving / waits if waits else 0.0


def _waits(changes: Sequence[tuple[float, int, int]], ends_s: float) -> tuple[float, float]:
    """Seconds of the first step in which the ranks of a stage do not compute, and those of them in
    which messages are under way.
    """
    waits_s = moving_s = now_s = 0.0
    computing = under_way = 0
    for at_s, computes, more in changes:
        if not computing:
            passed_s = min(at_s, ends_s) - min(now_s, ends_s)
            waits_s += passed_s
            moving_s += passed_s if under_way else 0.0
        now_s, computing, under_way = at_s, computing + computes, under_way + more
    return waits_s, moving_s
