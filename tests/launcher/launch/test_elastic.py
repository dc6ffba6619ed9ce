"""The agent of torch.distributed.elastic, as the launcher uses it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.multiprocessing import ProcessContext

from flowrun.launcher.launch.elastic import STOP, handlers_restored, run_agent
from flowrun.launcher.launch.hosts.endpoint import LOOPBACK
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace


class SleepingWorker:
    """A worker that would outlive every test."""

    job = SimpleNamespace(recipe=SimpleNamespace(launch=SimpleNamespace(threads=1)))

    def live(self) -> None:
        """Sleep."""
        time.sleep(3600)


@pytest.mark.processes
def test_a_signal_that_comes_in_the_midst_of_a_fork_ends_all_workers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = MeetingPlace(number=0, num_hosts=1, address=LOOPBACK, port=1, interface="")
    fork, children = os.fork, []

    def fork_and_signal() -> int:
        if child := fork():
            children.append(child)
        return child

    armed = [True]

    def strike() -> None:
        if armed:
            armed.clear()
            os.kill(os.getpid(), STOP)

    os.register_at_fork(after_in_parent=strike)
    monkeypatch.setattr(os, "fork", fork_and_signal)
    worker: Any = SleepingWorker()
    with handlers_restored():
        error = run_agent(worker, 2, place)
    assert str(error and error.problem) == f"stopped by {signal.Signals(STOP).name}."
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert "Exception ignored" not in capfd.readouterr().err


class StoppedAtTheEnd:
    """Two workers that return; the second is stopped while it waits to end."""

    job = SleepingWorker.job

    def __init__(self) -> None:
        self.pids = [multiprocessing.Pipe(duplex=False) for _ in range(3)]

    def live(self) -> None:
        """Return at once, or when the other worker is stopped."""
        rank = int(os.environ["LOCAL_RANK"])
        self.pids[rank][1].send(os.getpid())
        if rank == 1:
            self.pids[2][1].send(os.getpid())
            threading.Thread(target=stop_where_main_waits, daemon=True).start()
        else:
            wait_until(self.pids[2][0].recv(), psutil.STATUS_STOPPED)

    def kill_the_second(self) -> None:
        """Kill it when the first has ended."""
        first, second = (self.pids[rank][0].recv() for rank in range(2))
        wait_until(first, psutil.STATUS_ZOMBIE)
        os.kill(second, signal.SIGKILL)


def stop_where_main_waits() -> None:
    """Stop this process, when live() has returned and its main thread waits."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        stack = [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])]
        if "live" not in stack and stack[-1] == "wait":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.001)


def wait_until(pid: int, status: str) -> None:
    """Wait until a process has a status, or has gone."""
    end = time.monotonic() + 30
    while time.monotonic() < end and psutil.pid_exists(pid):
        if psutil.Process(pid).status() == status:
            return
        time.sleep(0.001)


@pytest.mark.processes
def test_a_worker_that_is_stopped_when_all_have_returned_does_not_hold_the_launcher() -> None:
    place = MeetingPlace(number=0, num_hosts=1, address=LOOPBACK, port=1, interface="")
    worker: Any = StoppedAtTheEnd()
    thread = threading.Thread(target=worker.kill_the_second)
    thread.start()
    with handlers_restored():
        error = run_agent(worker, 2, place)
    thread.join()
    assert error is not None
    assert error.where == "rank 1"


class DiesWhenTheOtherHasReturned:
    """Two workers: the first returns, and ignores SIGTERM as ranks do; then the second dies."""

    job = SleepingWorker.job

    def __init__(self) -> None:
        self.reader, self.writer = multiprocessing.Pipe(duplex=False)

    def live(self) -> None:
        """Return, or die."""
        if os.environ["LOCAL_RANK"] == "1":
            self.reader.recv()
            os._exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.writer.send("returns")


@pytest.mark.processes
def test_a_worker_that_has_returned_is_killed_soon_after_another_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait, waits = ProcessContext._join_procs_with_timeout, []

    def wait_and_note(context: ProcessContext, seconds: float) -> None:
        waits.append(seconds)
        wait(context, seconds)

    monkeypatch.setattr(ProcessContext, "_join_procs_with_timeout", wait_and_note)
    place = MeetingPlace(number=0, num_hosts=1, address=LOOPBACK, port=1, interface="")
    worker: Any = DiesWhenTheOtherHasReturned()
    with handlers_restored():
        error = run_agent(worker, 2, place)
    assert error is not None
    assert error.where == "rank 1"
    assert sum(waits) <= 3
