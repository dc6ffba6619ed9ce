"""Two launchers in one process copy the state of their ranks to each other, over loopback."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.runtime.rank.pieces import count_copied_bytes
from flowrun.launcher.job.job import Job
from flowrun.launcher.launch.hosts.endpoint import Endpoint, listen
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace
from flowrun.launcher.launch.restart import snapshot_memory
from flowrun.launcher.launch.restart.neighbour_copies import Copies, CopyPlan, plan_copies
from flowrun.launcher.launch.restart.stamps import NONE
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.store.checkpoint import Checkpoint, find_all

KEYS = ("model.depth=1", "model.width=16", "data.max_bytes=100000", "engine.check_capture=false")


@pytest.fixture(scope="module")
def job() -> Job:
    """ZeRO on two ranks: each has states of its own, and the same weights."""
    return Job(load(["recipe=gpt_zero", *KEYS, "launch.restarts=1"]))


class Launcher:
    """A host with one rank; what it broadcasts comes to the other at once."""

    listener: Any
    token = "secret"

    def __init__(self, number: int, job: Job, folder: Path, stack: ExitStack) -> None:
        self.notes: list[str] = []
        self.votes: SimpleQueue[Any] = SimpleQueue()
        self.others: list[Launcher] = []
        self.number, self.job = number, job
        self.listener = stack.enter_context(listen("127.0.0.1"))
        self.record: Any = SimpleNamespace(
            job=job, first=0, reached=0, note=self.notes.append, run_folder=folder, checkpoints=[]
        )
        self.record.steps = SimpleNamespace(last=None)

    def broadcast(self, *event: Any) -> None:
        for other in self.others:
            other.votes.put((self.number, event))

    def begin(self, ring: CopyPlan, plan: Plan, links: tuple[Endpoint, ...]) -> Copies:
        place = MeetingPlace(
            number=self.number, num_hosts=2, address="", port=0, interface="", name="r", links=links
        )
        return Copies(self.record, ring, plan, place, self, self.votes)  # type: ignore[arg-type]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def two_hosts(job: Job, folder: Path, stack: ExitStack) -> tuple[list[Launcher], list[Copies]]:
    plan = job.training.plan
    launchers = [Launcher(number, job, folder, stack) for number in range(2)]
    launchers[0].others, launchers[1].others = launchers[1:], launchers[:1]
    links = tuple(Endpoint("127.0.0.1", one.listener.getsockname()[1]) for one in launchers)
    ring = plan_copies(launchers[0].record, job.training, 2)
    assert ring is not None
    return launchers, [one.begin(ring, plan, links) for one in launchers]


def write(copies: Copies, step: int) -> None:
    """The rank of a host comes to a step; equal variables of all ranks get equal values."""
    (rank,) = copies.own.stamps.ranks
    if (buffer := copies.own.stamps.open(rank, step)) is not None:
        for name, value in copies.own.views(rank)[buffer].items():
            value.fill_(step + (0 if name in copies.lent[rank] else rank) % 2)
        copies.own.stamps.close(rank, buffer, step)


def until_aims(both: list[Copies], kept: int, target: int) -> None:
    """Wait for what threads do."""
    end = time.monotonic() + 10
    while any(copies.own.stamps.aims != (kept, target) for copies in both):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_host_holds_the_state_of_its_neighbour(
    job: Job, tmp_path: Path, stack: ExitStack
) -> None:
    launchers, both = two_hosts(job, tmp_path, stack)
    plan = job.training.plan
    with both[0].running(), both[1].running():
        for step in (1, 2, 3):
            for one, copies in zip(launchers, both, strict=True):
                write(copies, step)
                one.record.reached = step
            until_aims(both, step, step + 1)
        write(both[0], 4)  # host 1 is killed before it comes to this step
    assert [one.notes for one in launchers] == [[], []]
    both[0].rest()
    assert both[0].holding.steps[-1] == (3, (0, 1))
    state = both[0].copy.read(1, 3)
    expected = both[1].own.read(1, 3)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    # weights are the same on both ranks, and are not sent
    assert both[0].copy.bytes[1] == count_copied_bytes(plan, 2)[1]
    assert 0 < both[0].copy.bytes[1] < both[0].own.bytes[0]


def test_what_two_hosts_held_is_saved_by_the_one_that_is_left(
    job: Job, tmp_path: Path, stack: ExitStack
) -> None:
    launchers, both = two_hosts(job, tmp_path, stack)
    with both[0].running(), both[1].running():
        for one, copies in zip(launchers, both, strict=True):
            write(copies, 1)
            one.record.reached = 1
        until_aims(both, 1, 2)
    left, record = both[1], launchers[1].record
    left.rest()

    def complete(folder: Path, step: int, files: Any) -> None:
        folder.rename(folder.with_suffix(""))
        record.checkpoints.append(Checkpoint(folder.with_suffix(""), step))

    record.complete_checkpoint = complete
    left.save("save", 1, [0, 1])
    assert [rank for rank, *_ in left.holding.files] == [0, 1]
    left.save("complete", 1, left.holding.files)
    assert job.start == record.checkpoints[0]
    job.start = None
    assert [kept.step for kept in find_all(tmp_path)] == [1]


def test_no_copy_from_a_bad_step_on_counts(job: Job, tmp_path: Path, stack: ExitStack) -> None:
    """All hosts may hold it whole where the rank that reports trains nothing."""
    launchers, both = two_hosts(job, tmp_path, stack)
    with both[0].running(), both[1].running():
        for step in (1, 2):
            for one, copies in zip(launchers, both, strict=True):
                write(copies, step)
                one.record.reached = step
            until_aims(both, step, step + 1)
    for bad, held in ((None, [1, 2]), (2, [1]), (1, [])):
        both[0].rest(bad)
        assert [step for step, _ in both[0].holding.steps] == held


def test_a_file_that_is_not_there_is_said_and_held_no_longer(
    job: Job, tmp_path: Path, stack: ExitStack
) -> None:
    launchers, both = two_hosts(job, tmp_path, stack)
    both[0].save("complete", 3, [[0, 10, 7]])
    assert "step 3, of the hosts' memory, could not be saved" in launchers[0].notes[-1]
    assert both[0].holding.steps == ()


def test_a_rank_that_comes_to_a_step_too_early_lets_it_pass(
    job: Job, tmp_path: Path, stack: ExitStack
) -> None:
    launchers, both = two_hosts(job, tmp_path, stack)
    write(both[1], 2)  # the target is 1
    assert NONE not in both[1].own.stamps.aims
    assert both[1].own.stamps.is_missed
    with both[0].running(), both[1].running():
        launchers[0].record.reached = 1
        until_aims(both, 0, 3)


def test_a_round_that_ends_while_hosts_greet_each_other_closes_their_connections(
    job: Job, tmp_path: Path, stack: ExitStack
) -> None:
    plan = job.training.plan
    one = Launcher(0, job, tmp_path, stack)
    ring = plan_copies(one.record, job.training, 2)
    assert ring is not None
    silent = stack.enter_context(listen("127.0.0.1"))  # the neighbour never answers
    here, there = (Endpoint("127.0.0.1", two.getsockname()[1]) for two in (one.listener, silent))
    comes = stack.enter_context(socket.create_connection((here.host, here.port)))
    with one.begin(ring, plan, (here, there)).running():
        to_next, _ = silent.accept()
        stack.enter_context(to_next)
        for connected in (comes, to_next):  # each end greets first
            connected.settimeout(10)
            assert connected.recv(1 << 10)
    for connected in (comes, to_next):
        assert connected.recv(1 << 10) == b""
    gc.collect()  # a connection or task that is left warns, and fails this test
    assert one.notes == []


def test_a_host_without_the_memory_says_what_is_missing(
    job: Job, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Launcher(0, job, tmp_path, stack)
    monkeypatch.setattr(snapshot_memory, "available_bytes", lambda: 10**5)
    assert plan_copies(one.record, job.training, 2) is None
    assert "snapshots and copies would take" in one.notes[0]
