"""Who is blamed when ranks end badly, and that a torn message stops nobody."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import pytest

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.distributed import LostPeer
from flowrun.launcher.launch.collector import EventCollector
from flowrun.launcher.launch.failure import describe
from flowrun.launcher.launch.hosts.alone import Alone

OWN = ("error", "rank 2, actor head", "ValueError: no.", "", False)
LOST = ("error", "rank 0, actor all_reduce", "lost another rank.", "", True)
KILLED = RunError("rank 1", "the process was killed by SIGKILL.")
VICTIM_EXIT = RunError("rank 0", "the process ended with exit status 1.")
STOPPED = RunError("the launcher", "stopped by SIGTERM.")


def heard(*messages: Sequence[Any]) -> EventCollector:
    """A launcher that heard these messages, in order."""
    out = EventCollector(record=None, hosts=Alone())  # type: ignore[arg-type]
    for message in messages:
        out._take(message, None)
    out.over = True  # no agent runs: nothing is to be stopped, now or later
    return out


@pytest.mark.parametrize(
    ("messages", "ended", "blamed"),
    [
        ([LOST, OWN], VICTIM_EXIT, "rank 2, actor head"),
        ([OWN], STOPPED, "rank 2, actor head"),
        ([LOST], KILLED, "rank 1"),
        ([LOST], VICTIM_EXIT, "rank 0, actor all_reduce"),
        ([LOST], STOPPED, "rank 0, actor all_reduce"),
        ([], KILLED, "rank 1"),
        ([], STOPPED, "the launcher"),
    ],
    ids=[
        "who raised, though a victim was heard first",
        "who raised on another host",
        "who was killed, though a victim was heard",
        "a victim, if nobody else is known",
        "a victim before the launcher",
        "who was killed in silence",
        "the launcher that was told to end",
    ],
)
def test_blamed_is(messages: list[Sequence[Any]], ended: RunError, blamed: str) -> None:
    verdict = heard(*messages).verdict(ended)
    assert isinstance(verdict, RunError)
    assert verdict.where == blamed


def test_what_cannot_be_written_down_ends_the_run() -> None:
    launcher = heard(("step", 0, {}, 0.1, {}), OWN)  # there is no record
    verdict = launcher.verdict(STOPPED)
    assert isinstance(verdict, RunError)
    assert (verdict.where, verdict.problem.split(":")[0]) == ("the launcher", "AttributeError")


def test_ctrl_c_is_nobodys_fault() -> None:
    interrupt = KeyboardInterrupt()
    assert heard(LOST).verdict(interrupt) is interrupt


def test_a_run_that_ended_well_has_no_verdict() -> None:
    assert heard().verdict(None) is None


def test_a_message_cut_short_by_a_kill_ends_that_pipe_alone() -> None:
    torn, whole = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    os.write(torn[1].fileno(), b"\x00\x00\x01\x00only a part")  # length 256, then death
    whole[1].send(LOST)
    for _, writer in (torn, whole):
        writer.close()
    launcher = heard()
    launcher.listen([torn[0], whole[0]])
    assert [failure.error.where for failure in launcher.failures] == ["rank 0, actor all_reduce"]
    for reader, _ in (torn, whole):
        reader.close()


def test_what_gloo_guesses_is_left_out() -> None:
    gloo = "RuntimeError: [/a/pair.cc:537] Read error: Closed. This is typically caused by"
    where, problem, _ = describe(LostPeer("rank 0, actor a", gloo), rank=0)
    assert (where, problem) == ("rank 0, actor a", "RuntimeError: Read error: Closed.")
