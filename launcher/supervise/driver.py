"""The driver: one event loop, in a thread of its own, that lets the machine of a run's life act.

Events come from ranks' pipes, other hosts' sockets, processes, signals and timers; `machine.step`
answers each with instructions, and a hand carries out each: ranks (hands/local_ranks.py,
hands/virtual_ranks.py), hosts (hosts/), the main thread (hands/desk.py), the run's folder and its
listeners.  Instructions are carried out one after the other; what has to wait for somebody is a
task, whose end is an event.

Threads of the launcher: THREADS.  The loop's thread calls nothing foreign, and does not block: what
may take long the main thread does for it.  Every thread may `post`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.engine.trace.trace import TraceEvent
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.job.faults import own_fault
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.listeners.dispatch import RESTARTED, Listeners, Outlets
from flowrun.launcher.listeners.make import NamedListener
from flowrun.launcher.ranks.rank_events import RankEnded, Reason, StepDone, WeightsWritten
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.schema import ROLLBACK, nodes_of
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Log, numbers, read_complete
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_step, remove_partial
from flowrun.launcher.supervise.hands.desk import Desk, Interrupted
from flowrun.launcher.supervise.hands.lease import BEAT_S, Lease, Owner
from flowrun.launcher.supervise.hands.local_ranks import LocalRanks, Wires
from flowrun.launcher.supervise.hands.newest_state import (
    find_rollback,
    find_start,
    place_of,
    save_snapshot,
)
from flowrun.launcher.supervise.hands.signals import Preempted, Signals
from flowrun.launcher.supervise.hands.virtual_ranks import VirtualRanks
from flowrun.launcher.supervise.hands.watch import find_limit
from flowrun.launcher.supervise.hosts.hosts import Alone, Hosts, open_hosts
from flowrun.launcher.supervise.hosts.meeting import describe_host
from flowrun.launcher.supervise.hosts.token import find_token
from flowrun.launcher.supervise.hosts.words import Host
from flowrun.launcher.supervise.life.events import (
    AlreadyComplete,
    Asked,
    FromHost,
    LauncherFailed,
    NewPlan,
    NoPlan,
    StartFound,
    StateSaved,
    TimeIsUp,
)
from flowrun.launcher.supervise.life.instructions import (
    COMPLETE,
    FAILED,
    PREEMPTED,
    CompleteCheckpoint,
    End,
    FindStart,
    ForkRanks,
    Freeze,
    HaltAfter,
    Instruction,
    KillRanks,
    LeaveRound,
    Meet,
    Note,
    NoteCheckpoint,
    Publish,
    ReplanFewer,
    ReplanHosts,
    Restart,
    RollBack,
    Save,
    SendAll,
    SetTimer,
)
from flowrun.launcher.supervise.life.machine import begin, step
from flowrun.launcher.supervise.life.run_state import Terms
from flowrun.launcher.supervise.life.verdicts import TIME_LIMIT

# who starts which thread of a launcher or a rank, by file; a test reads the tree for others
THREADS: Mapping[str, str] = {
    "supervise/driver.py": "the event loop of a run",
    "supervise/hands/watch.py": "looks at ranks, and at the launcher's own threads",
    "supervise/hosts/endpoint.py": "asks for the addresses of a name, which nothing interrupts",
    "ranks/rank_saves.py": "in a rank: writes a checkpoint while steps go",
    "data/data_workers.py": "in a rank: looks at the processes that make its batches",
    "listeners/dispatch.py": "one for each logger and callback",
}
_QUEUED = 2000  # events that wait, before ranks do
_TICK_S = 0.5
_TIMER_LIMIT = "launch.time_limit"


class Replanning(Protocol):
    """Plans the rest of a run, in the main thread (place/settle.py).  Raises FlowrunError."""

    def for_fewer_ranks(self, lost: RunError) -> Compiled: ...

    def for_hosts(self, num_hosts: int, start: Start | None) -> Compiled: ...


@dataclass
class Ledger:
    """What ranks have measured, and where their weights lie.  By rank."""

    ends: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    weights: dict[int, WeightsWritten] = field(default_factory=dict)

    def take(self, event: Notice) -> None:
        """Keep what is for the report."""
        event = event.event if isinstance(event, FromHost) else event
        if isinstance(event, RankEnded):
            self.ends[event.rank] = event.measured
        elif isinstance(event, WeightsWritten):
            self.weights[event.rank] = event

    def log(self, record: Record) -> Log:
        """Return everything measured on all ranks."""

        def by_rank(key: str) -> dict[int, Any]:
            return {rank: m[key] for rank, m in sorted(self.ends.items()) if key in m}

        return Log(
            record.steps,
            record.validation,
            peak_bytes=by_rank("peak"),
            sent_bytes=by_rank("sent"),
            acts=by_rank("acts"),
            most_stashed=by_rank("stashed"),
            process_bytes=by_rank("process_peak"),
            waited_s=by_rank("waited_s"),
            notes={
                rank: [TraceEvent(*note) for note in notes]
                for rank, notes in by_rank("notes").items()
                if notes
            },
            restarts=record.restarts,
            measured_steps=record.reached - record.first,
        )


class Loop:
    """The events of a run: any thread posts them, and the loop's takes them.

    beaten_s: when the loop's thread last had time, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.events: asyncio.Queue[Notice] = asyncio.Queue()
        self.beaten_s = time.monotonic()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def post(self, event: Notice) -> None:
        """Let the machine take an event; any thread may call this, and a signal's handler."""
        with suppress(RuntimeError):  # the loop is closed: the run is over
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    def call(self, what: Callable[..., object], *given: Any) -> None:
        """Call something in the loop's thread, or here if it has ended."""
        try:
            self.loop.call_soon_threadsafe(what, *given)
        except RuntimeError:
            what(*given)

    def waits(self) -> bool:
        """True while ranks should send no more."""
        return self.events.qsize() > _QUEUED

    def set_timer(self, timer: str, seconds: float) -> None:
        """Post TimeIsUp after some seconds; below 0: no longer."""
        if before := self._timers.pop(timer, None):
            before.cancel()
        if 0 <= seconds < float("inf"):
            late = partial(self.events.put_nowait, TimeIsUp(timer))
            self._timers[timer] = self.loop.call_later(seconds, late)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine while events are taken."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.events.put_nowait(LauncherFailed(reason_of(error)))

    async def close(self) -> None:
        """End the tasks and the timers."""
        for timer in self._timers.values():
            timer.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Driver:
    """Lets the machine of a run's life act."""

    def __init__(
        self,
        record: Record,
        compiled: Compiled,
        listeners: Sequence[NamedListener],
        replan: Replanning,
        desk: Desk,
        lease: Lease,
    ) -> None:
        """record: of the run.  compiled: what ranks do.  listeners: follow it.  replan: plans for
        other ranks.  desk: the main thread.  lease: of the run's folder.
        """
        self.record, self.desk, self.lease, self.replan = record, desk, lease, replan
        self.loop, self.ledger = Loop(), Ledger()
        launch, training = compiled.job.recipe.launch, compiled.training
        limit_s = find_limit(launch.hang_s, training.rehearsal.step_s)
        self.failed: Reason | None = None  # of a callback
        outlets = Outlets(
            lose=partial(self.loop.call, record.lose), fail=self._fail, stop=self._stop
        )
        self.listeners = Listeners(listeners, outlets, limit_s)
        self.listeners.prepare(record.describe)
        self.hosts: Hosts | Alone = open_hosts(
            record.asked.launch, record.run_folder, limit_s, record.say, self.loop.post
        )
        self.ranks = self._hand_for(compiled)
        terms = terms_of(compiled.job, may_change=nodes_of(record.asked.launch).may_change)
        self.state, self.first = begin(terms, place_of(compiled.job.start), record.reached)

    def run(self, deadline_s: float | None) -> End:
        """Drive until the run is over; in the loop's thread.  deadline_s: see Signals."""
        asyncio.set_event_loop(self.loop.loop)
        try:
            return self.loop.loop.run_until_complete(self._live(deadline_s))
        finally:
            self.loop.loop.close()

    async def _live(self, deadline_s: float | None) -> End:
        self.loop.begin(self._tick())
        if deadline_s is not None:
            left_s = max(0.0, deadline_s - time.monotonic())
            self.loop.loop.call_later(left_s, self.loop.post, Asked(TIME_LIMIT))
        try:
            end = await self._drive()
            return await self._end_listeners(end)
        finally:
            await self.hosts.close()
            await self.loop.close()
            self.lease.release()

    async def _drive(self) -> End:
        out = self.first
        while True:
            for instruction in out:
                if isinstance(instruction, End):
                    return instruction
                await self._do(instruction)
            event = await self.loop.events.get()
            self.ledger.take(event)
            self.state, out = step(self.state, event)

    async def _do(self, instruction: Instruction) -> None:
        """Let a hand carry out an instruction; what goes wrong is an event."""
        try:
            await self._hands[type(instruction)](self, instruction)
        except Interrupted:
            pass  # what interrupts is an event, too
        except (FlowrunError, OSError, MemoryError) as error:
            self.loop.post(LauncherFailed(reason_of(error)))
        except Exception as error:
            self.loop.post(LauncherFailed(reason_of(own_fault(error))))

    async def _tick(self) -> None:
        """Say that this thread lives, renew the lease, and look at callbacks."""
        renewed_s = 0.0
        while True:
            self.loop.beaten_s = now = time.monotonic()
            if hung := self.listeners.look():
                self._fail(hung)
            if now - renewed_s > BEAT_S:
                renewed_s = now
                try:
                    self.lease.renew()
                except (RunError, OSError) as error:
                    self.loop.post(LauncherFailed(reason_of(error)))
            await asyncio.sleep(_TICK_S)

    def _own_quiet(self) -> tuple[float, str]:
        """Return for how long the loop's thread has done nothing, and its name; see Watch."""
        return time.monotonic() - self.loop.beaten_s, f"the launcher {self.desk.works}".strip()

    # ---- the hands -------------------------------------------------------------------------------

    def _hand_for(self, compiled: Compiled) -> LocalRanks | VirtualRanks:
        wires = Wires(
            record=self.record,
            desk=self.desk,
            post=self.loop.post,
            waits=lambda: self.loop.waits() or self.listeners.is_full,
            host_of=lambda number: self.state.company.name(number),
            own=self._own_quiet,
        )
        kind = VirtualRanks if compiled.job.recipe.launch.name == "virtual" else LocalRanks
        return kind(compiled, wires)

    async def _meet(self, _: Meet) -> None:
        record = self.record
        joins = not record.begun and self.state.terms.may_change
        if joins and read_complete(record.run_folder, self.state.terms.steps):
            self.loop.post(AlreadyComplete())
            return
        self.loop.begin(self.hosts.meet(self._describe))

    def _describe(self) -> Host:
        job, record = self.ranks.compiled.job, self.record
        return describe_host(
            record.asked,
            device=job.device_type,
            plan=str(self.ranks.compiled.training.plan),
            planned=job.recipe.launch.num_hosts if record.agreed else 0,
            start=job.start.step if job.start else 0,
            folder=record.run_folder,
        )

    async def _fork(self, _: ForkRanks) -> None:
        place = self.hosts.place
        assert place is not None
        self.ledger = Ledger()
        try:
            hung = await self.desk.do("ending listeners", lambda: self.listeners.end(RESTARTED))
            if hung:
                raise hung
            await self.desk.do("preparing the folder", self._prepare)
        except (FlowrunError, OSError) as error:
            self.loop.post(LauncherFailed(reason_of(error)))
        self.ranks.fork(place)

    def _prepare(self) -> None:
        """Make the run's folder ready for the ranks of a round: each host writes to one of its own,
        and the first removes what ranks that have ended left half written.
        """
        record, company = self.record, self.state.company
        if company.number == 0:
            endpoint = record.asked.launch.rdzv_endpoint if company.names else ""
            token = find_token(record.run_folder) if company.names else ""
            self.lease.take(Owner.of_this(endpoint, token))
        self.listeners.off = company.number > 0
        if company.shared or company.may_change:
            record.share(company.number)
        if company.may_change:
            names = company.names or ("this host",)
            count = f"{len(names)} host{'s' if len(names) > 1 else ''}"
            record.say(f"{count} from step {record.first}: {', '.join(names)}")
        if not record.begun:
            record.begin()
        if company.number == 0:
            remove_partial(record.run_folder)

    async def _kill(self, _: KillRanks) -> None:
        self.ranks.kill()

    async def _freeze(self, _: Freeze) -> None:
        self.loop.begin(self.ranks.freeze())

    async def _halt(self, halt: HaltAfter) -> None:
        self.ranks.open(halt.step if halt.step >= 0 else None, halt.ends)

    async def _broadcast(self, sent: SendAll) -> None:
        self.hosts.broadcast(sent.event)

    async def _part(self, part: LeaveRound) -> None:
        self.loop.begin(self.hosts.part(part.within_s))

    async def _set_timer(self, timer: SetTimer) -> None:
        self.loop.set_timer(timer.timer, timer.seconds)

    async def _publish(self, publish: Publish) -> None:
        event: Any = publish.event
        if isinstance(event, StepDone):
            values = self.record.step(event.step, event.results, event.seconds, event.gauges)  # type: ignore[arg-type]
            self.listeners.call("on_step", event.step, values)
        else:
            self.record.write_evaluation(event.step, event.results)
            self.listeners.call("on_evaluation", event.step, numbers(event.results))

    async def _complete(self, done: CompleteCheckpoint) -> None:
        kept = await self.desk.do(
            f"completing the checkpoint of step {done.step}",
            lambda: self.record.complete_checkpoint(Path(done.folder), done.step, done.files),
        )
        self.listeners.call("on_save", done.step, kept.folder)

    async def _note_checkpoint(self, kept: NoteCheckpoint) -> None:
        self.record.add_checkpoint(kept.step)

    async def _note(self, note: Note) -> None:
        (self.record.say if note.wait else self.record.note)(note.text)

    async def _find_start(self, find: FindStart) -> None:
        ranks, record = self.ranks, self.record
        train = ranks.compiled.job.recipe.train

        def look() -> StartFound:
            start: Start | None
            if find.rolls_back:
                start = back = find_rollback(record.checkpoints, train.save_every, find.below)
                ranks.compiled.job.start = start
                return StartFound(place_of(start), back.weights.step if back.weights else 0)
            start = find_start(record.checkpoints, ranks.snapshots, find.below)
            ranks.compiled.job.start = start
            return StartFound(place_of(start))

        self.loop.post(await self.desk.do("looking for the newest whole state", look))

    async def _restart(self, restart: Restart) -> None:
        """Put the run's folder where the ranks begin again, and say so."""
        record, fault, place = self.record, restart.fault, restart.place
        reached = record.reached
        record.go_back(self._start_at(place.step), _line(record, fault, place.step, place.source))
        count = f"Restart {restart.in_row} of {restart.limit}" if restart.in_row else "Goes on"
        first_line = fault.problem.splitlines()[0]
        why = "" if self.state.terms.may_change else f"{fault.where}: {first_line} "
        back = reached - place.step
        record.note(f"{why}{count} from step {place.step} ({place.source}), {back} back.")

    def _start_at(self, step: int) -> Start | None:
        start = self.ranks.compiled.job.start
        if start is None or start.step != step:  # hosts have agreed on another
            start = find_step(self.record.run_folder, step)
        return start

    async def _roll_back(self, back: RollBack) -> None:
        record, fault = self.record, back.fault
        source = "checkpoint" if back.weights else "beginning"
        line = _line(record, fault, back.steps, source)
        left_out = [back.weights, back.steps - 1]
        record.go_back(self.ranks.compiled.job.start, {**line, "left_out": left_out})
        record.leave_out(range(back.weights, back.steps))
        of = f"the checkpoint of step {back.weights}" if back.weights else "the beginning"
        record.note(
            f"{fault.where}: {fault.problem.splitlines()[0]} The run goes on at step {back.steps}"
            f" with the weights of {of}; the updates of steps {back.weights} to {back.steps - 1}"
            " are left out."
        )

    async def _save(self, save: Save) -> None:
        record, ranks = self.record, self.ranks
        work = partial(
            save_snapshot,
            ranks.compiled.job,
            record.folder,
            record.checkpoints,
            ranks.snapshots,
            record.complete_checkpoint,
            save.below,
        )
        try:
            await self.desk.do("saving the snapshot", work)
        except (OSError, RunError) as refused:
            record.note(f"the snapshot in memory could not be saved: {refused}")
        self.loop.post(StateSaved())

    async def _replan_fewer(self, lost: ReplanFewer) -> None:
        error = RunError(lost.fault.where, lost.fault.problem)
        await self._plan(lambda: self.replan.for_fewer_ranks(error))

    async def _replan_hosts(self, wanted: ReplanHosts) -> None:
        record = self.record

        def plan() -> Compiled:
            start = find_step(record.run_folder, wanted.step)
            return self.replan.for_hosts(wanted.num_hosts, start)

        await self._plan(plan)

    async def _plan(self, plan: Callable[[], Compiled]) -> None:
        try:
            compiled = await self.desk.do("planning", plan, yields_to=1)
        except FlowrunError as error:
            self.loop.post(NoPlan(reason_of(error), not isinstance(error, RunError)))
            return
        self.ranks = self._hand_for(compiled)
        job = compiled.job
        self.loop.post(NewPlan(job.recipe.num_ranks, place_of(job.start)))

    # ---- listeners -------------------------------------------------------------------------------

    def _fail(self, error: RunError) -> None:
        """A callback has failed, or hangs; any thread may call this."""
        self.failed = self.failed or reason_of(error)
        self.loop.post(LauncherFailed(self.failed))

    def _stop(self, by: str) -> None:
        """A callback asks for the end; any thread may call this."""
        if not self.record.ended_by:
            self.record.ended_by = by
            self.loop.post(Asked(f"callback {by}", completes=True))

    async def _end_listeners(self, end: End) -> End:
        hung = await self.desk.do("ending listeners", lambda: self.listeners.end(end.status))
        fault = self.failed or (reason_of(hung) if hung else None)
        return End(FAILED, fault=fault) if fault and end.status == COMPLETE else end

    def join_weights(self) -> None:
        """Several hosts: make one file of all shards, if this disk has them all; else they stay,
        and it is said.
        """
        if not (here := self.ledger.weights):
            return
        seen = next(iter(here.values()))
        if not seen.sees_all:
            ranks = ", ".join(map(str, sorted(here)))
            self.record.note(
                f"the weights of ranks {ranks} are here, those of the others on their hosts' disks;"
                f" join them: {os.path.basename(sys.executable)} -m flowrun.launcher.weights"
                " FOLDER OTHER_FOLDER"
            )
        elif seen.host == 0:
            weights.join_shards([self.record.folder], self.state.terms.num_ranks)

    _hands: ClassVar[Mapping[type[Instruction], Callable[..., Coroutine[Any, Any, None]]]] = {
        Meet: _meet,
        ForkRanks: _fork,
        KillRanks: _kill,
        Freeze: _freeze,
        HaltAfter: _halt,
        SendAll: _broadcast,
        LeaveRound: _part,
        SetTimer: _set_timer,
        Publish: _publish,
        CompleteCheckpoint: _complete,
        NoteCheckpoint: _note_checkpoint,
        Note: _note,
        FindStart: _find_start,
        Restart: _restart,
        RollBack: _roll_back,
        Save: _save,
        ReplanFewer: _replan_fewer,
        ReplanHosts: _replan_hosts,
    }


