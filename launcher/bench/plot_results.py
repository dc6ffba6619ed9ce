"""Lines -> bars: step time and memory of flowrun and its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowrun.launcher.bench.results import ResultLine
from flowrun.launcher.bench.runs import FLOWRUN
from flowrun.launcher.bench.suite import MODES, Suite

if TYPE_CHECKING:  # of the extra `plot`
    from matplotlib.axes import Axes

OURS, THEIRS, BOUND = "#3b6ea5", "#b9bec6", "#c0392b"


def draw(suite: Suite, found: Sequence[ResultLine], file: Path) -> bool:
    """Draw a bar for each line of `found` to `file`, and a mark on flowrun's bar where the bounds
    of the suite want it to end.

    Return False if nothing ran, or if matplotlib (extra `plot`) is not installed.
    """
    drawn = [line for line in found if line.median_s is not None]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not drawn:
        return False
    places = _places(drawn)
    figure = Figure(figsize=(12, 1.2 + 0.3 * (places[-1] + 1)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    colours = [OURS if line.side == FLOWRUN else THEIRS for line in drawn]
    times.barh(places, [(line.median_s or 0) * 1e3 for line in drawn], 0.8, color=colours)
    _mark_times(times, drawn, places)
    memory.barh(places, [(line.peak_bytes or 0) / 1e6 for line in drawn], 0.8, color=colours)
    times.set_title("step time (ms): median; | fastest; red: the bound", fontsize=10)
    memory.set_title("memory of a rank (MB)", fontsize=10)
    times.set_yticks(places, [_label(line) for line in drawn], fontsize=8)
    times.invert_yaxis()
    for axes in (times, memory):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"{suite.name}: {suite.note}" if suite.note else suite.name, fontsize=11)
    figure.savefig(file)
    return True


def _mark_times(axes: Axes, drawn: Sequence[ResultLine], places: Sequence[float]) -> None:
    """Mark the fastest step of each line, and the bound of flowrun's."""
    for place, line in zip(places, drawn, strict=True):
        axes.plot([(line.min_s or 0) * 1e3], [place], "|", color="black", markersize=9)
        if line.side == FLOWRUN and (wanted := wanted_s(line, drawn)) is not None:
            axes.plot([wanted * 1e3] * 2, [place - 0.5, place + 0.5], color=BOUND, linewidth=2)


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


def _places(found: Sequence[ResultLine]) -> list[float]:
    """Place the bars, with a gap before each experiment but the first."""
    places, gap = [], 0.0
    for k, line in enumerate(found):
        before = found[k - 1] if k else line
        gap += 0.7 if (before.experiment, before.mode) != (line.experiment, line.mode) else 0.0
        places.append(k + gap)
    return places


def _label(line: ResultLine) -> str:
    """The experiment stands with flowrun's bar."""
    mode = "" if line.mode == MODES[0] else f", {line.mode}"
    if line.side == FLOWRUN:
        return f"{line.title}{mode}   flowrun"
    return f"{line.side}, {line.setting}" if line.setting else line.side
