"""plan_view: a job and its rehearsed plan -> what a page shows of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from flowrun.engine.actors.plan import BOX, COMMUNICATION, SEND, Plan
from flowrun.engine.cost.footprint import memory_of
from flowrun.engine.rehearsal.clock_state import Event
from flowrun.engine.rehearsal.draw_step import DrawnStep, draw_step
from flowrun.engine.trace.causes import find_causes, longest_chain
from flowrun.launcher.job.job import Job
from flowrun.launcher.page.layout_view import layout_view
from flowrun.launcher.page.page_data import Figure, PlanView, StageView, TrafficView
from flowrun.launcher.page.step_view import axis_of, draw, what_of
from flowrun.launcher.report.group_equal import alike, extent, one_of_each, spans
from flowrun.launcher.report.notes import notes
from flowrun.launcher.report.progress import units
from flowrun.launcher.terminal.doing import doing
from flowrun.launcher.terminal.units import seconds, size

_PARTS = 240  # of a step, for memory


def plan_view(job: Job) -> PlanView:
    """Play the first step once more, and list what a page shows of the plan."""
    doing("drawing a step")
    training, plan = job.training, job.training.plan
    drawn = draw_step(plan, _PARTS)
    events = sorted(drawn.events, key=lambda event: (event.start, event.end))
    modules, edges = layout_view(plan)
    causes = find_causes(plan, events)
    chain = list(longest_chain(events, causes))
    found = one_of_each((*plan.notes, *notes(job)), len(plan.placements))
    if job.others:
        found.append("the figures are of all updates; what is drawn is of the first alone")
    step_s = training.rehearsal.step_s
    foreseen = (
        ("a step", seconds(step_s)),
        ("the first step", seconds(training.rehearsal.first_step_s)),
        ("speed", f"{job.work.speed(step_s):,.0f} {job.work.unit}/s"),
        ("ranks", f"{plan.num_ranks:,}"),
        ("memory of a rank", extent(training.rehearsal.peak_bytes, size)),
        ("ranks compute", extent((1 - x for x in training.rehearsal.bubble), "{:.0%}".format)),
        ("sent in a step", size(training.rehearsal.sent_bytes)),
        ("hardware", job.strategy.hardware.name),
    )
    return PlanView(
        figures=tuple(Figure(*each) for each in foreseen),
        stages=tuple(_stages(job, drawn, events)),
        modules=modules,
        edges=edges,
        drawing=draw(plan, events, causes, [k for k, _ in reversed(chain)]),
        traffic=tuple(_traffic(plan, events)),
        bounds=_bounds(plan, events, chain),
        notes=tuple(found),
        recipe=job.recipe.to_yaml(),
    )


def _count_computed(plan: Plan, events: Sequence[Event]) -> Callable[[int, float], float]:
    """Return a function: stage, time -> seconds that the stage has computed until then."""
    computed: dict[int, list[tuple[float, float, float]]] = {}  # start, end, sum until the end
    for event in (e for e in events if plan.actors[e.actor].computes):
        own = computed.setdefault(event.stage, [(0.0, 0.0, 0.0)])
        own.append((event.start, event.end, own[-1][2] + event.end - event.start))

    def until(stage: int, time: float) -> float:
        own = computed.get(stage, [(0.0, 0.0, 0.0)])
        _, end, total = own[bisect_right(own, (time, time, 0.0)) - 1]
        return total - max(0.0, end - time)

    return until


def _stages(job: Job, drawn: DrawnStep, events: Sequence[Event]) -> Iterable[StageView]:
    training, plan, step = job.training, job.training.plan, job.training.rehearsal
    end_s = max((event.end for event in events), default=0.0)

    def kind(stage: int) -> tuple[object, ...]:
        held = memory_of(plan, stage)
        return plan.placements[stage].axes, held["parameter"], held["state"]

    for stages in alike(range(len(plan.placements)), kind):
        k = max(stages, key=lambda stage: step.peak_bytes[stage])
        spent = defaultdict[str, float](float)
        busy_s = until = 0.0  # seconds in which it computes or messages are under way
        for event in (event for event in events if event.stage == k):
            actor = plan.actors[event.actor]
            if actor.computes:
                spent[actor.phase] += event.end - event.start
            if actor.computes or actor.kind in COMMUNICATION:
                busy_s += max(0.0, event.end - max(event.start, until))
                until = max(until, event.end)
        yield StageView(
            stages=spans(stages) + (f" (shown: {k})" if len(stages) > 1 else ""),
            ranks=str(plan.placements[k]),
            modules=units(training, k),
            seconds=dict(spent),
            exposed_s=max(0.0, busy_s - sum(spent.values())),  # a rounding below 0
            idle_s=max(0.0, end_s - busy_s),
            peak_bytes=step.peak_bytes[k],
            bound_bytes=step.bound_bytes[k],
            memory={kind: each for kind, each in drawn.memory[k].items() if any(each)},
        )


def _traffic(plan: Plan, events: Sequence[Event]) -> Iterable[TrafficView]:
    """Yield messages that are alike; one between stages counts where it is sent."""
    until = _count_computed(plan, events)
    groups: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        actor = plan.actors[event.actor]
        if actor.kind in (BOX, SEND):
            key = axis_of(plan, actor), actor.phase, what_of(actor)
            groups.setdefault(key, []).append(event)
    for (axis, phase, what), of in groups.items():
        lasted_s = sum(e.end - e.start for e in of)
        computed_s = sum(until(e.stage, e.end) - until(e.stage, e.start) for e in of)
        yield TrafficView(
            axis=axis,
            phase=phase,
            what=what,
            times=len(of),
            bytes=sum(plan.actors[e.actor].sent_bytes for e in of),
            seconds=lasted_s,
            exposed_s=max(0.0, lasted_s - computed_s),
        )


def _bounds(
    plan: Plan, events: Sequence[Event], chain: Iterable[tuple[int, float]]
) -> tuple[tuple[str, float], ...]:
    """Sum the longest chain up by what its acts do, the longest first."""
    parts = defaultdict[str, float](float)
    for k, spent in chain:
        actor = plan.actors[events[k].actor]
        does = "compute" if actor.computes else "samples" if actor.makes_batches else actor.kind
        what = f"{what_of(actor)} over {axis_of(plan, actor)}" if what_of(actor) else does
        parts[f"{what}, {actor.phase}"] += spent
    return tuple(sorted(parts.items(), key=lambda part: -part[1]))
