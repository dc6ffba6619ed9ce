"""A run that hangs ends by itself, and says which rank owes what."""

from pathlib import Path

import pytest

from support.runs.command import Command, Ended, run_folder

pytestmark = pytest.mark.processes


def end_of_hang(place: Path, fail: str) -> Ended:
    """Run the recipe `small`, in which rank 1 hangs at its 11th micro-batch."""
    run = ("recipe=small", "train.steps=1000", f"+data.fail={fail}", "launch.hang_s=2")
    return Command(place, *run, run_folder(place / "run")).end()


def test_a_rank_that_is_stopped_is_named_and_killed(place: Path) -> None:
    ended = end_of_hang(place, "stop")
    assert ended.status == 1
    assert ended.err.startswith("rank 1")
    assert "nothing has gone on for" in ended.err
    assert "rank 1 is stopped by a signal" in ended.err
    hang = (place / "run" / "hang.txt").read_text()
    assert "rank 0 waits in actor" in hang
    assert "in _sleep" in hang, "the stack of rank 0, which could run"


def test_a_reader_that_blocks_is_named(place: Path) -> None:
    ended = end_of_hang(place, "sleep")
    assert ended.status == 1
    assert ended.err.startswith("rank 1, actor batch\n")
    assert "a reader of rank 1 has begun actor" in ended.err
    assert "in break_down" in (place / "run" / "hang.txt").read_text()
