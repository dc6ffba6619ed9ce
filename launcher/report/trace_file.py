"""trace.json shows what every rank did (ui.perfetto.dev, chrome://tracing).

The Trace Event Format of Chrome: one process for each rank, and one for each stage with what the
rehearsal foresaw of a step, drawn where the last step began; a row an actor, times in microseconds.
An arrow leads from a message that a rank sent to where another received it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrun.engine.actors.plan import Actor, Plan, TransferWork
from flowrun.engine.compile import Rehearsed
from flowrun.engine.ir.files import replace_text
from flowrun.engine.ir.graph import PHASES, WEIGHT_GRAD
from flowrun.engine.rehearsal.rehearsal import Rehearsal
from flowrun.engine.trace import trace
from flowrun.engine.trace.step_time import first_whole_step
from flowrun.engine.trace.trace import Need, Slice, TraceEvent, What, build_slices, step_number

ChromeEvent = dict[str, object]
NAME = "trace.json"
FORESEEN = 1 << 16  # process of a stage: above that of any rank
_PHASE = rf"(?P<phase>{'|'.join(PHASES)})"
_TITLES = {  # the name of a region, of a message or of a collective -> how it is said
    rf"(?P<of>.+)\.{_PHASE}\.\d+\.\d+": "{of}, {phase}",
    rf"(?P<kind>send|receive)\.(?P<of>.+)\.(?P<a>\d+)to(?P<b>\d+)\.{_PHASE}": (
        "{kind}, stage {a} to {b}: {of}, {phase}"
    ),
    rf"(?P<kind>[a-z_]+)\.(?P<axis>\w+)\.(?P<of>.+)\.{_PHASE}": "{kind} over {axis}: {of}, {phase}",
}
_WITHIN_NS = 2  # an arrow ends within a slice, whose own end is rounded


def write(file: Path, training: Rehearsed, notes: Mapping[int, Sequence[TraceEvent]]) -> None:
    """Write the measured and the foreseen timeline of the `training` plan to `file`.

    notes: what ranks noted, by rank; without any, the foreseen timeline alone is written.
    """
    plan = training.plan
    traced = {rank: build_slices(plan, rank, own) for rank, own in notes.items()}
    zero_ns = min((s.begin for slices in traced.values() for s in slices), default=0)
    events = list(_Timeline(plan, traced, zero_ns).events(notes, training))
    replace_text(file, json.dumps({"traceEvents": events}, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class _Timeline:
    """traced: what each rank did.  zero_ns: when the file begins."""

    plan: Plan
    traced: Mapping[int, Sequence[Slice]]
    zero_ns: int

    def us(self, ns: float) -> float:
        """A time of a rank in the file's microseconds."""
        return (ns - self.zero_ns) / 1e3

    def events(
        self, notes: Mapping[int, Sequence[TraceEvent]], training: Rehearsed
    ) -> Iterator[ChromeEvent]:
        for rank, slices in self.traced.items():
            stage = self.plan.stage_of(rank)
            name = f"rank {rank}, stage {stage}"
            yield from _name_rows(rank, name, self.plan.stage_actors(stage))
            yield from map(self._draw, slices)
            yield from self._draw_thread(rank, notes[rank])
            yield from self._count_slots(rank, slices)
        yield from self._arrows()
        yield from self._foreseen(training.rehearsal)

    def _draw(self, s: Slice) -> ChromeEvent:
        actor = self.plan.actors[s.actor]
        about = _when(self.plan, actor, s.act)
        if actor.sent_bytes:
            about["bytes_of_all_ranks"] = int(actor.sent_bytes)
        if s.waited_for is not None and s.ready is not None:
            about["waited_for"] = in_words(self.plan, s.waited_for)
            about["then_us"] = max(0, s.begin - s.ready) / 1e3  # for the rank's thread
        times = self.us(s.begin), self.us(s.end)
        return _slice(s.rank, s.actor + 1, title(actor.name), actor.kind, times, about)

    def _draw_thread(self, rank: int, notes: Iterable[TraceEvent]) -> Iterator[ChromeEvent]:
        """The first row of a rank: what its thread did, one after the other."""
        yield _meta(rank, 0, "thread_name", name="the rank's thread")
        for what, actor, act, begin, end in notes:
            if what not in (What.FLIGHT, What.RUN):
                of = self.plan.actors[actor]
                name = title(of.name) if what == What.COMPUTE else f"{what} {title(of.name)}"
                times = self.us(begin), self.us(end)
                yield _slice(rank, 0, name, what, times, _when(self.plan, of, act))

    def _count_slots(self, rank: int, slices: Sequence[Slice]) -> Iterator[ChromeEvent]:
        """Slots in use of every stash register, whenever that changes."""
        acts = {(s.actor, s.act): s for s in slices}
        for register in (r for r in self.plan.registers if r.stash and r.producer is not None):
            changes: list[tuple[int, int]] = []
            for filled in (s for s in slices if s.actor == register.producer):
                readers = [acts.get((reader, filled.act)) for reader in register.readers]
                ends = [s.done for s in readers if s]
                if len(ends) == len(readers):
                    changes += [(filled.begin, 1), (max(ends), -1)]
            used = 0
            kept = register.tensors[0].split(":")[0] if register.tensors else "nothing"
            name = f"kept for backward: {kept} (register {register.id}, {register.slots} slots)"
            for time, change in sorted(changes):
                used += change
                about = {"in use": used}
                yield {"ph": "C", "pid": rank, "ts": self.us(time), "name": name, "args": about}

    def _arrows(self) -> Iterator[ChromeEvent]:
        """An arrow for each message that was recorded at both its ends, within the slices that it
        connects.
        """
        plan = self.plan
        transfers = [(a, a.work) for a in plan.actors if isinstance(a.work, TransferWork)]
        receivers = {w.channel: a.id for a, w in transfers if a.stage == w.target_stage}
        acts: dict[tuple[int, int], dict[int, Slice]] = {}
        for s in itertools.chain(*self.traced.values()):
            acts.setdefault((s.rank, s.actor), {})[s.act] = s
        number = itertools.count()
        for sender, work in ((a, w) for a, w in transfers if a.stage == w.source_stage):
            routes = {(r.source, r.target) for move in plan.routes(work) for r in move}
            for source, target in sorted(routes):
                sent = acts.get((source, sender.id), {})
                received = acts.get((target, receivers[work.channel]), {})
                for act in sorted(sent.keys() & received.keys()):
                    one, other, named = sent[act], received[act], next(number)
                    end = max(other.begin, other.end - _WITHIN_NS)
                    yield self._end(named, one, one.begin, ph="s")
                    yield self._end(named, other, end, ph="f", bp="e")

    def _end(self, number: int, s: Slice, ns: int, **kind: str) -> ChromeEvent:
        place = {"pid": s.rank, "tid": s.actor + 1, "ts": round(self.us(ns), 3)}
        return {"name": "message", "cat": "message", "id": number, **kind, **place}

    def _last_step(self) -> tuple[int, float]:
        """The last step recorded whole, and the microsecond in which it began to compute."""
        plan = self.plan
        if first_whole_step(plan, self.traced) is None:
            return 0, 0.0
        steps: dict[int, list[Slice]] = {}
        for s in itertools.chain(*self.traced.values()):
            steps.setdefault(step_number(plan, s.actor, s.act), []).append(s)
        last = max(steps)
        computes = (s for s in steps[last] if not plan.actors[s.actor].runs_in_thread)
        return last, self.us(min(s.begin for s in computes))

    def _foreseen(self, rehearsal: Rehearsal) -> Iterator[ChromeEvent]:
        """The rehearsed step, a process a stage."""
        plan, (step, begin) = self.plan, self._last_step()
        for stage, placement in enumerate(plan.placements):
            name = f"foreseen of stage {stage} ({placement}), drawn at step {step}"
            yield from _name_rows(FORESEEN + stage, name, plan.stage_actors(stage))
        for event in rehearsal.first_step:
            actor = plan.actors[event.actor]
            times = begin + event.start * 1e6, begin + event.end * 1e6
            when = _when(plan, actor, event.act) | {"step": step}
            process = FORESEEN + event.stage
            yield _slice(process, actor.id + 1, title(actor.name), actor.kind, times, when)


