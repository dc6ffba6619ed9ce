"""A callback ends a run in order: with its checkpoint, its weights and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.recipe.compose import change, load
from flowrun.launcher.report.report import Report
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import find_all
from support.runs.command import Command, losses, run_folder, workplace

CALLBACK = """
class StopAt:
    def __init__(self, step):
        self.step = step

    def on_step(self, step, values):
        return "stop" if step == self.step else None
"""
STOPS = "callbacks=[{_target_: stops.StopAt, step: 2}]"
LONG = ("recipe=small", "train.steps=2000", STOPS)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stops.py").write_text(CALLBACK)
    return tmp_path


def check(folder: Path) -> Report:
    """The folder is that of a complete run of a few steps."""
    report = Report.from_json((folder / "report.json").read_text())
    assert report.ended_by == "StopAt" and 3 <= report.steps < 2000
    [checkpoint] = find_all(folder)
    assert checkpoint.step == report.steps == len(losses(folder))
    assert (folder / "weights.safetensors").stat().st_size > 0
    assert not (folder / "ended.json").exists()
    return report


def test_the_virtual_cluster_ends_and_the_same_command_finds_it_complete(place: Path) -> None:
    recipe = load([*LONG, "launch=virtual", "train.resume=auto"])
    report = run(recipe, place / "out")
    assert report.ended_by == "StopAt" and report.steps == check(place / "out").steps
    assert run(recipe, place / "out").steps == report.steps


@pytest.mark.processes
def test_processes_end_well_and_a_person_reads_why(place: Path) -> None:
    ended = Command(place, *LONG, run_folder(place / "out")).end()
    assert (ended.status, ended.err) == (0, "")
    report = check(place / "out")
    assert "callback StopAt ends the run after the step under way" in ended.out
    assert f"StopAt ended the run after {report.steps} of 2000 steps" in ended.out


def test_a_callback_that_fails_ends_the_run_with_its_name(place: Path) -> None:
    from flowrun.engine.errors import RunError

    (place / "fails.py").write_text("class Fails:\n    def on_start(self, run):\n        1 / 0\n")
    wrong = "callbacks=[{_target_: fails.Fails}]"
    with pytest.raises(RunError, match="division by zero") as error:
        run(load(["recipe=small", "launch=virtual", wrong]), place / "out")
    assert error.value.where == "callback Fails, on_start at step 0"
    assert json.loads((place / "out" / "ended.json").read_text())["status"] == "failed"


def test_epochs_are_counted_in_steps(place: Path) -> None:
    recipe = with_steps(load(["recipe=small", "train.epochs=1.5"]))
    assert recipe.train.steps == 9  # 48 of 64 samples are trained on, 8 a step
    assert with_steps(recipe) == recipe
    assert change(recipe, ["placement.axes.tensor=1"]).train.steps == 9
