"""Lines of metrics.jsonl, read again: by reports, by who follows a run, and by a run that continues
after them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import DAMAGED, open_more, replace_text
from flowrun.launcher.recipe.locate import show_path
from flowrun.launcher.recipe.recipe_errors import PlacedError


@dataclass(frozen=True, kw_only=True)
class MetricLine:
    """A step, or an evaluation after one.

    loss: of the step; None: not finite, left out, or this is an evaluation.
    tokens_per_s: of the step.
    validation: the metrics of an evaluation, of which None is not finite; None: this is a step.
    """

    step: int
    loss: float | None = None
    tokens_per_s: float = 0.0
    validation: Mapping[str, float | None] | None = None


def parse_metric_line(line: str) -> MetricLine | None:
    """Return what a line says; None for one that is cut off, or is no such line."""
    with suppress(*DAMAGED):
        found = json.loads(line)
        if "validation" in found:
            metrics = found["validation"].items()
            validation = {name: _to_float(value) for name, value in metrics}
            return MetricLine(step=int(found["step"]), validation=validation)
        return MetricLine(
            step=int(found["step"]),
            loss=_to_float(found.get("loss")),
            tokens_per_s=float(found.get("tokens_per_s") or 0.0),
        )
    return None


def numbers_of(line: Mapping[str, object]) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a step by their tags, or those of an evaluation, as validation/NAME."""
    validation = line.get("validation")
    found, prefix = (validation, "validation/") if isinstance(validation, dict) else (line, "")
    for name, value in found.items():
        if name != "step" and isinstance(value, int | float | None):
            yield f"{prefix}{name}", value


def read_lines(file: Path, at: int) -> tuple[list[str], int]:
    """Return the whole lines of a file that grows, if it is there, and the byte after them.

    at: the byte where they begin, at most the end of the file; below 0, counted from its end: the
    first line may then be cut off.  It stays where the file cannot be read now.
    """
    with suppress(OSError), file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        begun = stream.seek(min(at, size) if at >= 0 else max(0, size + at))
        whole, newline, _ = stream.read().rpartition(b"\n")
        return whole.decode("utf-8", "replace").splitlines(), begun + len(whole) + len(newline)
    return [], at if os.path.exists(file) else 0


def read_losses(metrics: Path) -> Mapping[str, Sequence[tuple[int, float]]]:
    """Return the losses of a run, each with its step: `loss` of training, `validation` of held-out
    samples.  Lines that are cut off, and losses that are not finite, are left out.
    """
    found: dict[str, list[tuple[int, float]]] = {"loss": [], "validation": []}
    for line in filter(None, map(parse_metric_line, read_lines(metrics, 0)[0])):
        if line.validation is None and line.loss is not None:
            found["loss"].append((line.step, line.loss))
        elif line.validation and (loss := line.validation.get("loss")) is not None:
            found["validation"].append((line.step, loss))
    return found


def open_metrics(file: Path, first: int, ended: bool) -> TextIO:
    """Open metrics.jsonl for more lines, without those of steps that will be done again.

    file, first, ended: as list_lines_before takes them.
    """
    replace_text(file, "".join(f"{line}\n" for line in list_lines_before(file, first, ended)))
    return open(open_more(file), "a", encoding="utf-8")


def list_lines_before(file: Path, first: int, ended: bool = True) -> list[str]:
    """Return the lines of the steps before `first`.

    file: metrics.jsonl; its last line may be cut off, as it was being written when the run was
    killed.  first: the step that comes next.  ended: False leaves out the evaluation after the step
    before.  Raises RecipeError for any other line that is none of ours.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if first and file.exists() else []
    except (OSError, ValueError) as error:
        raise _refuse(file, f"it cannot be read: {type(error).__name__}: {error}.") from None
    kept = []
    for number, line in enumerate(lines, 1):
        if (found := parse_metric_line(line)) is None:
            if number < len(lines):
                raise _refuse(file, f"line {number} is not a JSON object with a step.")
        elif found.step + (found.validation is not None and not ended) < first:
            kept.append(line)
    return kept


def _refuse(file: Path, why: str) -> RecipeError:
    return PlacedError(show_path(file), "", why, "Move the file away, or mend it.")


def _to_float(value: float | None) -> float | None:
    return None if value is None else float(value)
