"""launch=local: one process a rank, started by torch.distributed.elastic, on one host or several.

This process has composed, captured and planned; its workers (worker.py) are forked and inherit the
result.  Each reports over a pipe of its own: steps, its end, or what went wrong.  The same command
on each host (launch.nnodes, launch.rdzv_endpoint) makes one run; the hosts find each
other by elastic's c10d rendezvous.  When this returns or raises, every worker of this host is gone.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from flowrun.launcher.launch.hosts import HostStore, ranks_of_a_host
from flowrun.launcher.launch.restart.restarts import Attempts, Ending, restart
from flowrun.launcher.launch.restart.snapshots import map_snapshots
from flowrun.launcher.launch.step_gate import StepGate
from flowrun.launcher.launch.watch import Watch, find_limit, find_silence
from flowrun.launcher.launch.worker import Worker
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Log
from flowrun.launcher.store import weight_files as weights

_JOIN_S = 600  # how long a host waits for the others
_PATIENCE_S = 2.0  # after a rank of another host failed, ranks here that do not notice are ended
_TALKERS = (
    "torch.distributed.elastic",
    "torch.distributed.launcher",
    "torch.multiprocessing.spawn",
)
_STOP = signal.SIGQUIT  # to ourselves, or from outside: the run ends, with its workers
_SHUTDOWN_S = 3  # workers that have not ended by then are killed


def execute_local(
    job: Job,
    training: Rehearsed,
    evaluation: Rehearsed | None,
    record: Record,
    kernels: Kernels,
) -> Log:
    """Start this host's ranks, and return when all have ended.

    job: what to train.  training, evaluation: its plans.  record: takes what happens.  kernels: of
    training's regions.  Raises RunError for the rank that failed (not for one that lost it),
    KeyboardInterrupt on Ctrl-C.
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
    while True:
        events = EventCollector(record=record)
        ended = _run_ranks(worker, local_ranks, limit_s, events)
        error = events.verdict(ended)
        if error is None:
            break
        again = attempts.after(events.ending(ended, error), record.reached)
        if again is None or not isinstance(error, RunError):
            record.close()
            events.notify_other_hosts(error)
            raise error
        attempts = again
        restart(record, snapshots, attempts, error)
    if events.here:
        _join_weights(events, record, num_ranks)
    return events.log()


def _run_ranks(
    worker: Worker, local_ranks: int, limit_s: float, events: EventCollector
) -> BaseException | None:
    """Fork this host's ranks and wait for their end; return what ended them early, or None.

    worker: what they do.  local_ranks: their number.  limit_s: after which they hang.
    events: takes what they send.
    """
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(local_ranks)]
    readers, writers = zip(*pipes, strict=True)
    born = multiprocessing.get_context("fork").Barrier(local_ranks)
    start = worker.job.start
    gate = StepGate.shared(local_ranks, start.step if start else 0)
    plans = [found.plan for found in (worker.training, worker.evaluation) if found]
    pulses, stacks = Pulses(plans, local_ranks), Stacks(local_ranks)
    worker = replace(worker, gate=gate, pipes=writers, born=born, pulses=pulses, stacks=stacks)
    watch = Watch(
        pulses,
        stacks,
        limit_s,
        folder=lambda: events.record.folder,
        say=events.record.note,
        fail=events.note_hang,
        compares=worker.job.device_type == "cpu",
    )
    listener = threading.Thread(target=events.listen, args=(readers,), daemon=True)
    listener.start()
    ended: BaseException | None
    well = False
    try:
        with _ctrl_c_is_ours(), events.may_stop_us(), watch:
            ended = _launch(worker, local_ranks, worker.job)
        well = ended is None
    except KeyboardInterrupt as error:
        ended = error
    finally:
        for pipe in writers:  # every other copy was a worker's: the listener comes to an end
            pipe.close()
        listener.join(timeout=None if well else 5)  # the report has all events
    return ended


# ---- starting ------------------------------------------------------------------------------------


def _entry(worker: Worker) -> None:
    worker.live()


