import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.record import Record
from flowrun.launcher.store.run_files import METRICS


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
