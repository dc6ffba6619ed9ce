"""Make the console that tables are printed to."""

from __future__ import annotations

import os
import shutil
import sys

from rich.console import Console

# Otherwise the bracket would be a style, and the reader advised to install what is there.
NO_PLOT = r"no plot: it needs matplotlib (pip install 'flowrun\[plot]')"


def output_width() -> int:
    """Return the columns of standard output: $COLUMNS, the terminal's, or 120 if it is none."""
    columns = int(os.environ.get("COLUMNS") or 0)
    return columns or (shutil.get_terminal_size().columns if sys.stdout.isatty() else 120)


def wide_console() -> Console:
    """Return standard output, as wide as `output_width` says."""
    return Console(width=output_width())
