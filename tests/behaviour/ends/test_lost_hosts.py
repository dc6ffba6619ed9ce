"""A host that is lost costs what was done since the newest checkpoint, and changes no bit."""

import json
import signal
from pathlib import Path

import pytest

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


def test_hosts_that_are_left_go_on_in_another_layout(place: Path, tmp_path: Path) -> None:
    _, both = begin(place, tmp_path, "1:2")
    assert both[1].signal(signal.SIGKILL).status == -signal.SIGKILL
    ended = both[0].end()
    assert (ended.status, ended.err) == (0, "")
    first, reached = read_restart(tmp_path)
    assert 0 < first <= reached < first + 60 and first % 10 == 0
    assert f"1 host from step {first}" in ended.out
    assert losses(tmp_path) == pytest.approx(losses(place / "whole"), rel=1e-4)
