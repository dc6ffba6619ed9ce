"""Where tables go."""

from __future__ import annotations

from rich.console import Console

# The bracket would else be a style, and the reader be told to install what is there.
NO_PLOT = r"no plot: it needs matplotlib (pip install 'flowrun\[plot]')"


def wide_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for our tables if it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
