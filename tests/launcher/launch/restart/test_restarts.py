"""When the launcher starts ranks again, how long it waits, and when it gives up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.errors import RunError
from flowrun.launcher.launch.collector import EventCollector
from flowrun.launcher.launch.hosts.alone import Alone
from flowrun.launcher.launch.restart.restarts import Attempts, Ending, find_newest_whole
from flowrun.launcher.store.checkpoint import Checkpoint

ENDINGS = st.tuples(st.sampled_from(Ending), st.integers(0, 5))


@given(st.integers(0, 4), st.lists(ENDINGS, max_size=30))
def test_a_run_ends_after_as_many_restarts_without_a_new_step(
    limit: int, endings: list[tuple[Ending, int]]
) -> None:
    attempts: Attempts | None = Attempts(limit=limit)
    furthest, fruitless = 0, 0
    for ending, reached in endings:
        assert attempts is not None
        fruitless = 0 if reached > furthest else fruitless
        furthest = max(furthest, reached)
        attempts = attempts.after(ending, reached)
        if attempts is None:
            return
        fruitless += 1
        assert ending is not Ending.STOPPED
        assert attempts.in_row == fruitless <= limit
        assert attempts.furthest == furthest


def test_an_error_raised_at_the_same_step_twice_ends_the_run() -> None:
    once = Attempts(limit=9).after(Ending.RAISED, 7)
    assert once is not None
    assert once.after(Ending.RAISED, 7) is None
    assert once.after(Ending.RAISED, 8) is not None
    assert once.after(Ending.DIED, 7) is not None


def test_the_first_restart_is_at_once_and_later_ones_wait_up_to_a_minute() -> None:
    attempts, waits = Attempts(limit=10), []
    for _ in range(10):
        again = attempts.after(Ending.DIED, 0)
        assert again is not None
        attempts = again
        waits.append(attempts.wait_s)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


KILLED = RunError("rank 1", "the process was killed by SIGKILL.")
EXITED = RunError("rank 0", "the process ended with exit status 1.")
STOPPED = RunError("the launcher", "stopped by SIGTERM.")
OWN = ("error", "rank 2, actor head", "ValueError: no.", "", False)
LOST = ("error", "rank 0, actor all_reduce", "lost another rank.", "", True)


@pytest.mark.parametrize(
    ("messages", "ended", "ending"),
    [
        ([LOST], KILLED, Ending.DIED),
        ([LOST], EXITED, Ending.DIED),
        ([LOST, OWN], KILLED, Ending.RAISED),
        ([LOST], STOPPED, Ending.STOPPED),
        ([], KeyboardInterrupt(), Ending.STOPPED),
        ([("step", 0, {}, 0.1, {})], KILLED, Ending.STOPPED),
    ],
    ids=[
        "killed",
        "without a peer",
        "raised",
        "told to end",
        "Ctrl-C",
        "a record that cannot be written",
    ],
)
def test_the_ending_of_ranks_that_were(
    messages: list[tuple], ended: BaseException, ending: Ending
) -> None:
    events = EventCollector(record=None, hosts=Alone(), over=True)  # type: ignore[arg-type]
    for message in messages:
        events._take(message, None)
    error = events.verdict(ended)
    assert error is not None
    assert events.ending(ended, error) is ending


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    damaged = Checkpoint(tmp_path, 8)  # a folder without any of its files
    gone = Checkpoint(tmp_path / "gone", 4)
    assert find_newest_whole([]) is None
    assert find_newest_whole([gone]) is None
    assert find_newest_whole([gone, damaged]) == damaged
