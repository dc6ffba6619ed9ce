"""run_view: the folder of a run -> what a page shows of it.  Nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.commands.run_folders.list_runs import show_loss
from flowrun.launcher.commands.run_folders.run_summary import read_keys, summarize
from flowrun.launcher.page.page_data import CurveView, Figure, RunView
from flowrun.launcher.page.trace_view import trace_view
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.report.metric_lines import numbers_of, read_lines
from flowrun.launcher.report.progress import compare_figures
from flowrun.launcher.report.report import Report
from flowrun.launcher.store.run_files import ENVIRONMENT, METRICS, REPORT, RESTARTS, SAMPLES

MOST_POINTS = 2000  # of a curve
JsonLine = Mapping[str, object]


def run_view(folder: Path) -> RunView:
    """Read a run.  Raises RecipeError where the folder is none of a run."""
    keys, run = read_keys(folder), summarize(folder)
    report = None
    with suppress(OSError, *DAMAGED):  # a run that has not ended has none
        report = Report.from_json((folder / REPORT).read_text(encoding="utf-8"))
    environment = next(_lines(folder / ENVIRONMENT), {})
    return RunView(
        folder=str(folder),
        name=run.name,
        status=run.status,
        figures=(
            Figure("status", "", run.status),
            Figure("steps", "", f"{run.done:,}" + (f" of {run.asked:,}" if run.asked else "")),
            Figure("last loss", "", show_loss(run.loss)),
            *(Figure(*row) for row in (compare_figures(report) if report else ())),
        ),
        curves=tuple(_curves(_lines(folder / METRICS), report)),
        restarts=tuple(map(_describe_restart, _lines(folder / RESTARTS))),
        notes=report.notes if report else (),
        keys={key: str(value) for key, value in flatten_keys(keys)},
        drawing=trace_view(folder),
        samples=tuple(
            (int(str(line["step"])), str(line["prompt"]), str(line["text"]))
            for line in _lines(folder / SAMPLES)
        ),
        environment={name: str(value) for name, value in environment.items()},
    )


def _lines(file: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file with one on each line; a line that is cut off is left out."""
    for line in read_lines(file, 0)[0]:
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                yield found


def _curves(lines: Iterable[JsonLine], report: Report | None) -> Iterator[CurveView]:
    """Yield a curve for each number of steps and of evaluations; elapsed_s: the seconds of all
    steps so far; foreseen/step_s of the plan.
    """
    found: dict[str, list[tuple[int, float | None]]] = {}
    for line in lines:
        step = int(str(line.get("step", 0)))
        for tag, value in numbers_of(line):
            found.setdefault(tag, []).append((step, value))
    seconds = [(step, value or 0.0) for step, value in found.get("step_s", [])]
    if seconds:
        steps, spent = zip(*seconds, strict=True)
        found["elapsed_s"] = [*zip(steps, accumulate(spent), strict=True)]
        if report:
            ends = steps[0], steps[-1]
            found["foreseen/step_s"] = [(step, report.foreseen["step_s"]) for step in ends]
    for tag, points in found.items():
        yield CurveView(tag, *zip(*_thin(points), strict=True))


def _thin(points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """Keep the lowest and the highest of each stretch of a long curve."""
    size = -(-2 * len(points) // MOST_POINTS)
    if len(points) <= MOST_POINTS:
        return list(points)
    kept: set[int] = set()
    for first in range(0, len(points), size):
        places = range(first, min(first + size, len(points)))
        known = [(value, k) for k in places if (value := points[k][1]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else {first}
    return [points[k] for k in sorted(kept)]


def _describe_restart(line: JsonLine) -> tuple[int, str]:
    """Return the step that was reached and what happened, by a line of restarts.jsonl."""
    said = {name: str(value) for name, value in line.items() if value is not None}
    problem = said.get("problem", "").partition("\n")[0].rstrip(".")
    again = f"Ranks began again at step {said.get('first', 0)}"
    again += f" from the {said['source']}" if "source" in said else ""
    again += f", {said['ranks']} of them, {said.get('layout', '')}" if "ranks" in said else ""
    text = f"step {said.get('reached', 0)}, {said.get('where', '')}: {problem}. {again}."
    return int(said.get("reached", 0)), text
