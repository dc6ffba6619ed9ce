import ctypes
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrun.engine.runtime.process.outputs import ProcessOutputs

pytestmark = pytest.mark.processes

Screens = tuple[io.StringIO, io.StringIO]


@pytest.fixture
def screens() -> Screens:
    return io.StringIO(), io.StringIO()


def fork(work: Callable[[], None]) -> int:
    """Fork a process that works, and leaves as a killed one does; return its number."""
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def print_in_each(
    logs: list[Path], screens: Screens, work: Callable[[ProcessOutputs], None]
) -> list[str]:
    """Work in a process for each log; return what is said of logs that are lost."""
    lost: list[str] = []
    with ProcessOutputs(logs, screens, lost.append) as outputs:

        def live(index: int) -> None:
            outputs.enter(index)
            work(outputs)

        for child in [fork(lambda k=k: live(k)) for k in range(len(logs))]:  # type: ignore[misc]
            os.waitpid(child, 0)
    return lost


def talk(outputs: ProcessOutputs) -> None:
    print("printed")
    ctypes.CDLL(None).puts(b"by C")
    os.write(1, "in bytes: é\n".encode())
    os.system("echo by a shell")


def test_whoever_prints_is_in_the_log_and_on_the_screen(tmp_path: Path, screens: Screens) -> None:
    logs = [tmp_path / "logs" / f"{k}.log" for k in range(2)]
    assert print_in_each(logs, screens, talk) == []
    lines = ["printed", "by C", "in bytes: é", "by a shell"]
    assert [log.read_text().splitlines() for log in logs] == [lines, lines]
    assert sorted(screens[0].getvalue().splitlines()) == sorted(2 * lines)


def test_what_handlers_of_logging_write_goes_to_the_log_and_to_standard_error(
    tmp_path: Path, screens: Screens
) -> None:
    handler = logging.StreamHandler(sys.stderr)  # before the fork, as a user's module makes it
    line = logging.LogRecord("a.model", logging.WARNING, "model.py", 1, "of logging", (), None)
    print_in_each([tmp_path / "0.log"], screens, lambda outputs: handler.emit(line))
    assert (tmp_path / "0.log").read_text() == "of logging\n"
    assert (screens[0].getvalue(), screens[1].getvalue()) == ("", "of logging\n")


def test_what_is_for_the_log_is_not_shown(tmp_path: Path, screens: Screens) -> None:
    print_in_each([tmp_path / "0.log"], screens, lambda outputs: outputs.write_log("a traceback\n"))
    assert (tmp_path / "0.log").read_text() == "a traceback\n"
    assert screens[0].getvalue() == screens[1].getvalue() == ""


def test_a_crash_leaves_the_stacks_in_the_log(tmp_path: Path, screens: Screens) -> None:
    print_in_each([tmp_path / "0.log"], screens, lambda outputs: os.abort())
    assert "Fatal Python error: Aborted" in (tmp_path / "0.log").read_text()
    assert screens[1].getvalue() == ""


def test_a_log_is_appended_to_after_a_blank_line(tmp_path: Path, screens: Screens) -> None:
    for _ in range(2):
        print_in_each([tmp_path / "0.log"], screens, lambda outputs: print("hello"))
    assert (tmp_path / "0.log").read_text() == "hello\n\nhello\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [("/dev/full", "No space left on device"), ("/no/such/folder/0.log", "No such file")],
)
def test_a_log_that_cannot_be_written_is_said_once_and_the_screen_goes_on(
    screens: Screens, log: str, why: str
) -> None:
    lost = print_in_each([Path(log)], screens, talk)
    assert len(lost) == 1
    assert lost[0].startswith(f"{log} is written no further: {why}")
    assert screens[0].getvalue().count("\n") == 4


def test_a_screen_without_some_letters_shows_their_numbers(tmp_path: Path) -> None:
    shown = io.BytesIO()
    screens: Screens = (io.TextIOWrapper(shown, "ascii"), io.StringIO())  # type: ignore[assignment]
    print_in_each([tmp_path / "0.log"], screens, lambda outputs: print("é"))
    assert shown.getvalue() == b"\\xe9\n"


def test_a_process_that_one_left_behind_keeps_nobody_waiting(
    tmp_path: Path, screens: Screens
) -> None:
    read, write = os.pipe()

    def leave_one() -> None:
        os.close(write)
        os.read(read, 1)  # until the test has ended

    print_in_each([tmp_path / "0.log"], screens, lambda outputs: print(fork(leave_one)))
    assert int((tmp_path / "0.log").read_text()) > 0
    os.close(read)
    os.close(write)
