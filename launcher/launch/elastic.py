"""torch.distributed.elastic's agent: it forks the ranks of this host, and ends all if one dies.

No other file imports it, but for the rendezvous that it asks (hosts/rendezvous.py).

Relied on of torch: `_start_workers` forks, `_shutdown` ends the processes of `_pcontext`, whose
`close` takes a signal and a timeout (2.11 gives it no argument of the agent's).  It is made by the
name MultiprocessContext of the package, and its `_worker_finished_event` is set when all workers
have returned, each of which waits for it.  When one has died, `join` of `_pc` gives the others a
grace_period to end, sends them SIGTERM, and kills them after another.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from flowrun.engine.errors import RunError
from flowrun.engine.torch_internals import set_elastic_signals
from flowrun.launcher.launch.failure import describe_exit
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace
from flowrun.launcher.launch.worker import Worker

STOP = signal.SIGQUIT  # to ourselves, or from outside: the run ends, with its workers
_TALKERS = (
    "torch.distributed.elastic",
    "torch.multiprocessing.spawn",
)
_NO_BARRIER_S = 0.001  # agents need not wait for each other: launchers do (Hosts.part)
_SHUTDOWN_S = 3  # workers that have not ended by then are killed


def _entry(worker: Worker) -> None:
    worker.live()


def run_agent(worker: Worker, local_ranks: int, place: MeetingPlace) -> RunError | None:
    """Run elastic's agent in this process; return what it saw of the first process that ended
    badly.

    worker: what a forked process runs.  local_ranks: how many there are.  place: where they meet.
    """
    from torch.distributed.elastic import multiprocessing as elastic_processes
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from flowrun.launcher.launch.hosts.rendezvous import Rendezvous

    _silence_elastic()
    signals = _LateSignals()
    elastic_processes.MultiprocessContext = _context_class()  # type: ignore[misc]
    set_elastic_signals(signals.handle, signal.SIGKILL)  # ranks leave SIGTERM to the launcher
    os.environ.setdefault("OMP_NUM_THREADS", str(worker.job.recipe.launch.threads))
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # each host has as many ranks
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(_fatal_signals())
    agent = _agent_class(signals)(
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
    )
    try:
        with _frozen():
            result = agent.run()
    except SignalException as error:
        return RunError("the launcher", f"stopped by {signal.Signals(error.sigval).name}.")
    return _what_elastic_saw(result.failures) if result.is_failed() else None


class _LateSignals:
    """A signal ends the run once all workers are forked.  What a handler raises before is lost in
    a callback of os.fork, or the workers are that elastic has just made.
    """

    def __init__(self) -> None:
        self._came: int | None = None
        self._forked = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal as elastic does, but not too early."""
        from torch.distributed.elastic.multiprocessing import SignalException

        self._came = signum
        if self._forked:
            raise SignalException(f"got signal {signum}", signal.Signals(signum))

    def end_forks(self) -> None:
        """Let signals end the run from now on, and one that has come."""
        self._forked = True
        if self._came is not None:
            self.handle(self._came, None)


class WorkersReturned:
    """An event for processes that are forked: all workers have returned, and may end.

    To set multiprocessing.Event is to wait until each process that waits for it has noticed: one
    that is stopped, or was killed, holds the launcher for ever.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def set(self) -> None:
        """Let each worker end."""
        os.write(self._writer.fileno(), bytes(self._workers))

    def wait(self) -> None:
        """Wait, in a worker, once."""
        os.read(self._reader.fileno(), 1)


def _context_class() -> Any:
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    class PatientContext(MultiprocessContext):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._worker_finished_event: Any = WorkersReturned(self.nprocs)

        def _start(self) -> None:
            super()._start()
            assert self._pc is not None
            # Ranks leave SIGTERM to the launcher: one that has returned would stay for 30 s.
            join = partial(self._pc.join, grace_period=_SHUTDOWN_S / 2)  # before it, and behind
            self._pc.join = join  # type: ignore[method-assign]

    return PatientContext


def _agent_class(signals: _LateSignals) -> Any:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class PatientAgent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            started: dict[int, Any] = super()._start_workers(worker_group)
            signals.end_forks()
            return started

        def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = _SHUTDOWN_S) -> None:
            if self._pcontext:
                self._pcontext.close(death_sig, timeout=_SHUTDOWN_S)
            super()._shutdown(death_sig)

    return PatientAgent


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
    return [s.name for s in (*others, STOP)]


@contextmanager
def handlers_restored() -> Iterator[None]:
    """The handlers that elastic leaves behind are put back to what they were."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, STOP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _what_elastic_saw(failures: Mapping[int, Any]) -> RunError:
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    return RunError(f"rank {rank}", describe_exit(failure.exitcode))
