"""Processes of one host that a starter made: the others leave with the status of the one that
launches, however it ends.
"""

import multiprocessing
import os
import select
import signal
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.platforms import siblings
from flowrun.launcher.platforms.platform import Platform
from flowrun.launcher.platforms.siblings import dismiss, launch_for, wait_for_end

FORK = multiprocessing.get_context("fork")
ADDRESS = "-node-0-0.".join(["train"] * 9)  # longer than the name of a socket may be
PLATFORM = Platform("test", 1, 0, 3, job=f"{ADDRESS} {os.getpid()}")


def begin(what: Callable[[], int]) -> BaseProcess:
    """Run `what` in a process, which it ends with what it returns."""
    process = FORK.Process(target=lambda: os._exit(what()), daemon=True)
    process.start()
    return process


def status_of(process: BaseProcess) -> int | None:
    process.join(30)
    return process.exitcode


@pytest.mark.parametrize(("status", "code"), [(0, 0), (75, 75), (None, 0), ("what", 1)])
def test_all_leave_with_the_status_of_the_one_that_launches(status: object, code: int) -> None:
    early = begin(lambda: wait_for_end(PLATFORM))
    launch_for(PLATFORM, 2)
    late = begin(lambda: wait_for_end(PLATFORM))
    dismiss(status)
    assert [status_of(early), status_of(late)] == [code, code]
    dismiss(1)  # nobody waits any more


def test_they_leave_when_it_is_killed() -> None:
    def launch() -> int:
        launch_for(PLATFORM, 1)
        select.select([siblings._waited_for[0][0]], [], [])  # the other has come
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    launcher, waits = begin(launch), begin(lambda: wait_for_end(PLATFORM))
    assert (status_of(launcher), status_of(waits)) == (-signal.SIGKILL, 1)


def test_it_ends_without_those_that_were_killed() -> None:
    launch_for(PLATFORM, 1)
    dismiss(0, within_s=0)


def test_one_that_nobody_launches_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_COME_S", 0.01)
    with pytest.raises(RunError, match="that launches did not come in 0 s: see its output"):
        wait_for_end(PLATFORM)


def test_a_second_one_that_launches_is_refused() -> None:
    launch_for(PLATFORM, 0)
    with pytest.raises(RunError, match="another process of this host already launches for test"):
        launch_for(PLATFORM, 0)
    dismiss(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be another user")
def test_another_user_neither_leaves_with_a_status_nor_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings, "_COME_S", 0.2)
    stranger = 65_534

    def connect() -> int:
        os.setresuid(stranger, stranger, 0)
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(siblings._place(PLATFORM))
            return len(end.recv(1))

    place = siblings._place(PLATFORM)
    monkeypatch.setattr(siblings, "_place", lambda platform: place)
    launch_for(PLATFORM, 1)
    other = begin(connect)
    select.select([siblings._waited_for[0][0]], [], [])
    own = begin(lambda: wait_for_end(PLATFORM))
    dismiss(7)
    assert [status_of(other), status_of(own)] == [0, 7]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        os.seteuid(stranger)
        listener.listen()  # whose user others see
        os.seteuid(0)
        with pytest.raises(RunError, match="did not come"):
            wait_for_end(PLATFORM)
