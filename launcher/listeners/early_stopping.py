"""A callback (docs/how_to/follow.md) that ends a run whose evaluations get no better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class EarlyStopping:
    """Ends a run whose evaluations get no better.

    metric: name of a validation result; the lowest is the best; -NAME: the highest.  patience:
    evaluations in a row that may be no better, 1 or more.  least: what counts as better, in units
    of metric.  A run that is resumed counts from zero.
    """

    def __init__(self, metric: str = "loss", patience: int = 3, least: float = 0.0) -> None:
        self.metric = metric.removeprefix("-")
        self.sign = -1 if metric.startswith("-") else 1
        self.patience, self.least = patience, least
        self.best, self.waited = math.inf, 0

    def check(self, recipe: Mapping[str, Any]) -> Mapping[str, str]:
        """Return what is wrong of a run with these keys, by argument or by key of the recipe."""
        wrong, known = {}, ["loss", *recipe["task"]["metrics"]]
        if self.metric not in known:
            wrong["metric"] = f"{self.metric} is not a result of an evaluation: {', '.join(known)}."
        if self.patience < 1:
            wrong["patience"] = f"{self.patience} is not 1 or more: no evaluation would be awaited."
        held, train = recipe["eval"], recipe["train"]
        if not (held["batches"] and held["fraction"]):
            wrong["eval.batches"] = "EarlyStopping compares evaluations; no samples are held out."
        if not held["every"] and not (train["keep_best"] and train["save_every"]):
            wrong["eval.every"] = "EarlyStopping needs evaluations before the end of the run."
        return wrong

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> str | None:
        """Compare an evaluation, after `step`, with the best so far."""
        value = self.sign * values[self.metric]
        if value < self.best - self.least:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return "stop" if self.waited >= self.patience else None
