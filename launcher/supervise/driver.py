"""The driver: one event loop, in a thread of its own, that lets the machine of a run's life act.

Events come from ranks' pipes, other hosts' sockets, processes, signals and timers; `machine.step`
answers each with instructions, and a hand carries out each: ranks (hands/ranks_hand.py), hosts
(hosts/), the main thread (hands/desk.py), the run's folder (hands/folder.py) and its listeners.
Instructions are carried out one after the other; what has to wait for somebody is a task, whose end
is an event.

Threads of the launcher: THREADS.  The loop's thread calls nothing foreign, and does not block: what
may take long the main thread does for it.  Every thread may `post`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.engine.runtime.process.call_stack import in_one_chunk
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.listeners.dispatch import Listeners, Outlets
from flowrun.launcher.listeners.listener import RESTARTED
from flowrun.launcher.listeners.make import NamedListener
from flowrun.launcher.ranks.failure import reason_of
from flowrun.launcher.ranks.rank_events import COMPLETES, Evaluated, Reason, Remarked, StepDone
from flowrun.launcher.recipe.schema import ROLLBACK, nodes_of
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import numbers, read_complete
from flowrun.launcher.store import fetched_run
from flowrun.launcher.store.checkpoint import find_step
from flowrun.launcher.supervise.hands import folder, newest_state
from flowrun.launcher.supervise.hands.desk import Desk
from flowrun.launcher.supervise.hands.event_loop import Loop
from flowrun.launcher.supervise.hands.lease import BEAT_S, Lease
from flowrun.launcher.supervise.hands.local_ranks import LocalRanks
from flowrun.launcher.supervise.hands.newest_state import place_of
from flowrun.launcher.supervise.hands.ranks_hand import RanksHand, VirtualRanks, Wires
from flowrun.launcher.supervise.hands.signals import Preempted, Signals
from flowrun.launcher.supervise.hands.watch import find_limit
from flowrun.launcher.supervise.hosts.hosts import Alone, Hosts
from flowrun.launcher.supervise.life import events, instructions
from flowrun.launcher.supervise.life.machine import begin, step
from flowrun.launcher.supervise.life.verdicts import TIME_LIMIT, Terms

# who starts which thread of a launcher or a rank, by file, and who notices when it blocks; a test
# reads the tree for others
THREADS: Mapping[str, str] = {
    "supervise/driver.py": "the event loop of a run: the watch, while ranks run",
    "supervise/hands/watch.py": "looks at ranks, and at the launcher's loop and main thread",
    "supervise/hosts/other_folder.py": "some read and write what moves between hosts",
    "supervise/hosts/moves.py": "the same: they make a checkpoint count, or remove it",
    "supervise/hosts/endpoint.py": "asks for the addresses of a name, which nothing interrupts",
    "ranks/rank_saves.py": "in a rank: writes a checkpoint while steps go; the rank looks at it",
    "data/data_workers.py": "in a rank: looks at the processes that make its batches",
    "store/kept_run.py": "puts a run's files into its store; the run waits for it at its end",
    "urls/object_store.py": "some for files that move at once, for their caller, who waits",
    "command_line/ray_jobs.py": "of a command that waits for runs on a Ray cluster",
    "listeners/dispatch.py": "one for each logger and callback: the loop looks at them",
}
_TICK_S = 0.5


class Replanning(Protocol):
    """Plans the rest of a run, in the main thread (place/settle.py).  Raises FlowrunError."""

    def for_fewer_ranks(self, lost: RunError) -> Compiled: ...

    def for_hosts(self, num_hosts: int, start: Start | None) -> Compiled: ...


class Driver:
    """Lets the machine of a run's life act."""

    def __init__(
        self,
        record: Record,
        compiled: Compiled,
        listeners: Sequence[NamedListener],
        replan: Replanning,
        lease: Lease,
    ) -> None:
        self.record, self.lease, self.replan = record, lease, replan
        self.loop, self.desk, self.ledger = Loop(), Desk(), folder.Ledger()
        launch = compiled.job.recipe.launch
        limit_s = find_limit(launch.hang_s, compiled.training.rehearsal.step_s)
        self.failed: Reason | None = None  # of a callback
        lose = partial(self.loop.call, record.lose)
        if record.kept:
            record.kept.note = lose
            if record.asked.launch.num_hosts > 1:
                record.kept.replaced = self.loop.fail
        outlets = Outlets(lose=lose, fail=self._fail, stop=self._stop)
        self.listeners = Listeners(listeners, record.describe, outlets, limit_s)
        asked, post = record.asked.launch, self.loop.post
        self.hosts: Hosts | Alone = Alone(post)
        if asked.num_hosts > 1 and asked.name == "local":
            self.hosts = Hosts(
                asked,
                record.run_folder,
                limit_s,
                record.say,
                post,
                lambda: folder.describe_host(record, self.ranks.compiled, lease),
                self._doors,
            )
        self.ranks = self._hand_for(compiled)
        terms = terms_of(compiled.job, may_change=nodes_of(record.asked.launch).may_change)
        self.state, self.first = begin(terms, place_of(compiled.job.start), record.reached)

    def run(self, ended: Future[instructions.End], written: Future[bool]) -> None:
        """Drive until the run is over; in the loop's thread.  ended: gets how.  written: whether
        the main thread has written all files then; the other hosts of a complete run wait for them.
        """
        try:
            self.loop.loop.run_until_complete(self._live(ended, written))
        except BaseException as error:
            if not ended.done():
                ended.set_exception(error)
        finally:
            self.loop.loop.close()

    async def _live(self, ended: Future[instructions.End], written: Future[bool]) -> None:
        self.loop.begin(self._tick())
        try:
            end, company = await self._end_listeners(await self._drive()), self.state.company
            ended.set_result(end)
            leads = company.others > 0 and not company.number
            if end.status == instructions.COMPLETE and leads and await asyncio.wrap_future(written):
                self.hosts.broadcast(events.Finished())
        finally:
            await self.hosts.close()
            await self.loop.close()
            self.lease.release()

    async def _drive(self) -> instructions.End:
        out = self.first
        while True:
            for instruction in out:
                if isinstance(instruction, instructions.End):
                    return instruction
                await asyncio.wait({self.loop.begin(self._do(instruction))})
            event = await self.loop.events.get()
            self.ledger.take(event)
            self.state, out = step(self.state, event)

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
                    self.loop.fail(error)
            await asyncio.sleep(_TICK_S)

    def _hand_for(self, compiled: Compiled) -> RanksHand:
        wires = Wires(
            record=self.record,
            desk=self.desk,
            loop=self.loop,
            waits=lambda: self.loop.is_full or self.listeners.is_full,
            host_of=lambda number: self.state.company.name(number),
        )
        kind = VirtualRanks if compiled.job.recipe.launch.name == "virtual" else LocalRanks
        return kind(compiled, wires)

    async def _do(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.Meet():
                self._meet()
            case instructions.KillRanks():
                self.ranks.kill()
            case instructions.Freeze():
                self.loop.begin(self.ranks.freeze())
            case instructions.HaltAfter(halt, ends):
                if self.ranks.gate:
                    self.ranks.gate.open(halt, ends)
            case instructions.SendAll(event):
                self.hosts.broadcast(event)
            case instructions.LeaveRound(within_s):
                self.loop.begin(self.hosts.part(within_s))
            case instructions.SetTimer(timer, seconds):
                self.loop.set_timer(timer, seconds)
            case instructions.Publish(event):
                self._publish(event)
            case _:
                await self._do_slowly(instruction)

    async def _do_slowly(self, instruction: instructions.Instruction) -> None:
        """Let the main thread carry out an instruction, or what changes the run's folder."""
        start = self.ranks.compiled.job.start
        match instruction:
            case instructions.ForkRanks():
                await self._fork()
            case instructions.CompleteCheckpoint():
                await self._complete(instruction)
            case instructions.FindStart(rolls_back):
                look = partial(self._find_start, rolls_back)
                self.loop.post(await self.desk.do("looking for the newest whole state", look))
            case instructions.Restart():
                folder.begin_again(self.record, start, instruction, self.state)
            case instructions.Save():
                await self._save()
            case instructions.ReplanFewer(fault):
                lost = RunError(fault.where, fault.problem)
                await self._plan(lambda: self.replan.for_fewer_ranks(lost))
            case instructions.ReplanHosts(wanted):
                self.loop.begin(self._plan_for_hosts(wanted))

    async def _plan_for_hosts(self, wanted: events.PlanWanted) -> None:
        """Plan for the hosts that are here, from a checkpoint that is fetched before if it has to
        be; where its host is lost, all meet again.
        """
        run, job = self.record.run_folder, self.ranks.compiled.job
        if wanted.door and self.hosts.moves:
            self.record.say(f"fetching the checkpoint of step {wanted.step} from {wanted.door}")
            if failed := await self.hosts.moves.fetch(wanted.step, wanted.door):
                self.record.note(f"{failed} The hosts meet again.")
                self.loop.post(events.NewPlan(job.recipe.num_ranks, place_of(job.start)))
                return
        plan = partial(self.replan.for_hosts, wanted.num_hosts)
        await self._plan(lambda: plan(find_step(run, wanted.step)))

    def _doors(self) -> list[str]:
        """Return where the hub may be of a run that is under way."""
        there, kept = self.lease.read(), self.record.kept
        doors = (there.door if there else "", kept.before[1] if kept else "")
        return [door for door in dict.fromkeys(doors) if door]

    def _meet(self) -> None:
        record = self.record
        if self.state.terms.may_change and read_complete(record.run_folder, self.state.terms.steps):
            self.loop.post(events.AlreadyComplete())
        else:
            self.loop.begin(self.hosts.meet())

    async def _fork(self) -> None:
        place, company = self.hosts.place, self.state.company
        assert place is not None
        self.ledger = folder.Ledger()
        self.listeners.off = company.number > 0
        may_change = self.state.terms.may_change
        prepare = partial(folder.prepare, self.record, company, may_change, self.lease)
        kept = None if company.number else self.record.kept
        try:
            end = partial(self.listeners.end, RESTARTED)
            if hung := await self.desk.do("ending listeners", end):
                raise hung
            await self.desk.do("preparing the folder", prepare)
            if kept:
                await self.desk.do(f"waiting for {kept.store.url}", kept.rest)
        except (FlowrunError, OSError) as error:
            self.loop.fail(error)
            kept = None  # it does not rest
        self.ranks.fork(place)
        if kept:
            kept.go_on()

    def _publish(self, event: StepDone | Evaluated | events.CheckpointKept | Remarked) -> None:
        record = self.record
        if isinstance(event, Remarked):
            (record.say if event.waits else record.note)(event.text)
            return
        step = event.step
        if isinstance(event, events.CheckpointKept):
            record.add_checkpoint(step)
            copies = self.state.terms.may_change and not record.kept
            if self.hosts.moves:
                self.hosts.moves.keep(step, record.prune if copies else None)
            return
        results: Any = event.results
        if isinstance(event, StepDone):
            values = record.step(step, results, event.seconds, event.gauges)
            self.listeners.call("on_step", step, values)
        else:
            record.write_evaluation(step, results)
            self.listeners.call("on_evaluation", step, numbers(results))

    async def _complete(self, done: instructions.CompleteCheckpoint) -> None:
        reading = tuple(self.hosts.moves.files.reading) if self.hosts.moves else ()
        complete = partial(self.record.complete_checkpoint, done.step, done.files, reading)
        kept = await self.desk.do(f"completing the checkpoint of step {done.step}", complete)
        self.listeners.call("on_save", done.step, kept.folder)

    def _find_start(self, rolls_back: bool) -> events.StartFound:
        """Put the job where its ranks are to begin; in the main thread."""
        if self.state.terms.may_change and (kept := self.record.kept):
            try:  # the host that has put it there may be lost
                fetched_run.continue_at(kept.store.url, kept.folder)
            except FlowrunError as error:
                self.record.note(f"{error.where}: {error.problem}")
        job, found, bad = self.ranks.compiled.job, self.record.checkpoints, self.state.round.bad
        if rolls_back:
            job.start = newest_state.find_rollback(found, job.recipe.train.save_every, bad)
        else:
            job.start = newest_state.find_start(found, self.ranks.snapshots, bad)
        return events.StartFound(place_of(job.start))

    async def _save(self) -> None:
        record, ranks, bad = self.record, self.ranks, self.state.round.bad
        job, snapshots = ranks.compiled.job, ranks.snapshots
        save = partial(newest_state.save_snapshot, record, job, snapshots, bad)
        try:
            await self.desk.do("saving the snapshot", save)
        except (OSError, RunError) as refused:
            record.note(f"the snapshot in memory could not be saved: {refused}")

    async def _plan(self, plan: Callable[[], Compiled]) -> None:
        try:
            compiled = await self.desk.do("planning", plan, yields_to=1)
        except FlowrunError as error:
            self.loop.fail(error, refused=not isinstance(error, RunError))
            return
        self.ranks, job = self._hand_for(compiled), compiled.job
        self.loop.post(events.NewPlan(job.recipe.num_ranks, place_of(job.start)))

    def _fail(self, error: RunError) -> None:
        """A callback has failed, or hangs; any thread may call this."""
        self.failed = self.failed or reason_of(error)
        self.loop.fail(error)

    def _stop(self, by: str) -> None:
        """A callback asks for the end; any thread may call this."""
        if not self.record.ended_by:
            self.record.ended_by = by
            self.loop.post(events.Asked(f"callback {by}", COMPLETES))

    async def _end_listeners(self, end: instructions.End) -> instructions.End:
        hung = await self.desk.do("ending listeners", partial(self.listeners.end, end.status))
        fault = self.failed or (reason_of(hung) if hung else None)
        if fault and end.status == instructions.COMPLETE:
            return instructions.End(instructions.FAILED, fault=fault)
        return end


def terms_of(job: Job, may_change: bool) -> Terms:
    """Return what the machine needs to know of a recipe.  may_change: hosts join and leave."""
    launch, train = job.recipe.launch, job.recipe.train
    is_virtual = launch.name == "virtual"
    return Terms(
        steps=train.steps,
        num_ranks=job.training.plan.num_ranks,
        restarts=0 if is_virtual else launch.restarts,
        min_ranks=launch.min_ranks or 0,
        grace_s=float("inf") if is_virtual else launch.grace_s,
        rolls_back=train.on_nonfinite == ROLLBACK,
        may_change=may_change and not is_virtual,
    )


def error_of(end: instructions.End) -> BaseException:
    """Return what a run raises that is not complete."""
    if end.fault is None:
        return Preempted(end.by) if end.status == instructions.PREEMPTED else KeyboardInterrupt()
    kind = RecipeError if end.refused else RunError
    error = kind(end.fault.where, end.fault.problem, end.fault.instead)
    if end.fault.story:
        error.add_note(end.fault.story)
    return error


@contextmanager
def supervising(driver: Driver, signals: Signals) -> Iterator[instructions.End]:
    """Let a driver drive in a thread of its own, and serve it in this one, the main thread, until
    the run is over; yield how it ended.  What is done within, other hosts wait for.
    """
    end, written = Future[instructions.End](), Future[bool]()
    end.add_done_callback(lambda _: driver.desk.close())
    if signals.deadline is not None:
        at, limit = signals.deadline, events.Asked(TIME_LIMIT)
        driver.loop.loop.call_at(at, driver.loop.post, limit)  # its clock is the monotonic one
    drive = in_one_chunk(partial(driver.run, end, written))
    thread = threading.Thread(target=drive, name="supervise", daemon=True)
    with signals.posting(driver.loop.post, driver.desk):
        thread.start()
        driver.desk.serve()
    try:
        yield end.result()
        written.set_result(True)
    finally:
        if not written.done():
            written.set_result(False)
        thread.join()
