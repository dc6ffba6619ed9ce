"""Runs that are killed, with real processes: the last complete checkpoint goes on."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flowrun.launcher import weights
from flowrun.launcher.checkpoint import find_all
from support.command import Command, free_port, losses, run_folder, workplace

pytestmark = pytest.mark.processes

STEPS, EVERY = 40, 8
RUN = (
    "recipe=small",
    f"train.steps={STEPS}",
    f"train.save_every={EVERY}",
    "train.keep=0",
    "eval.batches=0",
    "optim=adamw",
)


@dataclass(frozen=True)
class Place:
    """A working directory with two runs: `whole`, and `killed`, of which launcher and ranks were
    killed at once.
    """

    folder: Path

    @property
    def whole(self) -> Path:
        """That ended."""
        return self.folder / "whole"

    @property
    def killed(self) -> Path:
        """Some steps after its second checkpoint."""
        return self.folder / "killed"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Both have run."""
    place = Place(workplace(tmp_path_factory.mktemp("runs")))
    assert Command(place.folder, *RUN, run_folder(place.whole)).end().status == 0
    killed = Command(place.folder, *RUN, run_folder(place.killed))
    killed.until("step 16 ")
    assert killed.signal(signal.SIGKILL, group=True).status == -signal.SIGKILL
    return place


@pytest.fixture
def place(ran: Place, tmp_path: Path) -> Place:
    """A copy, to go on in."""
    shutil.copytree(ran.folder, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


def assert_went_on(place: Place) -> None:
    """As if it had not been killed, bit for bit."""
    assert losses(place.killed) == losses(place.whole)
    found, expected = weights.load(place.killed), weights.load(place.whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    every = list(range(EVERY, STEPS + 1, EVERY))
    assert [checkpoint.step for checkpoint in find_all(place.killed)] == every


def test_a_run_that_is_killed_leaves_what_was_complete(place: Place) -> None:
    saved = [checkpoint.step for checkpoint in find_all(place.killed)]
    assert saved[:2] == [EVERY, 2 * EVERY]
    assert saved[-1] < STEPS
    assert losses(place.killed)[: saved[-1]] == losses(place.whole)[: saved[-1]]
    assert not (place.killed / "report.json").exists()


def test_a_run_that_is_killed_goes_on(place: Place) -> None:
    ended = Command(place.folder, "resume", str(place.killed)).end()
    assert (ended.status, ended.err) == (0, "")
    assert_went_on(place)


def test_two_hosts_with_one_disk_go_on(place: Place) -> None:
    first = find_all(place.killed)[-1].step
    meet = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    hosts = [Command(place.folder, "resume", str(place.killed), *meet) for _ in range(2)]
    assert [(ended.status, ended.err) for ended in map(Command.end, hosts)] == [(0, "")] * 2
    assert_went_on(place)
    assert losses(place.killed / "host1") == losses(place.killed)[first:]