def _line(record: Record, fault: Reason, first: int, source: str) -> dict[str, object]:
    """Return a line of restarts.jsonl."""
    return {
        "restart": record.restarts + 1,
        "time": time.time(),
        "where": fault.where,
        "problem": fault.problem,
        "reached": record.reached,
        "first": first,
        "source": source,
    }


def terms_of(job: Job, may_change: bool) -> Terms:
    """Return what the machine needs to know of a recipe.  may_change: hosts join and leave."""
    recipe = job.recipe
    is_virtual = recipe.launch.name == "virtual"
    return Terms(
        steps=recipe.train.steps,
        num_ranks=job.training.plan.num_ranks,
        restarts=0 if is_virtual else recipe.launch.restarts,
        min_ranks=recipe.launch.min_ranks or 0,
        grace_s=float("inf") if is_virtual else recipe.launch.grace_s,
        rolls_back=recipe.train.on_nonfinite == ROLLBACK,
        may_change=may_change and not is_virtual,
    )


def reason_of(error: BaseException) -> Reason:
    """Return an error as the machine takes it."""
    if isinstance(error, FlowrunError):
        return Reason(error.where, error.problem, error.instead)
    if isinstance(error, OSError) and error.filename:
        return Reason(str(error.filename), f"{error.strerror}.")
    return Reason("the launcher", f"{type(error).__name__}: {error}")


def error_of(end: End) -> BaseException:
    """Return what a run raises that is not complete."""
    if end.fault is None:
        return Preempted(end.by) if end.status == PREEMPTED else KeyboardInterrupt()
    kind = RecipeError if end.refused else RunError
    error = kind(end.fault.where, end.fault.problem, end.fault.instead)
    if end.fault.story:
        error.add_note(end.fault.story)
    return error


def supervise(driver: Driver, signals: Signals, desk: Desk) -> tuple[End, BaseException | None]:
    """Let a driver drive in a thread of its own, and serve it in this one, the main thread, until
    the run is over; return how it ended, and what a user's code raised.
    """
    ends: list[End | BaseException] = []

    def drive() -> None:
        try:
            ends.append(driver.run(signals.deadline))
        except BaseException as error:
            ends.append(error)
        finally:
            desk.close()

    thread = threading.Thread(target=drive, name="supervise", daemon=True)
    with signals.posting(driver.loop.post, desk):
        thread.start()
        desk.serve()
        thread.join()
    (end,) = ends
    if isinstance(end, BaseException):
        raise end
    return end, getattr(driver.ranks, "exception", None)
