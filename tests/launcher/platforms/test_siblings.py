"""Processes of one host that a starter made: the others leave with the status of the one that
launches, however it ends.
"""

import multiprocessing
import os
import select
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest

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