def _launch(worker: Worker, local_ranks: int, job: Job) -> RunError | None:
    """Run elastic's agent in this process; what it saw of the first process that ended badly."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from flowrun.launcher.launch import one_host

    one_host.register()
    _silence_elastic()
    launch = job.recipe.launch
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_SHUTDOWN_S)
    os.environ.setdefault("OMP_NUM_THREADS", str(launch.threads))
    meeting: dict[str, Any] = {"join_timeout": _JOIN_S}
    if launch.node_rank is not None:
        meeting["is_host"] = launch.node_rank == 0
    alone = launch.nnodes == 1
    config = LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=local_ranks,
        run_id=f"flowrun-{job.recipe.name}",
        rdzv_backend=one_host.ONE_HOST if alone else "c10d",
        rdzv_endpoint=launch.rdzv_endpoint or "localhost:0",
        rdzv_configs=meeting,
        local_addr="localhost" if alone else None,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        signals_to_handle=",".join(_fatal_signals()),
    )
    try:
        with _frozen():
            elastic_launch(config, _entry)(worker)
    except ChildFailedError as error:
        return _what_elastic_saw(error)
    except SignalException as error:
        return RunError("the launcher", f"stopped by {signal.Signals(error.sigval).name}.")
    except (RendezvousError, DistError) as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        return RunError(
            f"launch.rdzv_endpoint {launch.rdzv_endpoint}",
            f"the rendezvous of {launch.nnodes} hosts failed: {reason}",
            "Check that every host runs the same command and can reach this endpoint, then read"
            " the output of the other hosts.",
        )
    return None


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
    """Signals that end the run with its workers, but for those that someone has another use for:
    nohup, and submitit, which lets SIGTERM pass as Slurm sends it with its warning.
    """
    others = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    return [s.name for s in (*others, _STOP)]


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process and does nothing in one just forked from it.

    Ctrl-C on a terminal reaches the workers too, but it is the launcher that ends them; a second
    one would stop it in the middle of that, and leave some behind.  The handlers that elastic
    leaves behind are put back to what they were.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    launcher = os.getpid()

    def interrupt(number: int, frame: Any) -> None:
        if os.getpid() == launcher:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in ours}
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _what_elastic_saw(error: Any) -> RunError:
    rank, failure = next(iter(error.failures.items()))
    code = failure.exitcode
    if code == -signal.SIGKILL:
        how = "was killed by SIGKILL, most likely by the kernel because memory ran out"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit status {code}"
    return RunError(f"rank {rank}", f"the process {how}.")


# ---- what the launcher collects ------------------------------------------------------------------


@dataclass(kw_only=True)
class EventCollector:
    """Collects the events of workers, in a thread of the launcher.

    failures: each with True if the rank merely lost another.  files: of each checkpoint that is
    being written, those that are on the disk.  hosts: their store, where there are several.
    broken: what went wrong here, while writing it down.  hung: why the ranks were killed as they
    hung.  stopped_us: an event has ended the run.
    """

    record: Record
    failures: list[tuple[RunError, bool]] = field(default_factory=list)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    here: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: dict[int, dict[str, Sequence[int]]] = field(default_factory=dict)
    hosts: HostStore | None = None
    broken: RunError | None = None
    hung: RunError | None = None
    running: bool = False
    stopped_us: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

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
                self._take(message)

    def _take(self, message: Sequence[Any]) -> None:
        if self.broken is not None:
            return  # the pipes are still emptied: no worker must block
        try:
            match message:
                case ("step", step, results, seconds):
                    self.record.step(step, results, seconds)
                case ("evaluated", step, results):
                    self.record.write_evaluation(step, results)
                case ("saved", folder, step, name, written):
                    if self.hosts is None or self.hosts.host == 0:
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
                    self.failures.append((error, lost_peer))
                    if not lost_peer:  # elastic sees it at once if it is a rank of this host
                        threading.Timer(_PATIENCE_S, self._stop_us).start()
                case ("meeting", address, port, host, num_hosts, shared):
                    self.hosts = HostStore(address, port, host, num_hosts)
                    if shared and host:
                        self.record.share(host)
        except Exception as error:
            known = isinstance(error, RunError)
            what = f"{type(error).__name__}: {error}"
            self.broken = error if known else RunError("the launcher", what)
            self.broken.__cause__ = None if known else error
            self._stop_us()

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
                self.running = False

    def _stop_us(self) -> None:
        with self.lock:
            if self.running:
                self.stopped_us = True
                os.kill(os.getpid(), _STOP)  # elastic ends the workers, then itself

    def verdict(self, ended: BaseException | None) -> BaseException | None:
        """Return the error that ended the run; None if it ended well.

        A rank that failed by itself comes before one that elastic saw die, and both before those
        that only lost a peer.  ended: Ctrl-C, or what elastic saw first.
        """
        if ended is None or isinstance(ended, KeyboardInterrupt):
            return self.broken or ended
        assert isinstance(ended, RunError)
        known = {error.where.split(",")[0] for error, _ in self.failures}
        own = [error for error, lost_peer in self.failures if not lost_peer]
        died = [ended] if ended.where.startswith("rank") and ended.where not in known else []
        victims = [error for error, _ in self.failures]
        return self.broken or self.hung or [*own, *died, *victims, ended][0]

    def ending(self, ended: BaseException | None, error: BaseException) -> Ending:
        """Say why the ranks have ended.

        ended: Ctrl-C, or what elastic saw first.  error: the verdict.
        """
        told = isinstance(ended, RunError) and not ended.where.startswith("rank")
        if self.broken or isinstance(ended, KeyboardInterrupt) or (told and not self.stopped_us):
            return Ending.STOPPED
        raised = any(error is failure and not lost_peer for failure, lost_peer in self.failures)
        return Ending.RAISED if raised else Ending.DIED

    def notify_other_hosts(self, error: BaseException) -> None:
        """Notify them, unless a rank that failed has done so itself."""
        if self.hosts is None or any(error is failure for failure, _ in self.failures):
            return
        known = isinstance(error, RunError) and error.where.startswith("rank")
        where = error.where if isinstance(error, RunError) and known else "another host"
        problem = error.problem if isinstance(error, RunError) else "it was stopped by Ctrl-C."
        self.hosts.notify_other_hosts("error", where, problem, "", False)

    def log(self) -> Log:
        """Everything measured on all ranks."""
        keys = ("peak", "sent", "acts", "stashed", "process_peak", "waited_s")
        ends = sorted(self.ends.items())
        by_rank = [{rank: measured[key] for rank, measured in ends} for key in keys]
        by_rank.append(
            {
                rank: [TraceEvent(*note) for note in measured["notes"]]
                for rank, measured in ends
                if measured["notes"]
            }
        )
        record = self.record
        return Log(
            record.steps,
            record.validation,
            *by_rank,
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
