"""A host that is lost costs what was done since the newest checkpoint, and changes no bit; with a
common folder, a store, or nothing in common.
"""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from chaos.first_host import NOTHING, SHARED, STORE, WELL, kill_first, main, undisturbed

from flowrun.launcher.store.checkpoint import find_all
from support.checks.thorough import few
from support.runs.command import Command, free_port, losses, run_folder, workplace

pytestmark = pytest.mark.processes

RUN = (
    *("recipe=small", "train.steps=150", "optim=adamw"),
    *("train.batch_size=32", "train.log_every=30", "train.save_every=10"),
)
WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe `small`, and a run in it that nothing has disturbed."""
    found = workplace(tmp_path_factory.mktemp("lost"))
    undisturbed = (*RUN, "launch.transport=gloo", run_folder(found / "whole"))
    assert Command(found, *undisturbed).end().status == 0
    return found


def begin(place: Path, folder: Path, nodes: str) -> tuple[list[str], list[Command]]:
    """Start two hosts; return the command of each, and both once they train."""
    meet = (f"launch.nnodes={nodes}", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    command = [*RUN, *meet, "launch.restarts=1", run_folder(folder)]
    first = Command(place, *command)
    first.until("waiting for")
    both = [first, Command(place, *command)]
    for host in both:
        host.until("step 30/150")
    return command, both


def read_restart(folder: Path) -> tuple[int, int]:
    """The step that was gone back to, and the one that was reached; far from the beginning."""
    (line,) = (folder / "restarts.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["problem"].startswith("its launcher has ended")
    return found["first"], found["reached"]


@pytest.mark.parametrize(
    "who",
    [0, pytest.param(1, marks=pytest.mark.thorough)],
    ids=["the endpoint's host", "another host"],
)
def test_a_host_that_comes_again_changes_no_bit(place: Path, who: int, tmp_path: Path) -> None:
    command, both = begin(place, tmp_path, "2:2")
    assert both[who].signal(signal.SIGKILL).status == -signal.SIGKILL
    left = both[1 - who]
    left.until("its launcher has ended")
    for host in (left, Command(place, *command)):
        ended = host.end()
        assert (ended.status, ended.err) == (0, "")
    first, reached = read_restart(tmp_path)
    assert 0 < first <= reached < first + 60 and first % 10 == 0
    assert losses(tmp_path) == losses(place / "whole")
    assert (tmp_path / WEIGHTS).read_bytes() == (place / "whole" / WEIGHTS).read_bytes()


@pytest.mark.thorough
def test_hosts_that_are_left_go_on_in_another_layout(place: Path, tmp_path: Path) -> None:
    _, both = begin(place, tmp_path, "1:2")
    assert both[1].signal(signal.SIGKILL).status == -signal.SIGKILL
    ended = both[0].end()
    assert (ended.status, ended.err) == (0, "")
    first, reached = read_restart(tmp_path)
    assert 0 < first <= reached < first + 60 and first % 10 == 0
    assert f"1 host from step {first}" in ended.out
    assert losses(tmp_path) == pytest.approx(losses(place / "whole"), rel=1e-4)


@pytest.mark.parametrize("shares", few([SHARED, STORE, NOTHING], [STORE]))
def test_the_first_host_is_killed_and_the_other_continues(tmp_path: Path, shares: str) -> None:
    place, step = undisturbed(tmp_path), random.Random(shares).randrange(0, 100, 5)
    kill = kill_first(place, "run", shares, 0.0, step)
    assert kill.outcome == WELL, kill


@pytest.mark.thorough
def test_the_first_host_is_killed_eight_times() -> None:
    """30 take longer than a test may: python tests/chaos/first_host.py 30."""
    assert main(8) == 0


APART = ("train.steps=60", "train.log_every=10", "train.save_every=4", "launch.nnodes=1:2")


def come_and_go(place: Path, shares: str) -> Path:
    """Two hosts train, the second is killed, the first continues, and it returns; return the
    folder of the first.
    """
    here, meet = place / shares, f"launch.rdzv_endpoint=127.0.0.1:{free_port()}"
    store = [f"train.store='file://{here}/store'"] if shares == STORE else []

    def host(name: str) -> Command:
        home = here / f"home_{name}"
        home.mkdir(parents=True, exist_ok=True)
        own = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
        folder = run_folder(here / ("run" if shares == SHARED else name))
        return Command(place, *RUN, *APART, meet, *store, folder, variables=own)

    first = host("a")
    first.until("waiting for")
    second = host("b")
    for each in (first, second):
        each.until("step 10/")
    assert second.signal(signal.SIGKILL).status == -signal.SIGKILL
    os.mkfifo(place / "hold")
    first.until("1 host from step")
    third = host("b")
    third.until("waiting for hosts that finish their step")  # its ranks wait for samples
    with open(place / "hold", "w"):
        os.unlink(place / "hold")
        for each in (first, third):
            ended = each.end()
            assert (ended.status, ended.err) == (0, "")
    assert ("host 0 collects" in first.printed) == (shares == NOTHING)
    return here / ("run" if shares == SHARED else "a")


@pytest.mark.thorough
def test_hosts_without_a_common_folder_have_the_losses_of_those_with_one(place: Path) -> None:
    runs = {shares: come_and_go(place, shares) for shares in (SHARED, STORE, NOTHING)}
    for run in runs.values():
        assert losses(run) == pytest.approx(losses(runs[SHARED]), rel=1e-4)
        assert (run / WEIGHTS).exists()
    copies = find_all(place / NOTHING / "b")
    assert copies and all(not copy.damage() for copy in copies)
