"""Show one line on the terminal that says what is being done, before there is a plan.

The next line takes its place, and `clear` takes it away before anything else is printed.  Where
standard error is not a terminal nothing is written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ERASE = "\r\x1b[2K"  # to the first column, and the line is empty
_on_screen = False


def doing(what: str) -> None:
    """Show what is being done, in the place of what was."""
    global _on_screen
    if sys.stderr.isatty():
        _on_screen = True
        sys.stderr.write(f"{_ERASE}{what} …")
        sys.stderr.flush()


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
