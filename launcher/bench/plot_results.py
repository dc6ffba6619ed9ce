"""Lines -> bars: step time and memory of flowrun and its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrun.launcher.bench.results import ResultLine
from flowrun.launcher.bench.runs import FLOWRUN
from flowrun.launcher.bench.suite import MODES, Suite
from flowrun.launcher.report.bars import BarPanel, draw_bars

OURS, THEIRS = "#3b6ea5", "#b9bec6"


def draw(suite: Suite, found: Sequence[ResultLine], file: Path) -> bool:
    """Draw a bar for each line of `found` to `file`, and a mark on flowrun's bar where the bounds
    of the suite want it to end.  Return False if nothing ran, or without matplotlib.
    """
    ran = [line for line in found if line.median_s is not None]
    colours = [OURS if line.side == FLOWRUN else THEIRS for line in ran]
    wanted = [wanted_s(line, ran) if line.side == FLOWRUN else None for line in ran]
    times = BarPanel(
        "step time (ms); red: the bound",
        [("", colours, [(line.median_s or 0) * 1e3 for line in ran])],
        [None if each is None else each * 1e3 for each in wanted],
    )
    peaks = [(line.peak_bytes or 0) / 1e6 for line in ran]
    memory = BarPanel("memory of a rank (MB)", [("", colours, peaks)])
    title = f"{suite.name}: {suite.note}" if suite.note else suite.name
    return draw_bars(file, [_label(line) for line in ran], (times, memory), title)


def wanted_s(ours: ResultLine, found: Sequence[ResultLine]) -> float | None:
    """Seconds that all bounds on the peers of a line of flowrun leave it; None without bounds."""
    limits = [
        line.median_s * line.at_most
        for line in found
        if (line.experiment, line.mode) == (ours.experiment, ours.mode)
        and line.median_s is not None
        and line.at_most is not None
    ]
    return min(limits, default=None)


def _label(line: ResultLine) -> str:
    """The experiment stands with flowrun's bar."""
    if line.side == FLOWRUN:
        mode = "" if line.mode == MODES[0] else f", {line.mode}"
        return f"{line.title}{mode}   flowrun"
    return f"{line.side}, {line.setting}" if line.setting else line.side
