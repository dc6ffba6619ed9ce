"""launch=local: one process a rank, on one host or several.

This process has composed, captured and planned; its workers (worker.py) are forked by elastic's
agent (elastic.py) and inherit the result.  Each reports over a pipe of its own, which collector.py
reads: steps, its end, or what went wrong.  The same command on each host (launch.nnodes,
launch.rdzv_endpoint) makes one run; the launchers meet before anything is forked (hosts/).  When
LocalRun.execute returns or raises, every worker of this host is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.pulse import Pulses
from flowrun.engine.runtime.kernels.kernels import Kernels
from flowrun.engine.runtime.process.outputs import ProcessOutputs
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.launch.collector import EventCollector
from flowrun.launcher.launch.elastic import handlers_restored, run_agent
from flowrun.launcher.launch.hosts.alone import Alone, HostsChanged, hold_nothing
from flowrun.launcher.launch.hosts.hosts import Hosts
from flowrun.launcher.launch.hosts.meeting import NOTHING, Host, ranks_of_a_host
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace
from flowrun.launcher.launch.preemption import Preemption, Requests
from flowrun.launcher.launch.restart.neighbour_copies import Copies, CopyPlan, plan_copies
from flowrun.launcher.launch.restart.restarts import (
    Attempts,
    Ending,
    back_off,
    give_up,
    go_back,
    restart,
)
from flowrun.launcher.launch.restart.rollback import Rollbacks, roll_back
from flowrun.launcher.launch.restart.snapshot_memory import SnapshotMemory, map_snapshots
from flowrun.launcher.launch.step_gate import StepGate
from flowrun.launcher.launch.watch import Watch, find_limit, find_silence
from flowrun.launcher.launch.worker import Worker
from flowrun.launcher.recipe.schema import nodes_of
from flowrun.launcher.report.record import LOGS, Record
from flowrun.launcher.report.report import Log, Report, read_complete
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_step, remove_partial
from flowrun.launcher.terminal.console import STDERR, STDOUT


@dataclass(frozen=True)
class _Ended:
    """The end of a round that did not complete the run.

    early: what ended the ranks of this host before their last step; None: nothing did.
    error: the verdict, which the run ends with if there is no other round.
    """

    early: BaseException | None
    error: BaseException


class LocalRun:
    """A run on this host, round by round.

    In each round ranks are forked anew: at the beginning, after some have died, after a rollback,
    and where hosts have joined or left.

    job: what to train.  training, evaluation: its plans.  record: takes what happens.  kernels: of
    training's regions.  requests: what is asked of this process.  hosts: this launcher among the
    others.
    """

    def __init__(
        self,
        job: Job,
        training: Rehearsed,
        evaluation: Rehearsed | None,
        record: Record,
        kernels: Kernels,
        requests: Requests,
        hosts: Hosts | Alone,
    ) -> None:
        self.job, self.training, self.record = job, training, record
        self.requests, self.hosts = requests, hosts
        self.local_ranks = ranks_of_a_host(training.plan.num_ranks, job.recipe.launch)
        self.limit_s = find_limit(job.recipe.launch.hang_s, training.rehearsal.step_s)
        self.worker = Worker(
            job=job,
            training=training,
            evaluation=evaluation,
            kernels=kernels,
            folder=record.run_folder,
            launcher=os.getpid(),
            silence_s=find_silence(self.limit_s),
            snapshots=map_snapshots(record, training),
        )
        self.attempts = Attempts(
            limit=job.recipe.launch.restarts,
            may_change=hosts.may_change,
            furthest=record.reached,
        )
        self.rollbacks = Rollbacks()
        self.ring: CopyPlan | None = None  # how hosts copy each other's state
        if hosts.may_change:
            self.ring = plan_copies(record, training, training.plan.num_ranks // self.local_ranks)
        self.copies: Copies | None = None  # those of the last round
        self.lost: RunError | None = None  # a restart that is not written down yet: see restart

    def execute(self) -> Log:
        """Start this host's ranks, and return when all have ended.

        Raises RunError for the rank that failed (not for one that lost it), Preempted or
        KeyboardInterrupt where it was asked to end, HostsChanged where another plan is needed.
        """
        events = self.begin_round()
        while ended := self.run_ranks(events):
            self.prepare_next_round(events, ended)
            events = self.begin_round()
        if events.here:
            _join_weights(events, self.record, self.training.plan.num_ranks)
        return events.log()

    def begin_round(self) -> EventCollector:
        """Meet the other hosts and make the run's folder ready; return what takes the events.

        Raises HostsChanged, AlreadyComplete, and what the run is asked to end with.
        """
        events = EventCollector(record=self.record, hosts=self.hosts)
        events.preemption = self._make_preemption(events)
        self.requests.running = False  # while hosts are awaited, a request to end raises its error
        self.place = self._meet(events)
        self.lost = None
        _prepare_folder(self.record, self.hosts)
        if self.hosts.may_change:
            self.copies = self._make_copies(events)
            self.worker = replace(self.worker, snapshots=self.copies.own if self.copies else None)
        return events

    def run_ranks(self, events: EventCollector) -> _Ended | None:
        """Fork this host's ranks and wait for their end; None: the run is complete."""
        preemption, copies = events.preemption, self.copies
        assert preemption is not None
        with copies.running() if copies else nullcontext():
            early = _run_ranks(
                self.worker, self.local_ranks, self.limit_s, events, self.place, preemption
            )
        error = events.part(preemption.early or early, preemption.end_after(early))
        if copies:
            copies.rest(events.not_finite)
        return _Ended(early, error) if error else None

    def prepare_next_round(self, events: EventCollector, ended: _Ended) -> None:
        """Put the job where the next round begins.  Raises the error if the run ends.

        events, ended: of the last round.
        """
        record, snapshots, error = self.record, self.worker.snapshots, ended.error
        ending = _find_ending(events, ended)
        if ending is Ending.RAISED and (
            rolled := roll_back(record, self.rollbacks, events.not_finite, error, snapshots)
        ):
            self.rollbacks = rolled
            return
        if self.hosts.may_change:
            snapshots = None  # copies have them
        elif snapshots and events.not_finite:
            snapshots.forget_from(events.not_finite)
        self.attempts, died = _count_attempt(record, self.attempts, snapshots, ending, error)
        go_back(record, snapshots)
        if self.hosts.may_change:  # they agree on where
            record.note(f"{died.where}: {died.problem}")
            self.lost = died
        else:
            restart(record, self.attempts, died, self.job.start)
        back_off(self.attempts.wait_s, lambda: not self.requests.queue.empty())

    def _make_preemption(self, events: EventCollector) -> Preemption:
        """Return what halts the ranks of a round.  events: ends them at once."""
        first = self.job.start.step if self.job.start else 0
        return Preemption(
            gate=StepGate.make_shared(self.local_ranks, first),
            requests=self.requests,
            saved=self.job.saved_steps,
            steps=self.job.recipe.train.steps,
            grace_s=self.job.recipe.launch.grace_s,
            say=self.record.note,
            stop=events.stop_us,
            hosts=self.hosts,
        )

    def _meet(self, events: EventCollector) -> MeetingPlace:
        """Meet the other hosts; return where their ranks meet.  Raises HostsChanged.

        A restart is written down here, as it is known now what all hosts go on from.
        """
        save = self.copies.save if self.copies else hold_nothing
        try:
            place = self.hosts.meet(self._describe, events.receive, save)
        except HostsChanged as changed:
            self._write_restart(find_step(self.record.run_folder, changed.step))
            raise
        self._write_restart(self.job.start)
        return place

    def _write_restart(self, start: Start | None) -> None:
        if self.lost:
            restart(self.record, self.attempts, self.lost, start)

    def _describe(self) -> Host:
        """Describe this host to the others.  Raises AlreadyComplete."""
        job, record = self.job, self.record
        joins = not record.begun and nodes_of(record.asked.launch).may_change
        if joins and (report := read_complete(record.run_folder, job.recipe.train.steps)):
            raise AlreadyComplete(report)
        return Host.describe(
            record.asked,
            device=job.device_type,
            plan=str(self.training.plan),
            planned=job.recipe.launch.num_hosts if record.agreed else 0,
            start=job.start.step if job.start else 0,
            folder=record.run_folder,
            holding=self.copies.holding if self.copies else NOTHING,
            copies=self.ring is not None,
        )

    def _make_copies(self, events: EventCollector) -> Copies | None:
        """Return the copies of a round; None if the recipe wants none, or a host lacks memory."""
        if self.ring is None:
            return None
        without = [number for number, link in enumerate(self.place.links) if link is None]
        if without:
            name = self.hosts.name(without[0])
            self.record.note(
                f"{name} has not the memory for copies of hosts' states: there are none"
            )
            return None
        plan = self.training.plan
        return Copies(self.record, self.ring, plan, self.place, self.hosts, events.votes)


