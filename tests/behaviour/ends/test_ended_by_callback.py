"""A callback ends a run in order: with its checkpoint, its weights and its report."""

import json
from pathlib import Path

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.listeners import dispatch
from flowrun.launcher.recipe.compose import change, load
from flowrun.launcher.report.report import Report
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import find_all
from support.runs.command import Command, losses, run_folder

CALLBACK = """
class StopAt:
    def __init__(self, step):
        self.step = step

    def on_step(self, step, values):
        return "stop" if step == self.step else None
"""
STOPS = "callbacks=[{_target_: stops.StopAt, step: 2}]"
LONG = ("recipe=small", "train.steps=2000", STOPS)


@pytest.fixture(autouse=True)
def stops(workplace: Path) -> None:
    (workplace / "stops.py").write_text(CALLBACK)
    (workplace / "faults.py").write_text(FAULTS)


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


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_end_well_and_a_person_reads_why(place: Path) -> None:
    ended = Command(place, *LONG, run_folder(place / "out")).end()
    assert (ended.status, ended.err) == (0, "")
    report = check(place / "out")
    assert "callback StopAt ends the run after the step under way" in ended.out
    assert f"StopAt ended the run after {report.steps} of 2000 steps" in ended.out


FAULTS = """
import threading


class Fails:
    def on_start(self, run):
        1 / 0


class Leaves:
    def on_step(self, step, values):
        raise SystemExit


class Blocks:
    def on_step(self, step, values):
        threading.Event().wait()


class Gone:
    def on_start(self, run):
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("name", "where", "problem"),
    [
        ("Fails", "callback Fails, on_start at step 0", "ZeroDivisionError: division by zero"),
        ("Leaves", "callback Leaves, on_step at step 0", "SystemExit: "),
        ("Blocks", "callback Blocks, on_step at step 0", "it has not returned for 1 s."),
    ],
)
def test_a_callback_that_fails_ends_the_run_with_its_name(
    place: Path, name: str, where: str, problem: str
) -> None:
    wrong = f"callbacks=[{{_target_: faults.{name}}}]"
    recipe = load(["recipe=small", "launch=virtual", "launch.hang_s=1", wrong])
    with pytest.raises(RunError) as error:
        run(recipe, place / "out")
    assert (error.value.where, error.value.problem) == (where, problem)
    assert json.loads((place / "out" / "ended.json").read_text())["status"] == "failed"


def test_a_tracker_that_is_gone_costs_a_note_and_no_checkpoint(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_END_S", 0.1)
    gone = "log=[{_target_: faults.Gone}]"
    saves = ("train.steps=12", "train.save_every=4", "train.keep=0")
    report = run(load(["recipe=small", "launch=virtual", gone, *saves]), place / "out")
    expected = ["the log of Gone ends at step 12: on_start has not returned for 0 s"]
    assert [note for note in report.notes if "Gone" in note] == expected
    assert [each.step for each in find_all(place / "out")] == [4, 8, 12]
    assert not any(each.damage() for each in find_all(place / "out"))


def test_epochs_are_counted_in_steps(place: Path) -> None:
    recipe = with_steps(load(["recipe=small", "train.epochs=1.5"]))
    assert recipe.train.steps == 9  # 48 of 64 samples are trained on, 8 a step
    assert with_steps(recipe) == recipe
    assert change(recipe, ["placement.axes.tensor=1"]).train.steps == 9
