"""EarlyStopping asks to stop when evaluations get no better."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowrun.models.callbacks import EarlyStopping


def asked(stopping: EarlyStopping, name: str, values: list[float]) -> list[int]:
    """Evaluations at which it asks."""
    found = [stopping.on_evaluation(k, {name: value}) for k, value in enumerate(values)]
    return [k for k, answer in enumerate(found) if answer == "stop"]


@pytest.mark.parametrize(
    ("stopping", "values", "stops"),
    [
        (EarlyStopping(patience=2), [3.0, 2.0, 2.5, 1.5, 1.6, 1.5, 1.0], [5]),
        (EarlyStopping("-loss", patience=1), [0.2, 0.4, 0.3], [2]),
        (EarlyStopping(patience=1, least=0.5), [3.0, 2.6, 2.0], [1]),
        (EarlyStopping(patience=1), [1.0, float("nan")], [1]),
    ],
    ids=["patience", "highest", "least", "nan"],
)
def test_it_stops_when_patience_ends(
    stopping: EarlyStopping, values: list[float], stops: list[int]
) -> None:
    assert asked(stopping, "loss", values) == stops


def run(**train: Any) -> SimpleNamespace:
    keys = {"keep_best": "", "save_every": 0, **train}
    task = {"metrics": {"accuracy": {}}}
    return SimpleNamespace(recipe={"task": task, "eval": {"every": 0}, "train": keys})


def test_a_metric_that_is_never_evaluated_is_said_at_the_start() -> None:
    with pytest.raises(ValueError, match="'acc' is no result of an evaluation: loss, accuracy"):
        EarlyStopping("acc").on_start(run())
    with pytest.raises(ValueError, match=r"set eval\.every"):
        EarlyStopping("-accuracy").on_start(run())
    EarlyStopping("accuracy").on_start(run(keep_best="loss", save_every=5))
