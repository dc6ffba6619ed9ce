"""Runs whose samples are made by processes of their own: the numbers of any other run, in any
layout, and nobody is left when a run ends.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.runs.command import Command, losses, run_folder

pytestmark = pytest.mark.processes
WORKERS = "launch.data_workers=2"


def evaluations(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["validation"]["loss"] for line in lines if "validation" in line]


def test_losses_are_those_of_no_workers_and_so_they_are_in_another_layout(place: Path) -> None:
    run(load(["recipe=small", "launch=virtual", "eval.every=2", "train.steps=6"]), place / "plain")
    given = ["recipe=small", WORKERS, "eval.every=2", "train.save_every=3"]
    axes = ["placement.axes={data: 2, tensor: 1}"]
    first = Command(place, *given, "train.steps=3", *axes, run_folder(place / "out")).end()
    assert (first.status, first.err) == (0, "")
    stages = ["placement.axes={data: 1, tensor: 1}", "placement.stages=2", "train.steps=6"]
    again = Command(place, "resume", str(place / "out"), *stages).end()
    assert (again.status, again.err) == (0, "")
    assert evaluations(place / "out")[-2:] == pytest.approx(evaluations(place / "plain")[-2:])
    assert losses(place / "out") == pytest.approx(losses(place / "plain"), rel=1e-5)


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        ("raise", ["ValueError: sample 40 is not there", " of the data set", "in break_down:"]),
        pytest.param(
            "kill", ["rank 1, a data worker", "was killed by SIGKILL"], marks=pytest.mark.thorough
        ),
    ],
)
def test_what_a_worker_dies_of_ends_the_run(place: Path, fail: str, told: list[str]) -> None:
    given = ["recipe=small", WORKERS, f"+data.fail={fail}", "train.steps=40"]
    ended = Command(place, *given, run_folder(place / "out")).end()
    assert ended.status == 1
    assert all(words in ended.err for words in told), ended.err


@pytest.mark.parametrize("whom", ["rank", pytest.param("launcher", marks=pytest.mark.thorough)])
def test_workers_die_with_their_rank(place: Path, whom: str) -> None:
    command = Command(
        place, "recipe=small", WORKERS, "train.steps=100000", run_folder(place / "out")
    )
    command.until("step 0")
    launcher = psutil.Process(command.process.pid)
    ranks = [child for child in launcher.children() if len(child.children()) == 2]
    assert len(ranks) == 2
    (ranks[0] if whom == "rank" else launcher).send_signal(signal.SIGKILL)
    assert command.end(within=15).status in (1, -signal.SIGKILL)  # which sees that none is left
