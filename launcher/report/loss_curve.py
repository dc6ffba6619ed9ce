"""The curve of the loss: read from metrics.jsonl, drawn as loss.svg in the run's folder, or as
text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

from flowrun.launcher.report.metric_lines import parse_metric_line
from flowrun.launcher.store.checkpoint import replace_text

NAME = "loss.svg"
_POINTS = 600  # of a drawn line; each is a mean
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 380, 64, 20, 44, 46
_LOG_FROM = 10.0  # ratio of the ends from which the axis is logarithmic
_TRAINING, _VALIDATION, _INK, _GRID = "#2563eb", "#d97706", "#374151", "#e5e7eb"
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'

Point = tuple[float, float]  # step, loss


@dataclass(frozen=True)
class LossCurve:
    """The losses of a run by step: of training, and of the held-out samples."""

    training: Sequence[Point]
    validation: Sequence[Point]

    @property
    def best(self) -> Point | None:
        """The lowest loss of training."""
        return min(self.training, key=lambda point: point[1], default=None)

    @property
    def best_validation(self) -> Point | None:
        """The lowest loss of an evaluation."""
        return min(self.validation, key=lambda point: point[1], default=None)


def read_curve(metrics: Path) -> LossCurve:
    """Read metrics.jsonl; lines that are cut off, and losses that are no number, are left out."""
    training: list[Point] = []
    validation: list[Point] = []
    with suppress(OSError):
        text = metrics.read_text(encoding="utf-8", errors="replace")
        for line in filter(None, map(parse_metric_line, text.splitlines())):
            evaluated = line.validation is not None
            loss = line.validation.get("loss") if line.validation is not None else line.loss
            if loss is not None:
                (validation if evaluated else training).append((line.step, loss))
    return LossCurve(training, validation)


def write_curve(folder: Path, title: str) -> None:
    """Draw the curve of a run's folder; nothing of a run without steps."""
    curve = read_curve(folder / "metrics.jsonl")
    if curve.training:
        replace_text(folder / NAME, draw(curve, title))


def average(points: Sequence[Point], count: int = _POINTS) -> list[Point]:
    """Return at most `count` points, each the mean of as many that follow each other."""
    size = math.ceil(len(points) / count) or 1
    parts = (points[k : k + size] for k in range(0, len(points), size))
    return [(fmean(s for s, _ in part), fmean(v for _, v in part)) for part in parts]


@dataclass(frozen=True)
class PlotAxis:
    """Values from low to high, evenly or by their logarithm."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values that are labelled: 1, 2 or 5 of a power of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            inside = [v for v in every if self.low <= v <= self.high]
            tens = [v for v in inside if f"{v:e}".startswith("1")]
            return tens if len(inside) > 8 and len(tens) > 1 else inside
        rough = (self.high - self.low) / 7
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def loss_axis(losses: Sequence[float]) -> PlotAxis:
    """Return the axis of losses, logarithmic where they span a factor of ten."""
    low, high = min(losses), max(losses)
    if low > 0 and high / low >= _LOG_FROM:
        return PlotAxis(low, high, log=True)
    room = 0.05 * (high - low) or abs(low) * 0.1 or 1.0
    return PlotAxis(low - room, high + room)


def draw(curve: LossCurve, title: str) -> str:
    """Return the curve as SVG."""
    training, validation = average(curve.training), average(curve.validation)
    every = [*training, *validation]
    loss = loss_axis([value for _, value in every])
    first, last = min(s for s, _ in every), max(s for s, _ in every)
    steps = PlotAxis(first, max(last, first + 1))

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + steps.share(point[0]) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - loss.share(point[1]) * (_HEIGHT - _TOP - _BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" {_FONT} fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        *_draw_axes(steps, loss, place),
        _draw_line([place(p) for p in training], _TRAINING),
    ]
    if validation:
        places = [place(p) for p in validation]
        lines.append(_draw_line(places, _VALIDATION))
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_VALIDATION}"/>' for x, y in places
        ]
    named = [("training", _TRAINING), ("validation", _VALIDATION)][: 1 + bool(validation)]
    for k, (name, colour) in enumerate(reversed(named)):
        x = _WIDTH - _RIGHT - 90 * (k + 1)
        lines.append(f'<rect x="{x}" y="15" width="14" height="4" fill="{colour}"/>')
        lines.append(f'<text x="{x + 20}" y="21">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _draw_line(places: Sequence[tuple[float, float]], colour: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shape = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"'
    return f'<polyline points="{points}" {shape}/>'


def _draw_axes(steps: PlotAxis, loss: PlotAxis, place: object) -> Iterator[str]:
    """Yield grid lines with their labels."""
    assert callable(place)
    for value in loss.ticks():
        _, y = place((steps.low, value))
        yield f'<path d="M{_LEFT},{y:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    bottom = _HEIGHT - _BOTTOM
    for value in filter(float.is_integer, steps.ticks()):
        x, _ = place((value, loss.low))
        yield f'<path d="M{x:.1f},{bottom}v5" stroke="{_INK}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{value:,.0f}</text>'
    yield f'<path d="M{_LEFT},{bottom}H{_WIDTH - _RIGHT}" stroke="{_INK}"/>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>'
    scale = "loss, logarithmic" if loss.log else "loss"
    yield f'<text x="{_LEFT}" y="{_TOP - 6}" fill="#6b7280">{scale}</text>'


def plot_text(curves: Sequence[Sequence[Point]], width: int, height: int = 12) -> list[str]:
    """Return lines of text with a mark for each curve: ● for the first, ○ for the second.

    curves: each of at least one point.  width: of a line, with the labels.  height: of the plot.
    """
    columns = width - 11
    last = max(step for curve in curves for step, _ in curve)
    steps = PlotAxis(0.0, max(last, 1.0))
    drawn: list[dict[int, list[float]]] = [{} for _ in curves]  # by column
    for found, curve in zip(drawn, curves, strict=True):
        for step, value in curve:
            found.setdefault(round(steps.share(step) * (columns - 1)), []).append(value)
    means = [{x: fmean(values) for x, values in found.items()} for found in drawn]
    loss = loss_axis([value for found in means for value in found.values()])
    cells: dict[tuple[int, int], str] = {}
    for found_means, mark in reversed(list(zip(means, "●○", strict=False))):
        for x, value in found_means.items():
            cells[round((1 - loss.share(value)) * (height - 1)), x] = mark
    labels = {0: loss.high, height // 2: None, height - 1: loss.low}
    lines = []
    for row in range(height):
        label = labels.get(row)
        text = f"{label:>8.4g}" if label is not None else " " * 8
        lines.append(
            f"{text} │{''.join(cells.get((row, x), ' ') for x in range(columns))}".rstrip()
        )
    lines.append(f"{' ' * 8} └{'─' * columns}")
    end = f"step {last:,.0f}"
    lines.append(f"{' ' * 10}0{end:>{columns - 1}}")
    return lines