def _name_rows(process: int, name: str, actors: Iterable[Actor]) -> Iterator[ChromeEvent]:
    """Name a process and its rows; rows stand in the order of the plan."""
    yield _meta(process, 0, "process_name", name=name)
    yield _meta(process, 0, "process_sort_index", sort_index=process)
    for actor in actors:
        row, said = actor.id + 1, f"{title(actor.name)} (actor {actor.id})"
        yield _meta(process, row, "thread_name", name=said)
        yield _meta(process, row, "thread_sort_index", sort_index=row)


def title(name: str) -> str:
    """Say in words what an actor does, by its name: "blocks.0, forward", "all-reduce over tensor:
    head, update".  A name of another form stays as it is.
    """
    for form, said in _TITLES.items():
        if found := re.fullmatch(form, name):
            words = found.groupdict()
            kind = words.get("kind", "").replace("_", "-")
            phase = "weight gradient" if words["phase"] == WEIGHT_GRAD else words["phase"]
            return said.format_map({**words, "kind": kind, "phase": phase})
    return name


def _meta(process: int, row: int, what: str, **args: object) -> ChromeEvent:
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": args}


def _slice(
    process: int, row: int, name: str, kind: str, times: tuple[float, float], args: ChromeEvent
) -> ChromeEvent:
    """times: microseconds."""
    begin, end = times
    timed = {"ts": round(begin, 3), "dur": round(end - begin, 3)}
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": kind, **timed, "args": args}


def _when(plan: Plan, actor: Actor, act: int) -> ChromeEvent:
    step, within = divmod(act, plan.acts_per_step(actor))
    micro_batch = {} if actor.per_step else {"micro_batch": within}
    return {"step": step, **micro_batch, "phase": actor.phase}


def in_words(plan: Plan, need: Need) -> str:
    """Say in words what an act needed: from which actor, in which step."""
    actor = plan.actors[need.of[0]]
    when = _when(plan, actor, need.of[1])
    micro_batch = f", micro-batch {when['micro_batch']}" if "micro_batch" in when else ""
    whose = f"actor {actor.id} {actor.name} (step {when['step']}{micro_batch})"
    match need.why:
        case trace.INPUT:
            return f"to read register {need.register} from {whose}"
        case trace.CREDIT:
            return f"a free slot of register {need.register} from {whose}"
        case trace.TURN:
            return f"its turn in the order of {plan.queues[need.register]} after {whose}"
    return "the end of its act before"
