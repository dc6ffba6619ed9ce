"""launch=local: one process a rank, on one host or several.

This process has composed, captured and planned; its workers (worker.py) are forked by elastic's
agent (elastic.py) and inherit the result.  Each reports over a pipe of its own, which collector.py
reads: steps, its end, or what went wrong.  The same command on each host (launch.nnodes,
launch.rdzv_endpoint) makes one run; the launchers meet before anything is forked (hosts/).  When
execute_local returns or raises, every worker of this host is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.pulse import Pulses
from flowrun.engine.runtime.kernels.kernels import Kernels
from flowrun.engine.runtime.process.outputs import ProcessOutputs
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.launcher.job.job import Job, Start
from flowrun.launcher.launch.collector import EventCollector
from flowrun.launcher.launch.elastic import handlers_restored, run_agent
from flowrun.launcher.launch.hosts.alone import Alone, HostsChanged, Save, hold_nothing
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


def execute_local(
    job: Job,
    training: Rehearsed,
    evaluation: Rehearsed | None,
    record: Record,
    kernels: Kernels,
    requests: Requests,
    hosts: Hosts | Alone,
) -> Log:
    """Start this host's ranks, and return when all have ended.

    job: what to train.  training, evaluation: its plans.  record: takes what happens.  kernels: of
    training's regions.  requests: what is asked of this process.  hosts: this launcher among the
    others.  Raises RunError for the rank that failed (not for one that lost it), Preempted or
    KeyboardInterrupt where it was asked to end, HostsChanged where another plan is needed.
    """
    num_ranks = training.plan.num_ranks
    local_ranks = ranks_of_a_host(num_ranks, job.recipe.launch)
    limit_s = find_limit(job.recipe.launch.hang_s, training.rehearsal.step_s)
    worker = _make_worker(record, training, evaluation, kernels, limit_s)
    limit, furthest = job.recipe.launch.restarts, record.reached
    attempts = Attempts(limit=limit, may_change=hosts.may_change, furthest=furthest)
    rollbacks = Rollbacks()
    ring = plan_copies(record, training, num_ranks // local_ranks) if hosts.may_change else None
    copies: Copies | None = None
    lost: RunError | None = None  # for which the ranks are started again: see restart
    while True:
        events = EventCollector(record=record, hosts=hosts)
        preemption = events.preemption = _make_preemption(job, local_ranks, events, requests)
        requests.running = False  # while hosts are awaited, a request to end raises its error
        describe = partial(_describe, job, training, record, ring, copies)
        again = partial(restart, record, attempts, lost) if lost else None
        place = _meet(describe, events, copies.save if copies else hold_nothing, again)
        lost = None
        _prepare_folder(record, hosts)
        if hosts.may_change:
            copies = _begin_copies(ring, record, training.plan, place, events)
            worker = replace(worker, snapshots=copies.own if copies else None)
        with copies.running() if copies else nullcontext():
            ended = _run_ranks(worker, local_ranks, limit_s, events, place, preemption)
        error = events.part(preemption.early or ended, preemption.end_after(ended))
        if copies:
            copies.rest()
        if error is None:
            break
        ending = _find_ending(events, ended, error)
        if ending is Ending.RAISED and (
            rolled := roll_back(record, rollbacks, events.not_finite, error, worker.snapshots)
        ):
            rollbacks = rolled
            continue
        snapshots = None if hosts.may_change else worker.snapshots
        attempts, died = _count_attempt(record, attempts, snapshots, ending, error)
        go_back(record, snapshots)
        if hosts.may_change:  # they agree on where
            record.note(f"{died.where}: {died.problem}")
            lost = died
        else:
            restart(record, attempts, died, job.start)
        back_off(attempts.wait_s, lambda: not requests.queue.empty())
    if events.here:
        _join_weights(events, record, num_ranks)
    return events.log()


def _make_worker(
    record: Record,
    training: Rehearsed,
    evaluation: Rehearsed | None,
    kernels: Kernels,
    limit_s: float,
) -> Worker:
    """Return what all ranks of this host have in common.

    record: of the run.  training, evaluation: its plans.  kernels: of training's regions.
    limit_s: after which they hang.
    """
    return Worker(
        job=record.job,
        training=training,
        evaluation=evaluation,
        kernels=kernels,
        folder=record.run_folder,
        launcher=os.getpid(),
        silence_s=find_silence(limit_s),
        snapshots=map_snapshots(record, training),
    )


def _meet(
    describe: Callable[[], Host],
    events: EventCollector,
    save: Save,
    again: Callable[[Start | None], None] | None,
) -> MeetingPlace:
    """Meet the other hosts; return where their ranks meet.

    describe: this host, to the others.  events: of the round.  save: what the hub may ask for.
    again: writes a restart down, once it is known what all hosts go on from; None before the first
    round.  Raises HostsChanged.
    """
    record = events.record
    try:
        place = events.hosts.meet(describe, events.receive, save)
    except HostsChanged as changed:
        if again:
            again(find_step(record.run_folder, changed.step))
        raise
    if again:
        again(record.job.start)
    return place


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


def _find_ending(
    events: EventCollector, ended: BaseException | None, error: BaseException
) -> Ending:
    """Say why the ranks of an attempt have ended.

    events: of the attempt.  ended: what ended its ranks early, or None.  error: the verdict.
    """
    asked = events.preemption and events.preemption.ending
    if asked:
        return Ending.LEFT if asked.regroups else Ending.STOPPED
    return events.ending(ended, error)


def _make_preemption(
    job: Job, local_ranks: int, events: EventCollector, requests: Requests
) -> Preemption:
    """Return what halts the ranks of an attempt.

    job: with the start of the attempt.  local_ranks: their number.  events: ends them at once.
    requests: what is asked of this process.
    """
    return Preemption(
        gate=StepGate.make_shared(local_ranks, job.start.step if job.start else 0),
        requests=requests,
        saved=job.saved_steps,
        steps=job.recipe.train.steps,
        grace_s=job.recipe.launch.grace_s,
        say=events.record.note,
        stop=events.stop_us,
        hosts=events.hosts,
    )


class AlreadyComplete(Exception):
    """Other hosts have ended the run while this one waited to join them.  report: theirs."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def _begin_copies(
    ring: CopyPlan | None,
    record: Record,
    plan: Plan,
    place: MeetingPlace,
    events: EventCollector,
) -> Copies | None:
    """Return the copies of a round; None if the recipe wants none, or a host has not the memory.

    ring: how hosts copy each other's state.  record, plan: of the run.  place, events: of the
    round.
    """
    if ring is None:
        return None
    without = [number for number, link in enumerate(place.links) if link is None]
    if without:
        name = events.hosts.name(without[0])
        record.note(f"{name} has not the memory for copies of hosts' states: there are none")
        return None
    return Copies(record, ring, plan, place, events.hosts, events.votes)


def _describe(
    job: Job, training: Rehearsed, record: Record, ring: CopyPlan | None, copies: Copies | None
) -> Host:
    """Describe this host to the others.  Raises AlreadyComplete.

    job, training, record: of the run.  ring: how hosts copy each other's state.  copies: those of
    the last round.
    """
    joins = not record.begun and nodes_of(record.asked.launch).may_change
    if joins and (report := read_complete(record.run_folder, job.recipe.train.steps)):
        raise AlreadyComplete(report)
    return Host.describe(
        record.asked,
        device=job.device_type,
        plan=str(training.plan),
        planned=job.recipe.launch.num_hosts if record.agreed else 0,
        start=job.start.step if job.start else 0,
        folder=record.run_folder,
        holding=copies.holding if copies else NOTHING,
        copies=ring is not None,
    )


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
