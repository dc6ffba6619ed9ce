from typing import Any

import pytest

from flowrun.launcher.listeners.early_stopping import EarlyStopping


def asked(stopping: EarlyStopping, name: str, values: list[float]) -> list[int]:
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


def recipe(**train: Any) -> dict[str, Any]:
    keys = {"keep_best": "", "save_every": 0, **train}
    held = {"every": 0, "batches": 1, "fraction": 0.1}
    return {"task": {"metrics": {"accuracy": {}}}, "eval": held, "train": keys}


def test_what_can_never_stop_a_run_is_said_before_the_start() -> None:
    best = recipe(keep_best="loss", save_every=5)
    found = EarlyStopping("acc").check(best)
    assert found == {"metric": "acc is not a result of an evaluation: loss, accuracy."}
    assert [*EarlyStopping("-accuracy").check(recipe())] == ["eval.every"]
    assert [*EarlyStopping(patience=0).check(best)] == ["patience"]
    nothing = {**best, "eval": {"every": 1, "batches": 0, "fraction": 0.1}}
    assert [*EarlyStopping().check(nothing)] == ["eval.batches"]
    assert not EarlyStopping("accuracy").check(best)
