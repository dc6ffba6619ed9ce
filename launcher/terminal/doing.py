"""Show one line on the terminal that says what is being done, before there is a plan.

The next line takes its place, and `clear` takes it away before anything else is printed.  Where
standard error is not a terminal nothing is written, but within `keep_lines`, which is around a run:
there a line stays for each phase, with the time when it began, and another every 10 s.  A phase is
the first word of what is being done.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_ERASE = "\r\x1b[2K"  # to the first column, and the line is empty
_PAUSE_S = 10.0


class Stream(Protocol):
    """The stream takes lines."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


_on_screen = False
_file: Stream | None = None
_written: dict[str, float] = {}  # phase -> when a line of it was written


@contextmanager
def keep_lines(file: Stream) -> Iterator[None]:
    """Within, write lines to this file where standard error is not a terminal."""
    global _file
    _file = file
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
    elif _file:
        phase, now = what.split()[0].rstrip(":"), time.monotonic()
        if now >= _written.get(phase, -math.inf) + _PAUSE_S:
            _written[phase] = now
            _file.write(f"{time.strftime('%H:%M:%S')}  {what} …\n")
            _file.flush()


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
