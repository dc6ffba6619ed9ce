"""Bars of several runs, a panel a quantity, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BarPanel:
    """A panel.  sides: (what a bar is, colour of each bar or of all, its values, one a run), one
    below the other in the row of their run.  marks: where a red line stands in a row; None: none.
    """

    title: str
    sides: Sequence[tuple[str, str | Sequence[str], Sequence[float]]]
    marks: Sequence[float | None] = ()


def draw_bars(
    file: Path, labels: Sequence[str], panels: Sequence[BarPanel], title: str = ""
) -> bool:
    """Draw a row of bars for each label.  Return False without a label, or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not labels:
        return False
    figure = Figure(figsize=(13, 1.4 + 0.4 * len(labels)), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), sharey=True), strict=True):
        height = 0.8 / len(panel.sides)
        for k, (side, colour, values) in enumerate(panel.sides):
            at = [row - 0.4 + (k + 0.5) * height for row in range(len(labels))]
            axes.barh(at, values, height, label=side, color=colour)
        for row, mark in enumerate(panel.marks):
            if mark is not None:
                axes.vlines(mark, row - 0.45, row + 0.45, colors="#c0392b", linewidths=2)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        if len(panel.sides) > 1:
            axes.legend(fontsize=8)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=110)
    return True
