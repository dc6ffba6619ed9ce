"""The record of a run whose folder, or whose curves, cannot be written any more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.job.job import Job
from flowrun.launcher.listeners.make import NamedListener
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.record import METRICS, Record


@cache
def job() -> Job:
    return Job(load(["recipe=mlp_data_parallel", "launch=virtual"]), values=False)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    """The record of a run that has done a step."""
    found = Record(tmp_path / "run", job(), None)
    found.begin()
    found.step(0, {"loss": 1.0}, 0.1)
    yield found
    found.close()


def test_a_folder_that_was_removed_is_told_at_the_next_step(record: Record) -> None:
    shutil.rmtree(record.folder)
    with pytest.raises(RunError, match="the folder of the run was removed while the run") as told:
        record.step(1, {"loss": 1.0}, 0.1)
    assert told.value.where == str(record.folder)
    assert not record.folder.exists()


def test_metrics_that_were_removed_are_told(record: Record) -> None:
    (record.folder / METRICS).unlink()
    with pytest.raises(RunError, match=f"{METRICS} was removed"):
        record.step(1, {"loss": 1.0}, 0.1)


def test_curves_that_cannot_be_written_do_not_end_the_training(tmp_path: Path) -> None:
    class Broken:
        def on_step(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError(28, "No space left on device")

    listener = NamedListener("tensorboard", Broken(), may_end=False)
    record = Record(tmp_path / "run", job(), None, [listener])
    record.begin()
    for step in range(3):
        record.step(step, {"loss": 1.0}, 0.1)
    record.end_listeners()
    record.close()
    assert record.lost == [
        "the log of tensorboard ends at step 0: OSError: [Errno 28] No space left on device"
    ]
    assert len((record.folder / METRICS).read_text().splitlines()) == 3
