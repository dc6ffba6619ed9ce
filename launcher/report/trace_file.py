"""trace.json shows what every rank did (ui.perfetto.dev, chrome://tracing).

The Trace Event Format of Chrome: one process for each rank, and one for each stage with what the
rehearsal foresaw of a step, drawn where the last step began; a row an actor, times in microseconds.
An arrow leads from a message that a rank sent to where another received it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrun.engine.actors.plan import Actor, Plan, TransferWork
from flowrun.engine.compile import Rehearsed
from flowrun.engine.ir.files import replace_text
from flowrun.engine.trace.step_time import first_whole_step
from flowrun.engine.trace.trace import (
    CREDIT,
    INPUT,
    TURN,
    Need,
    Slice,
    TraceEvent,
    What,
    build_slices,
    step_number,
)

NAME = "trace.json"
_FORESEEN = 1 << 16  # process of a stage: above that of any rank
_WITHIN_NS = 2  # an arrow ends within a slice, whose own end is rounded


def write(file: Path, training: Rehearsed, notes: Mapping[int, Sequence[TraceEvent]]) -> None:
    """Write the measured and the foreseen timeline of the `training` plan to `file`.

    notes: what ranks noted, by rank; without any, the foreseen timeline alone is written.
    """
    text = json.dumps({"traceEvents": list(events(training, notes))}, separators=(",", ":"))
    replace_text(file, text)


def events(
    training: Rehearsed, notes: Mapping[int, Sequence[TraceEvent]]
) -> Iterator[dict[str, object]]:
    """Every event of the file."""
    plan = training.plan
    traced = {rank: build_slices(plan, rank, own) for rank, own in notes.items()}
    zero = min((s.begin for slices in traced.values() for s in slices), default=0)
    for rank, slices in traced.items():
        stage = plan.stage_of(rank)
        yield from _name_rows(rank, f"rank {rank}, stage {stage}", plan.stage_actors(stage))
        yield from (_draw_slice(plan, s, zero) for s in slices)
        yield from _thread(plan, rank, notes[rank], zero)
        yield from _credits(plan, rank, slices, zero)
    yield from _arrows(plan, traced, zero)
    yield from _foreseen(training, _last_step_begins(plan, traced, zero))


def _name_rows(process: int, name: str, actors: Iterable[Actor]) -> Iterator[dict[str, object]]:
    """Name a process and its rows; rows stand in the order of the plan."""
    yield _meta(process, 0, "process_name", name=name)
    yield _meta(process, 0, "process_sort_index", sort_index=process)
    for actor in actors:
        yield _meta(process, actor.id + 1, "thread_name", name=f"{actor.id} {actor.name}")
        yield _meta(process, actor.id + 1, "thread_sort_index", sort_index=actor.id + 1)


def _meta(process: int, row: int, what: str, **args: object) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": args}


def _slice(
    process: int, row: int, name: str, kind: str, begin: float, end: float, **args: object
) -> dict[str, Any]:
    """begin, end: microseconds."""
    timed = {"ts": round(begin, 3), "dur": round(end - begin, 3)}
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": kind, **timed, "args": args}


def _draw_slice(plan: Plan, s: Slice, zero: int) -> dict[str, object]:
    actor = plan.actors[s.actor]
    waited = {}
    if s.waited_for is not None and s.ready is not None:
        waited = {
            "waited_for": in_words(plan, s.waited_for),
            "then_us": max(0, s.begin - s.ready) / 1e3,  # for the rank's thread
        }
    moved = {"bytes_of_all_ranks": int(actor.sent_bytes)} if actor.sent_bytes else {}
    return _slice(
        s.rank,
        s.actor + 1,
        actor.name,
        actor.kind,
        (s.begin - zero) / 1e3,
        (s.end - zero) / 1e3,
        **_when(plan, actor, s.act),
        **moved,
        **waited,
    )


def _when(plan: Plan, actor: Actor, act: int) -> dict[str, Any]:
    step, within = divmod(act, plan.acts_per_step(actor))
    micro_batch = {} if actor.per_step else {"micro_batch": within}
    return {"step": step, **micro_batch, "phase": actor.phase}


def in_words(plan: Plan, need: Need) -> str:
    """Say in words what an act needed: from which actor, in which step."""
    actor = plan.actors[need.of[0]]
    when = _when(plan, actor, need.of[1])
    micro_batch = f", micro-batch {when['micro_batch']}" if "micro_batch" in when else ""
    whose = f"actor {actor.id} {actor.name} (step {when['step']}{micro_batch})"
    if need.why == INPUT:
        return f"to read register {need.register} from {whose}"
    if need.why == CREDIT:
        return f"a free slot of register {need.register} from {whose}"
    if need.why == TURN:
        return f"its turn on {plan.axes[need.register]} after {whose}"
    return "the end of its act before"


def _thread(
    plan: Plan, rank: int, notes: Iterable[TraceEvent], zero: int
) -> Iterator[dict[str, object]]:
    """The first row of a rank: what its thread did, one after the other."""
    yield _meta(rank, 0, "thread_name", name="the rank's thread")
    for what, actor, act, begin, end in notes:
        if what not in (What.FLIGHT, What.RUN):
            about = plan.actors[actor]
            name = about.name if what == What.COMPUTE else f"{what} {about.name}"
            times = (begin - zero) / 1e3, (end - zero) / 1e3
            yield _slice(rank, 0, name, what, *times, **_when(plan, about, act))


def _credits(
    plan: Plan, rank: int, slices: Sequence[Slice], zero: int
) -> Iterator[dict[str, object]]:
    """Slots in use of every stash register, whenever that changes."""
    at: dict[int, list[tuple[int, int]]] = {}
    registers = [r for r in plan.registers if r.stash and r.producer is not None]
    by_actor: dict[int, list[Slice]] = {}
    for s in slices:
        by_actor.setdefault(s.actor, []).append(s)
    for r in registers:
        assert r.producer is not None
        filled = {s.act: s.begin for s in by_actor.get(r.producer, ())}
        for act, begin in filled.items():
            ends = [s.done for k in r.readers for s in by_actor.get(k, ()) if s.act == act]
            if len(ends) == len(r.readers):
                at.setdefault(r.id, []).extend(((begin, 1), (max(ends), -1)))
    for register, changes in at.items():
        used = 0
        for time, change in sorted(changes):
            used += change
            yield {
                "ph": "C",
                "pid": rank,
                "ts": (time - zero) / 1e3,
                "name": f"stash register {register} of {plan.registers[register].slots}",
                "args": {"in use": used},
            }


def _arrows(
    plan: Plan, traced: Mapping[int, Sequence[Slice]], zero: int
) -> Iterator[dict[str, object]]:
    """An arrow for each message that was recorded at both its ends."""
    transfers = [(a, a.work) for a in plan.actors if isinstance(a.work, TransferWork)]
    receivers = {w.channel: a.id for a, w in transfers if a.stage == w.target_stage}
    acts: dict[tuple[int, int], dict[int, Slice]] = {}
    for s in (s for slices in traced.values() for s in slices):
        acts.setdefault((s.rank, s.actor), {})[s.act] = s
    number = 0
    for sender, work in transfers:
        if sender.stage != work.source_stage:
            continue
        for source, target in sorted({(r.source, r.target) for m in plan.routes(work) for r in m}):
            sent = acts.get((source, sender.id), {})
            received = acts.get((target, receivers[work.channel]), {})
            for act in sorted(sent.keys() & received.keys()):
                yield from _arrow(number, sent[act], received[act], zero)
                number += 1


def _arrow(number: int, sent: Slice, received: Slice, zero: int) -> Iterator[dict[str, object]]:
    """Both ends of an arrow, within the slices that it connects."""
    end = max(received.begin, received.end - _WITHIN_NS)
    for s, ns, kind in ((sent, sent.begin, {"ph": "s"}), (received, end, {"ph": "f", "bp": "e"})):
        ends = {"pid": s.rank, "tid": s.actor + 1, "ts": round((ns - zero) / 1e3, 3)}
        yield {"name": "message", "cat": "message", "id": number, **kind, **ends}


def _last_step_begins(
    plan: Plan, traced: Mapping[int, Sequence[Slice]], zero: int
) -> tuple[int, float]:
    """The last step that was recorded whole, and the microsecond in which it began to compute."""
    if first_whole_step(plan, traced) is None:
        return 0, 0.0
    everything = [s for slices in traced.values() for s in slices]
    last = max(step_number(plan, s.actor, s.act) for s in everything)
    begin = min(
        s.begin
        for s in everything
        if step_number(plan, s.actor, s.act) == last and not plan.actors[s.actor].runs_in_thread
    )
    return last, (begin - zero) / 1e3


def _foreseen(training: Rehearsed, at: tuple[int, float]) -> Iterator[dict[str, object]]:
    """The rehearsed step, a process a stage."""
    plan, (step, begin) = training.plan, at
    for stage, placement in enumerate(plan.placements):
        process = _FORESEEN + stage
        name = f"foreseen of stage {stage} ({placement}), drawn at step {step}"
        yield from _name_rows(process, name, plan.stage_actors(stage))
    for event in training.rehearsal.first_step:
        actor = plan.actors[event.actor]
        times = begin + event.start * 1e6, begin + event.end * 1e6
        when = _when(plan, actor, event.act) | {"step": step}
        yield _slice(_FORESEEN + event.stage, actor.id + 1, actor.name, actor.kind, *times, **when)
