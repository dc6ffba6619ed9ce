"""The console that tables are printed to, and tables without lines, in any width."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.table import Table

# Otherwise the bracket would be a style, and the reader advised to install what is there.
NO_PLOT = r"no plot: it needs matplotlib (pip install 'flowrun\[plot]')"


# but for the ends of lines and tabs
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replace the characters that steer a terminal: a model may write any."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class LastingOutput:
    """A standard stream that a program outlives: when nobody takes what is printed any more (a full
    disk, a pipe without a reader), the rest is dropped.

    lost: why; empty as long as all is well.
    """

    lost = ""

    def __init__(self, name: str = "stdout") -> None:
        """name: of the stream in `sys`."""
        self._name = name

    def write(self, text: str) -> int:
        """Write, or drop."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Write what is waiting, or drop it."""
        self._try("flush")

    def _try(self, what: str, *text: str) -> None:
        try:
            getattr(self._stream, what)(*text)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.lost = self.lost or f"{type(error).__name__}: {error}"
            with suppress(OSError, ValueError):  # so that its end finds nothing to complain of
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._stream.fileno())
                os.close(nothing)

    @property
    def _stream(self) -> TextIO:
        stream: TextIO = getattr(sys, self._name)
        return stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


STDOUT, STDERR = LastingOutput("stdout"), LastingOutput("stderr")


def output_width() -> int:
    """Return the columns of standard output: $COLUMNS, the terminal's, or 120 if it is none."""
    columns = int(os.environ.get("COLUMNS") or 0)
    return columns or (shutil.get_terminal_size().columns if sys.stdout.isatty() else 120)


def wide_console() -> Console:
    """Return standard output, as wide as `output_width` says."""
    return Console(width=output_width(), file=cast(TextIO, STDOUT))


def say(console: Console, text: str, style: str = "") -> None:
    """Print a text whose words stay whole: a terminal gets lines of its width, a file one line.

    console: to print to.  text: may hold paths and commands, to be copied.  style: of Rich.
    """
    text = wrap_words(text, console.width) if console.is_terminal else text
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def wrap_words(text: str, width: int) -> str:
    """Return a text in lines of this width, without a break in a word.

    A line goes on as far to the right as it began.
    """
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        wrapped = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += wrapped or [""]
    return "\n".join(lines)


def plain_table(
    title: str,
    headings: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    *,
    right: Container[str] = (),
    whole: Container[str] = (),
) -> Table:
    """Make a table.

    right: headings of columns that end at the right, as numbers do.  whole: of those that stay on
    one line; words of others wrap.
    """
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading in whole,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table
