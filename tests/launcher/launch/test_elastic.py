"""The agent of torch.distributed.elastic, as the launcher uses it."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

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
