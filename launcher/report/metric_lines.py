"""A line of metrics.jsonl, read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MetricLine:
    """A step, or an evaluation after one.

    loss: of the step; None: it is not finite, or this is an evaluation.  tokens_per_s: of the step.
    validation: the metrics of an evaluation, of which None is not finite; None: this is a step.
    """

    step: int
    loss: float | None = None
    tokens_per_s: float = 0.0
    validation: Mapping[str, float | None] | None = None


def parse_metric_line(line: str) -> MetricLine | None:
    """Return what a line says; None for one that is cut off, or is no such line."""
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        if "validation" in found:
            metrics = found["validation"].items()
            validation = {name: _to_float(value) for name, value in metrics}
            return MetricLine(step=int(found["step"]), validation=validation)
        return MetricLine(
            step=int(found["step"]),
            loss=_to_float(found["loss"]),
            tokens_per_s=float(found.get("tokens_per_s") or 0.0),
        )
    return None


def _to_float(value: float | None) -> float | None:
    return None if value is None else float(value)
