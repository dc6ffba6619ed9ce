"""step_view: a step act by act, as columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from flowrun.engine.actors.plan import Actor, BoxWork, Plan, RegionWork, TransferWork
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.rehearsal.clock_state import Event
from flowrun.engine.trace.causes import Cause
from flowrun.launcher.page.page_data import ActorView, Ints, StepDrawing
from flowrun.launcher.report.group_equal import some, spans
from flowrun.launcher.report.progress import layout
from flowrun.launcher.report.trace_file import title
from flowrun.launcher.terminal.units import size

MOST_ACTS = 60_000  # of a drawing: about 3 MB of JSON
_TICKS = 1_000_000  # of a step
Kind = TypeVar("Kind", bound=Hashable)


class ActRow(NamedTuple):
    """An act: its entry in each column of StepDrawing."""

    lane: int
    actor: int
    act: int
    start: int
    length: int
    cause: int = -1
    why: int = -1
    register: int = -1


def to_columns(rows: Sequence[ActRow]) -> dict[str, Ints]:
    """Return the columns of StepDrawing by their names."""
    return {name: tuple(row[k] for row in rows) for k, name in enumerate(ActRow._fields)}


def number(found: Iterable[Kind]) -> dict[Kind, int]:
    """Return the values that differ, each with its place among them."""
    return {each: at for at, each in enumerate(dict.fromkeys(found))}


def draw(
    plan: Plan, events: Sequence[Event], causes: Sequence[Cause | None], chain: Sequence[int]
) -> StepDrawing:
    """Draw a rehearsed step; of many stages some.

    events: in the order of their beginnings.  causes: of each.  chain: the longest, by places.
    """
    stages = _choose_stages(plan, events)
    found = [k for k, event in enumerate(events) if event.stage in stages]
    shown = found[:MOST_ACTS]
    place, actors = number(shown), number(events[k].actor for k in shown)
    reasons = number(cause.why for k in shown if (cause := causes[k]))
    tick_s = max(event.end for event in events) / _TICKS or 1.0

    def row(k: int) -> ActRow:
        event, cause = events[k], causes[k]
        lane, actor = stages.index(event.stage), actors[event.actor]
        times = round(event.start / tick_s), round((event.end - event.start) / tick_s)
        waited = (place.get(cause.of, -1), reasons[cause.why], cause.register) if cause else ()
        return ActRow(lane, actor, event.act, *times, *waited)

    views = tuple(_actor(plan, plan.actors[a]) for a in actors)
    left = f" of {len(plan.placements)} stages" if len(stages) < len(plan.placements) else ""
    of = f"stage{'s' * (len(stages) > 1)} {spans(stages)}{left}"
    cut = describe_cut(len(shown), len(found), "acts")
    return StepDrawing(
        about=f"The first step, as foreseen, of {of}.{cut}",
        tick_s=tick_s,
        lanes=tuple((f"stage {stage}", True) for stage in stages),
        actors=views,
        reasons=tuple(reasons),
        slots=_slots(plan, views),
        chain=tuple(place[k] for k in chain if k in place),
        **to_columns([*map(row, shown)]),
    )


def describe_cut(shown: int, found: int, what: str) -> str:
    """Say how many of what there is a drawing shows; empty if it shows all."""
    return f" The first {shown:,} of {found:,} {what}." if shown < found else ""


def _choose_stages(plan: Plan, events: Sequence[Event]) -> list[int]:
    """Return the stages of a drawing, as many as a page can hold."""
    stages = some(len(plan.placements))
    while sum(event.stage in stages for event in events) > MOST_ACTS and len(stages) > 1:
        stages = stages[::2]
    return stages


def _slots(plan: Plan, actors: Sequence[ActorView]) -> dict[int, int]:
    """Return the slots of the actors' registers; as a negative number, of a stash."""
    known = {r for actor in actors for r in (*actor.reads, *actor.fills)}
    return {r: plan.registers[r].slots * (-1 if plan.registers[r].stash else 1) for r in known}


def _actor(plan: Plan, actor: Actor) -> ActorView:
    about = what_of(actor)
    if isinstance(actor.work, RegionWork):
        blocks = dict.fromkeys(unit_of(op.module) for op in actor.work.ops if op.module)
        ops = len(actor.work.ops)
        about = f"{ops} op{'s' * (ops > 1)} of {', '.join(list(blocks)[:3])}"
        about += " …" * (len(blocks) > 3)
    if actor.sent_bytes:
        about = f"{about} over {axis_of(plan, actor)}, {size(actor.sent_bytes)}"
    about = f"actor {actor.id}{about and ': '}{about}"
    name = title(actor.name)
    return ActorView(name, actor.kind, actor.phase, about, actor.inputs, actor.outputs)


def axis_of(plan: Plan, actor: Actor) -> str:
    """Return the axis of a collective; "stages" for what goes from one to another."""
    return plan.axes[actor.work.step.axis] if isinstance(actor.work, BoxWork) else "stages"


def what_of(actor: Actor) -> str:
    """Return the collective of an actor and the changes of layout."""
    match actor.work:
        case BoxWork(steps, _, _) as work:
            kind = work.step.kind.replace("_", "-")
            changes = (f"{step.source} -> {step.target}" for step in steps)
        case TransferWork(moves=moves):
            kind = "send"
            changes = (f"{layout(m.source.nd_sbp)} -> {layout(m.target.nd_sbp)}" for m in moves)
        case _:
            return ""
    return f"{kind} {', '.join(dict.fromkeys(changes))}"
