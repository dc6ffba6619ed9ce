import os
import signal
import time

import pytest

from flowrun.launcher.supervise.hands.local_ranks import RankProcesses
from flowrun.launcher.supervise.hosts.endpoint import LOOPBACK, MeetingPlace

PLACE = MeetingPlace(number=1, num_hosts=2, address=LOOPBACK, port=1, interface="")
pytestmark = pytest.mark.processes


def live(variables: dict[str, str]) -> None:
    """Rank 2 ends well; rank 3 as it is asked to."""
    if variables["RANK"] == "2":
        assert variables["WORLD_SIZE"] == "4" and variables["GROUP_RANK"] == "1"
        return
    signal.pause()


def wait(ranks: RankProcesses) -> list[tuple[int, str]]:
    """Wait until all have gone; return who ended badly, and how."""
    died, until = [], time.monotonic() + 30
    while not ranks.are_gone:
        assert time.monotonic() < until
        died += list(ranks.poll())
    return died


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2, signal.SIGSTOP])
def test_a_rank_that_dies_is_named_and_one_that_is_stopped_is_killed(number: int) -> None:
    ranks = RankProcesses(first=2)
    ranks.fork(live, PLACE, count=2, threads=1)
    os.kill(ranks._processes[1].pid or 0, number)
    if number == signal.SIGSTOP:
        ranks.kill()
    (rank, how) = wait(ranks)[0]
    assert rank == 3
    name = signal.Signals(signal.SIGKILL if number == signal.SIGSTOP else number).name
    assert f"was killed by {name}" in how
