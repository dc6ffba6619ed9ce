"""A candidate has a Bound before it is planned, and an Outcome after that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND
from flowrun.engine.compile import Rehearsed, missing_bytes
from flowrun.engine.cost.seconds import repeated_seconds
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
    expected_s: what its bound expected.  problem: why there is no plan; empty where there is.
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


def outcome_of(
    candidate: Candidate, found: Rehearsed, strategy: Strategy, expected_s: float
) -> Outcome:
    """Turn a plan's rehearsal into an outcome.

    candidate, found: the candidate and its plan.  strategy: of it.  expected_s: what its bound
    expected.
    """
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
        expected_s=expected_s,
    )


def _split_step(found: Rehearsed, strategy: Strategy, ranks: list[int], idle: float) -> Spent:
    """Split a steady step as the first, whose timeline is known, splits its waits."""
    step_s, share = found.rehearsal.step_s, moving_share(found, ranks)
    repeated = sum(
        n * repeated_seconds(found.plan, stage, strategy.hardware) for stage, n in enumerate(ranks)
    ) / sum(ranks)
    work = step_s * (1 - idle) - repeated
    return Spent(work, repeated, step_s * idle * share, step_s * idle * (1 - share))


def moving_share(found: Rehearsed, ranks: Sequence[int]) -> float:
    """Share of all waits in the first step in which messages of the rank are under way.  ranks: of
    each stage.
    """
    waits, covered = 0.0, 0.0
    for stage, count in enumerate(ranks):
        gaps, links = _gaps(found, stage)
        waits += count * sum(end - start for start, end in gaps)
        covered += count * _overlap(gaps, links)
    return covered / waits if waits else 0.0


Spans = list[tuple[float, float]]


def _gaps(found: Rehearsed, stage: int) -> tuple[Spans, Spans]:
    """Find when the ranks of a stage do not compute in the first step, and when messages are under
    way.
    """
    busy: Spans = []
    links: Spans = []
    for event in found.rehearsal.first_step:
        actor = found.plan.actors[event.actor]
        if event.stage != stage or (
            actor.runs_in_thread and actor.kind not in (BOX, SEND, RECEIVE)
        ):
            continue
        into = links if actor.kind in (BOX, SEND, RECEIVE) else busy
        into.append((event.start, event.end))
    gaps: Spans = []
    at = 0.0
    for start, end in sorted(busy):
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    if at < found.rehearsal.first_step_s:
        gaps.append((at, found.rehearsal.first_step_s))
    return gaps, _merge(links)


def _merge(spans: Spans) -> Spans:
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _overlap(one: Spans, other: Spans) -> float:
    """Seconds that are in both; each is sorted and without overlap of its own."""
    total, k = 0.0, 0
    for start, end in one:
        while k < len(other) and other[k][1] <= start:
            k += 1
        j = k
        while j < len(other) and other[j][0] < end:
            total += min(end, other[j][1]) - max(start, other[j][0])
            j += 1
    return total
