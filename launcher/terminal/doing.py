"""Show one line on the terminal that says what is being done, before there is a plan.

The next line takes its place, and `clear` takes it away before anything else is printed.  Where
standard error is not a terminal nothing is written, but within `keep_lines` after 45 s:
there a line for each kind stays, with its time, and another of that kind after 10 s.  A kind is
what stands in front of a colon, without numbers.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_ERASE = "\r\x1b[2K"  # to the first column, and the line is empty
_FIRST_S, _PAUSE_S = 45.0, 10.0


class Stream(Protocol):
    """The stream takes lines."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


_NUMBER = re.compile(r"\d[\d,.]*")
_on_screen = False
_file: Stream | None = None
_since = 0.0  # when the first line may be written
_written: dict[str, float] = {}  # kind -> when a line of it was written


@contextmanager
def keep_lines(file: Stream) -> Iterator[None]:
    """Within, write lines to this file after a while, where standard error is not a terminal."""
    global _file, _since
    _file, _since = file, time.monotonic() + _FIRST_S
    try:
        yield
    finally:
        _file = None


def doing(what: str) -> None:
    """Show what is being done, in the place of what was."""
    global _on_screen
    if sys.stderr.isatty():
        _on_screen = True
        sys.stderr.write(f"{_ERASE}{what} …")
        sys.stderr.flush()
    elif _file and _is_due(_NUMBER.sub("", what.partition(":")[0]), time.monotonic()):
        _file.write(f"{time.strftime('%H:%M:%S')}  {what} …\n")
        _file.flush()


def _is_due(kind: str, now: float) -> bool:
    due = now >= max(_since, _written.get(kind, 0.0) + _PAUSE_S)
    if due:
        _written[kind] = now
    return due


def clear() -> None:
    """Take the line away, if there is one."""
    global _on_screen
    if _on_screen:
        _on_screen = False
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


@contextmanager
def show_log(name: str) -> Iterator[None]:
    """Show the records of a logger, of level INFO or above, as long as the context is open."""
    logger, handler = logging.getLogger(name), _OnScreen()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _OnScreen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        doing(record.getMessage())
