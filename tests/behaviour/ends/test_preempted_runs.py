"""A run that is asked to end finishes its step and saves; the same command goes on from there."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_all
from support.runs.command import Command, losses, run_folder

pytestmark = pytest.mark.processes

RUN = ("recipe=small", "train.steps=200", "train.resume=auto", "+data.fail=preempt once")
ENDLESS = ("recipe=small", "train.steps=1000000")


@pytest.mark.parametrize("launch", ["local", pytest.param("virtual", marks=pytest.mark.thorough)])
def test_a_run_that_is_preempted_goes_on_by_the_same_command(place: Path, launch: str) -> None:
    whole, folder = place / "whole", place / "out"
    command = (*RUN, f"launch={launch}")
    ended = Command(place, *command, run_folder(folder)).end()
    assert (ended.status, ended.err) == (75, "stopped by SIGTERM\n")
    assert "SIGTERM: the step under way is finished and saved; a second one" in ended.out
    (saved,) = find_all(folder)
    about = json.loads((folder / "ended.json").read_text())
    assert (about["status"], about["why"], about["step"]) == ("preempted", "SIGTERM", saved.step)
    assert f"preempted after step {saved.step} of 200 by SIGTERM" in ended.out
    before = losses(folder)
    assert len(before) == saved.step

    again = Command(place, *command, run_folder(folder)).end()
    assert (again.status, again.err) == (0, "")
    assert Command(place, *command, run_folder(whole)).end().status == 0
    assert losses(folder) == losses(whole)
    assert losses(whole)[: saved.step] == before
    found, expected = weights.load(folder), weights.load(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not (folder / "ended.json").exists()

    complete = Command(place, *command, run_folder(folder)).end()
    assert (complete.status, complete.err) == (0, "")
    assert "is complete: 200 steps are done" in complete.out
    other = Command(place, *command, "train.seed=1", "train.steps=201", run_folder(folder)).end()
    assert other.status == 2
    assert "train.seed was 0." in other.err


def test_ctrl_c_saves_and_a_checkpoint_can_be_asked_for(place: Path) -> None:
    folder = place / "out"
    run = Command(place, *ENDLESS, run_folder(folder))
    run.until("step 0")
    run.send(signal.SIGUSR1)
    run.until("a checkpoint is written after the step under way")
    deadline = time.monotonic() + 20
    while not (first := find_all(folder)):
        assert time.monotonic() < deadline, run.printed
        time.sleep(0.01)
    ended = run.signal(signal.SIGINT, group=True)  # as a terminal sends it
    assert (ended.status, ended.err) == (130, "stopped\n")
    assert find_all(folder)[-1].step == len(losses(folder)) > first[0].step


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_a_signal_that_comes_again_ends_a_run_at_once(place: Path, number: int) -> None:
    run = Command(place, *ENDLESS, "+data.fail=sleep")
    run.until("asleep")
    run.send(number)
    run.until("a second one ends at once")
    time.sleep(1.2)  # within a second it counts as one
    ended = run.signal(number)
    told = "the launcher\n  stopped by SIGTERM.\n" if number == signal.SIGTERM else "stopped\n"
    assert (ended.status, ended.err) == (1 if number == signal.SIGTERM else 130, told)


def test_a_step_that_does_not_end_is_not_waited_for_longer_than_the_grace_time(place: Path) -> None:
    folder = place / "out"
    run = Command(place, *ENDLESS, "+data.fail=sleep", "launch.grace_s=1", run_folder(folder))
    run.until("asleep")
    ended = run.signal(signal.SIGTERM)
    assert ended.status == 1
    assert "the step under way was not finished and saved within 1 s." in ended.err
