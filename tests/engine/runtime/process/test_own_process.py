import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flowrun.engine.errors import ArgumentError
from flowrun.engine.runtime.process import own_process
from flowrun.engine.runtime.process.own_process import bound_work, run_in_child

LOG = logging.getLogger("flowrun.launcher.data")


def test_the_result_and_the_lines_come_back(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> int:
        LOG.info("half way")
        return os.getpid()

    with caplog.at_level(logging.INFO, LOG.name):
        found = run_in_child(work, "counting", LOG)
    assert found != os.getpid() and caplog.messages == ["half way"]


def test_an_error_is_raised_again() -> None:
    def work() -> None:
        raise ArgumentError("path", "no text.")

    with pytest.raises(ArgumentError, match=r"no text\.") as raised:
        run_in_child(work, "counting", LOG)
    assert raised.value.argument == "path"


def test_a_crash_of_a_library_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match=r"was tokenising X ended by SIGKILL\."):
        run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), "tokenising X", LOG)


class Interrupt(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_does_not_wait_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work holds all signals, as a library does that does not return."""
    interrupt = Interrupt()
    monkeypatch.setattr(LOG, "handlers", [interrupt])
    monkeypatch.setattr(LOG, "level", logging.INFO)

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        LOG.info(str(os.getpid()))
        time.sleep(3600)

    with pytest.raises(KeyboardInterrupt):
        run_in_child(work, "counting", LOG)
    with pytest.raises(ProcessLookupError):
        os.kill(int(interrupt.text), 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(own_process, "MOST_S", 0.05)
    monkeypatch.setattr(own_process, "MOST_BYTES", 1 << 26)
    yield


@pytest.mark.usefixtures("small")
def test_foreign_code_without_end_is_stopped() -> None:
    late = pytest.raises(ValueError, match=r"the template took more than 0\.05 s")
    with late, bound_work("the template"):
        while True:
            pass


@pytest.mark.usefixtures("small")
def test_foreign_code_that_takes_all_memory_is_stopped() -> None:
    with pytest.raises(ValueError, match="the template took more than"), bound_work("the template"):
        bytearray(1 << 30)
    assert len(bytearray(1 << 27)) == 1 << 27


def test_a_bound_strikes_again_where_its_error_was_ignored() -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises(ValueError, match="took more than"), bound_work("the template", 0.05):
        with suppress(ValueError):
            spin()
        spin()
