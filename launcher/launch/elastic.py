"""launch=local: one process a rank, started by torch.distributed.elastic, on one host or several.

This process has composed, captured and planned; its workers (worker.py) are forked and inherit the
result.  Each reports over a pipe of its own: steps, its end, or what went wrong.  The same command
on each host (launch.nnodes, launch.rdzv_endpoint) makes one run; the launchers meet before anything
is forked (hosts/).  When this returns or raises, every worker of this host is gone.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.pulse import Pulses
from flowrun.engine.runtime.kernels.kernels import Kernels
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.engine.trace.trace import TraceEvent
from flowrun.launcher.job.job import Job
from flowrun.launcher.launch.events import concerns_all
from flowrun.launcher.launch.hosts.hosts import Alone, Hosts, open_hosts
from flowrun.launcher.launch.hosts.meeting import Host, ranks_of_a_host
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace
from flowrun.launcher.launch.preemption import Offer, Preemption, Requests
from flowrun.launcher.launch.restart.restarts import Attempts, Ending, back_off, give_up, restart
from flowrun.launcher.launch.restart.snapshots import map_snapshots
from flowrun.launcher.launch.step_gate import StepGate
from flowrun.launcher.launch.watch import Watch, find_limit, find_silence
from flowrun.launcher.launch.worker import Worker
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Log
from flowrun.launcher.store import weight_files as weights

_PATIENCE_S = 2.0  # after a rank failed, what elastic does not notice is ended
_PART_S = 1.0  # for the other hosts to end after a failure, before the ranks' store closes
_TALKERS = (
    "torch.distributed.elastic",
    "torch.multiprocessing.spawn",
)
_STOP = signal.SIGQUIT  # to ourselves, or from outside: the run ends, with its workers
_NO_BARRIER_S = 0.001  # agents need not wait for each other: launchers do (Hosts.part)
_SHUTDOWN_S = 3  # workers that have not ended by then are killed


def execute_local(
    job: Job,
    training: Rehearsed,
    evaluation: Rehearsed | None,
    record: Record,
    kernels: Kernels,
    requests: Requests,
) -> Log:
    """Start this host's ranks, and return when all have ended.

    job: what to train.  training, evaluation: its plans.  record: takes what happens.  kernels: of
    training's regions.  requests: what is asked of this process.  Raises RunError for the rank that
    failed (not for one that lost it), Preempted or KeyboardInterrupt where it was asked to end.
    """
    num_ranks = training.plan.num_ranks
    local_ranks = ranks_of_a_host(num_ranks, job.recipe.launch)
    limit_s = find_limit(job.recipe.launch.hang_s, training.rehearsal.step_s)
    snapshots = map_snapshots(record, training)
    worker = Worker(
        job=job,
        training=training,
        evaluation=evaluation,
        kernels=kernels,
        folder=record.folder,
        launcher=os.getpid(),
        silence_s=find_silence(limit_s),
        snapshots=snapshots,
    )
    attempts = Attempts(limit=job.recipe.launch.restarts, furthest=record.reached)
    with open_hosts(job.recipe.launch, limit_s, record.say) as hosts:
        while True:
            events = EventCollector(record=record, hosts=hosts)
            preemption = events.preemption = Preemption(
                gate=StepGate.make_shared(local_ranks, job.start.step if job.start else 0),
                requests=requests,
                saved=job.saved_steps,
                steps=job.recipe.train.steps,
                grace_s=job.recipe.launch.grace_s,
                say=record.note,
                stop=events.stop_us,
                hosts=hosts,
            )
            place = hosts.meet(partial(_describe, job, training, record), events.receive)
            if hosts.shared and not attempts.total:
                record.share(place.number)
            ended = _run_ranks(worker, local_ranks, limit_s, events, place, preemption)
            error = events.part(preemption.early or ended, preemption.end_after(ended))
            if error is None:
                break
            ending = Ending.STOPPED if preemption.ending else events.ending(ended, error)
            again = attempts.after(ending, record.reached)
            if again is None or not isinstance(error, RunError):
                record.close()
                if attempts.limit and isinstance(error, RunError):
                    error = give_up(record, snapshots, ending, error)
                raise error
            attempts = again
            restart(record, snapshots, attempts, error)
            back_off(attempts.wait_s, lambda: not requests.queue.empty())
    if events.here:
        _join_weights(events, record, num_ranks)
    return events.log()


def _describe(job: Job, training: Rehearsed, record: Record) -> Host:
    """Describe this host to the others."""
    recipe, plan = job.recipe.to_yaml(), str(training.plan)
    return Host.describe(job.recipe.launch, recipe, job.device_type, plan, record.folder)


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
    worker = replace(
        worker,
        folder=events.record.folder,
        gate=preemption.gate,
        pipes=writers,
        born=born,
        interface=place.interface,
        pulses=pulses,
        stacks=stacks,
    )
    watch = Watch(
        pulses,
        stacks,
        limit_s,
        folder=lambda: events.record.folder,
        say=events.record.note,
        fail=events.note_hang,
        compares=worker.job.device_type == "cpu",
        grows=worker.job.recipe.launch.hang_s is None,
    )
    listener = threading.Thread(target=events.listen, args=(readers,), daemon=True)
    listener.start()
    well = False
    try:
        with _handlers_restored(), preemption.serving(), events.may_stop_us(), watch:
            ended = _launch(worker, local_ranks, place)
        well = ended is None
    finally:
        for pipe in writers:  # every other copy was a worker's: the listener comes to an end
            pipe.close()
        listener.join(timeout=None if well else 5)  # the report has all events
    return ended


# ---- starting ------------------------------------------------------------------------------------


def _entry(worker: Worker) -> None:
    worker.live()


def _launch(worker: Worker, local_ranks: int, place: MeetingPlace) -> RunError | None:
    """Run elastic's agent in this process; return what it saw of the first process that ended
    badly.

    worker: what a forked process runs.  local_ranks: how many there are.  place: where they meet.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing import api as elastic_api

    from flowrun.launcher.launch.hosts.rendezvous import Rendezvous

    _silence_elastic()
    elastic_api._get_default_signal = lambda: signal.SIGKILL  # ranks leave SIGTERM to the launcher
    os.environ.setdefault("OMP_NUM_THREADS", str(worker.job.recipe.launch.threads))
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # each host has as many ranks
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(_fatal_signals())
    agent = LocalElasticAgent(
        WorkerSpec(
            role="flowrun",
            local_world_size=local_ranks,
            entrypoint=_entry,
            args=(worker,),
            rdzv_handler=Rendezvous(place),
            max_restarts=0,
            monitor_interval=0.1,
        ),
        DefaultLogsSpecs(log_dir=os.devnull),
        start_method="fork",
        exit_barrier_timeout=_NO_BARRIER_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        with _frozen():
            result = agent.run()
    except SignalException as error:
        return RunError("the launcher", f"stopped by {signal.Signals(error.sigval).name}.")
    return _what_elastic_saw(result.failures) if result.is_failed() else None


@contextmanager
def _frozen() -> Iterator[None]:
    """Neither this process nor a worker looks for garbage among what is there now, graphs and
    plans.  To look is to write to each object: every worker would copy all their pages, 0.4 s of
    its first steps for a GPT of 4 blocks on 4 ranks.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _silence_elastic() -> None:
    """Elastic's log says again what we say, with its tracebacks; LOGLEVEL=INFO brings it back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in logging.root.manager.loggerDict:
        if name.startswith(_TALKERS):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _fatal_signals() -> list[str]:
    """Signals that end the run at once, with its workers; nohup has another use for SIGHUP."""
    others = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    return [s.name for s in (*others, _STOP)]


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """The handlers that elastic leaves behind are put back to what they were."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, _STOP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _what_elastic_saw(failures: Mapping[int, Any]) -> RunError:
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    code = failure.exitcode
    if code == -signal.SIGKILL:
        how = "was killed by SIGKILL, most likely by the kernel because memory ran out"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit status {code}"
    return RunError(f"rank {rank}", f"the process {how}.")


def _launcher_error(error: Exception) -> RunError:
    """Return the error that ends a run because the launcher cannot write it down."""
    if isinstance(error, RunError):
        return error
    found = RunError("the launcher", f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found


# ---- what the launcher collects ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of a rank, a launcher or a host.

    lost_peer: the rank merely lost another.  host: the number of the host that sent it; None: this.
    """

    error: RunError
    lost_peer: bool = False
    host: int | None = None


@dataclass(kw_only=True)
class EventCollector:
    """Collects the events of workers and of other hosts, in threads of the launcher.

    files: of each checkpoint that is being written, those that are on the disk.
    hosts: this launcher among the others.  preemption: takes what they offer.
    broken: what went wrong here, while writing it down.  hung: why the ranks were killed as they
    hung.  running: elastic is in charge.  over: it no longer is.  stopped_us: an event has ended
    the run.
    """

    record: Record
    hosts: Hosts | Alone
    preemption: Preemption | None = None
    failures: list[Failure] = field(default_factory=list)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    here: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: dict[int, dict[str, Sequence[int]]] = field(default_factory=dict)
    broken: RunError | None = None
    hung: RunError | None = None
    running: bool = False
    over: bool = False
    stopped_us: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    taking: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, readers: Sequence[Connection]) -> None:
        """Read events until every pipe has ended, also that of a worker killed in mid-message."""
        open_pipes = list(readers)
        while open_pipes:
            ready: list[Any] = wait(open_pipes)
            for pipe in ready:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    open_pipes.remove(pipe)
                    continue
                if concerns_all(message):
                    self.hosts.broadcast(*message)
                self._take(message, None)

    def receive(self, host: int, message: tuple[Any, ...]) -> None:
        """Take an event of another host."""
        self._take(message, host)

    def _take(self, message: tuple[Any, ...], host: int | None) -> None:
        if self.broken is not None:
            return  # the pipes are still emptied: no worker must block
        try:
            with self.taking:
                self._note(message, host)
        except Exception as error:
            self.broken = _launcher_error(error)
            self.stop_us()

    def _note(self, message: tuple[Any, ...], host: int | None) -> None:
        match message:
            case ("step", step, results, seconds):
                self.record.step(step, results, seconds)
            case ("evaluated", step, results):
                self.record.write_evaluation(step, results)
            case ("saved", folder, step, name, written):
                if self.hosts.number == 0:
                    self._take_file(Path(folder), step, name, written)
            case ("note", text):
                self.record.note(text)
            case ("end", rank, measured):
                self.ends[rank] = measured
            case ("weights", rank, seen):
                self.here[rank] = seen
            case ("error", where, problem, story, lost_peer):
                error = RunError(where, problem)
                error.add_note(story)
                self._fail(Failure(error=error, lost_peer=lost_peer, host=host))
            case ("halt", number, by, *offer) if self.preemption and host is not None:
                self.preemption.receive(host, number, by, Offer(*offer))
            case ("gone", name, why):
                where = f"host {host} ({name})"
                self._fail(Failure(error=RunError(where, why), host=host))
            case ("silent", name, seconds):
                self.record.say(f"nothing came from host {host} ({name}) for {seconds:.0f} s")

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if failure.host is not None:
            self.stop_us()
        elif not failure.lost_peer:  # elastic sees it at once: it is a rank of this host
            threading.Timer(_PATIENCE_S, self.stop_us).start()

    def _take_file(self, folder: Path, step: int, name: str, written: Sequence[int]) -> None:
        """Note that a rank has written its file of a checkpoint; complete it with the last."""
        files = self.files.setdefault(step, {})
        files[name] = written
        if len(files) == self.record.job.recipe.num_ranks:
            self.record.complete_checkpoint(folder, step, self.files.pop(step))

    def note_hang(self, error: RunError) -> None:
        """Note why ranks are killed that hang."""
        self.hung = error

    @contextmanager
    def may_stop_us(self) -> Iterator[None]:
        """Let an event end the run while elastic is in charge."""
        self.running = True
        try:
            yield
        finally:
            with self.lock:
                self.running, self.over = False, True

    def stop_us(self) -> None:
        """End the run as soon as elastic is there to do so: it ends the workers, then itself.

        A signal's handler may call it, while this thread holds the lock.
        """
        if not self.lock.acquire(timeout=1.0):
            return
        try:
            if self.stopped_us:
                return  # a second signal would come in the midst of what follows the first
            if self.running and signal.getsignal(_STOP) is not signal.SIG_DFL:
                self.stopped_us = True
                os.kill(os.getpid(), _STOP)
            elif not self.over:
                again = threading.Timer(0.1, self.stop_us)
                again.daemon = True
                again.start()
        finally:
            self.lock.release()

    def part(
        self, ended: BaseException | None, agreed: BaseException | None = None
    ) -> BaseException | None:
        """Part from the other hosts; return the error that ended the run, None if it ended well.

        ended: Ctrl-C, or what elastic saw first.  agreed: what all hosts end with, as one was asked
        to end.
        """
        if agreed is not None and self.broken is None:
            self.hosts.part(_PART_S if ended else None)
            return agreed
        verdict = self.verdict(ended)
        if verdict is None:
            self.hosts.part()  # with all their events
            all_ended = len(self.ends) == self.record.job.recipe.num_ranks
            return None if all_ended else self.verdict(None)
        self._notify_other_hosts(verdict)
        self.hosts.part(_PART_S)
        return self._name_host(verdict)

    def verdict(self, ended: BaseException | None) -> BaseException | None:
        """Return the error that ended the run; None if it ended well.

        What failed by itself, on any host, comes before a rank that elastic saw die, and both
        before those that only lost a peer.  ended: Ctrl-C, or what elastic saw first.
        """
        if self.broken or isinstance(ended, KeyboardInterrupt):
            return self.broken or ended
        own = [failure.error for failure in self.failures if not failure.lost_peer]
        if ended is None:
            return own[0] if own else None
        assert isinstance(ended, RunError)
        known = {f.error.where.split(",")[0] for f in self.failures if f.host is None}
        died = [ended] if ended.where.startswith("rank") and ended.where not in known else []
        victims = [failure.error for failure in self.failures]
        return self.hung or [*own, *died, *victims, ended][0]

    def ending(self, ended: BaseException | None, error: BaseException) -> Ending:
        """Say why the ranks have ended.

        ended: Ctrl-C, or what elastic saw first.  error: the verdict.
        """
        signalled = isinstance(ended, RunError) and not ended.where.startswith("rank")
        if (
            self.broken
            or isinstance(ended, KeyboardInterrupt)
            or (signalled and not self.stopped_us)
        ):
            return Ending.STOPPED
        failure = self._find(error)
        raised = failure is not None and not failure.lost_peer
        return Ending.RAISED if raised else Ending.DIED

    def _notify_other_hosts(self, error: BaseException) -> None:
        """Notify them, unless it is known there."""
        failure = self._find(error)
        if failure is not None and not failure.lost_peer:
            return
        lost_peer = failure is not None
        if isinstance(error, RunError):
            self.hosts.broadcast("error", error.where, error.problem, "", lost_peer)
        else:
            self.hosts.broadcast("error", "the launcher", "stopped by Ctrl-C.", "", lost_peer)

    def _name_host(self, error: BaseException) -> BaseException:
        """Return the error with the host where it happened."""
        failure = self._find(error)
        if not self.hosts.names or not isinstance(error, RunError):
            return error
        if error.where.startswith("host"):
            return error
        host = self.hosts.number if failure is None or failure.host is None else failure.host
        error.where = f"{self.hosts.name(host)}, {error.where}"
        return error

    def _find(self, error: BaseException) -> Failure | None:
        return next((failure for failure in self.failures if failure.error is error), None)

    def log(self) -> Log:
        """Everything measured on all ranks."""
        ends = dict(sorted(self.ends.items()))

        def by_rank(key: str) -> dict[int, Any]:
            return {rank: measured[key] for rank, measured in ends.items()}

        record = self.record
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