class AlreadyComplete(Exception):
    """Other hosts have ended the run while this one waited to join them.  report: theirs."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def _count_attempt(
    record: Record,
    attempts: Attempts,
    snapshots: SnapshotMemory | None,
    ending: Ending,
    error: BaseException,
) -> tuple[Attempts, RunError]:
    """Return the attempts with one more, and the error that it restarts from.

    record: of the run; it is closed if the run ends.  attempts: so far.  snapshots: what the ranks
    left in memory.  ending, error: of the last attempt.  Raises the error if the run ends.
    """
    after = attempts.after(ending, record.reached)
    if after and isinstance(error, RunError):
        return after, error
    record.close()
    if attempts.limit and isinstance(error, RunError):
        raise give_up(record, snapshots, ending, error)
    raise error


def _prepare_folder(record: Record, hosts: Hosts | Alone) -> None:
    """Make the run's folder ready for the ranks of a round: each host writes to one of its own, and
    the first removes what ranks that have ended left half written.
    """
    if hosts.shared or hosts.may_change:
        record.share(hosts.number)
    if hosts.may_change:
        count = f"{len(hosts.names)} host{'s' if len(hosts.names) > 1 else ''}"
        record.say(f"{count} from step {record.first}: {', '.join(hosts.names)}")
    if not record.begun:
        record.begin()
    if hosts.number == 0:
        remove_partial(record.run_folder)


def _find_ending(events: EventCollector, ended: _Ended) -> Ending:
    """Say why the ranks of a round have ended.

    events: of the round.  ended: how it ended.
    """
    asked = events.preemption and events.preemption.ending
    if asked:
        return Ending.LEFT if asked.regroups else Ending.STOPPED
    return events.ending(ended.early, ended.error)


def _run_ranks(
    worker: Worker,
    local_ranks: int,
    limit_s: float,
    events: EventCollector,
    place: MeetingPlace,
    preemption: Preemption,
) -> RunError | None:
    """Fork this host's ranks and wait for their end; return what ended them early, or None.

    worker: what they do.  local_ranks: their number.  limit_s: after which they hang.
    events: takes what they send.  place: where they meet those of the other hosts.  preemption:
    halts them.
    """
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(local_ranks)]
    readers, writers = zip(*pipes, strict=True)
    born = multiprocessing.get_context("fork").Barrier(local_ranks)
    plans = [found.plan for found in (worker.training, worker.evaluation) if found]
    pulses, stacks = Pulses(plans, local_ranks), Stacks(local_ranks)
    outputs = _open_outputs(events.record, place.number * local_ranks, local_ranks)
    worker = replace(
        worker,
        gate=preemption.gate,
        pipes=writers,
        born=born,
        interface=place.interface,
        pulses=pulses,
        stacks=stacks,
        outputs=outputs,
    )
    watch = Watch(
        pulses,
        stacks,
        limit_s,
        folder=lambda: events.record.folder,
        say=events.record.note,
        fail=events.note_hang,
        host_of=lambda rank: events.hosts.name(rank // local_ranks),
        compares=worker.job.device_type == "cpu",
        grows=worker.job.recipe.launch.hang_s is None,
    )
    listener = threading.Thread(target=events.listen, args=(readers,), daemon=True)
    listener.start()
    well = False
    try:
        with outputs, handlers_restored(), preemption.serving(), events.may_stop_us(), watch:
            ended = run_agent(worker, local_ranks, place)
        well = ended is None
    finally:
        for pipe in writers:  # every other copy was a worker's: the listener comes to an end
            pipe.close()
        listener.join(timeout=None if well else 5)  # the report has all events
    return ended


def _open_outputs(record: Record, first: int, count: int) -> ProcessOutputs:
    """Open the outputs of the ranks of this host: what they print is shown, and in the logs that
    hosts which share a folder keep together.

    record: of the run.  first, count: the ranks.
    """
    folder = record.run_folder / LOGS
    logs = [folder / f"rank_{rank}.log" for rank in range(first, first + count)]
    return ProcessOutputs(logs, (STDOUT, STDERR), record.lose)


def _join_weights(events: EventCollector, record: Record, num_ranks: int) -> None:
    """Several hosts: one file of all shards, if this disk has them all; else they stay, and it is
    said.
    """
    seen = next(iter(events.here.values()))
    if not seen["all"]:
        ranks = ", ".join(map(str, sorted(events.here)))
        record.note(
            f"the weights of ranks {ranks} are here, those of the others on their hosts' disks; "
            f"join them: {os.path.basename(sys.executable)} -m flowrun.launcher.weights "
            "FOLDER OTHER_FOLDER"
        )
    elif seen["host"] == 0:
        weights.join_shards([record.folder], num_ranks)
