"""What is asked of a run, and how the launchers of its hosts halt their ranks."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.launch.preemption import (
    SIGNALS,
    WARNING,
    Offer,
    Preempted,
    Preemption,
    Regroup,
    Request,
    Requests,
)
from flowrun.launcher.launch.step_gate import StepGate
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import Launch, time_limit_s

TERM = SIGNALS[signal.SIGTERM]


@dataclass
class Wire:
    """One host among others, whose launchers are in this process."""

    number: int
    names: tuple[str, ...]
    shared: bool = True
    may_change: bool = False
    others: list[Preemption] = field(default_factory=list)

    def name(self, number: int) -> str:
        return f"host {number}"

    def broadcast(self, kind: str, number: int, by: str, *offer: Any) -> None:
        for other in self.others:
            other.receive(self.number, number, by, Offer(*offer))


def launchers(begun: list[int], shared: bool = True, grace_s: float = 30.0) -> list[Preemption]:
    """Launchers of hosts with a rank each, which has begun some steps of 100."""
    names = tuple(map(str, range(len(begun))))
    found = []
    for number, steps in enumerate(begun):
        gate = StepGate.of_threads(1, 0)
        assert all(gate.of_rank(0).may_begin(k + 1) for k in range(steps))
        wire: Any = Wire(number, names, shared)
        made = Preemption(
            gate=gate,
            requests=Requests(Launch()),
            saved=0,
            steps=100,
            grace_s=grace_s,
            say=lambda text: None,
            stop=lambda: None,
            hosts=wire,
        )
        found.append(made)
    for launcher in found:
        launcher.hosts.others = [other for other in found if other is not launcher]  # type: ignore[union-attr]
    return found


def serve(found: list[Preemption], until: Any) -> None:
    """Let the launchers serve until something is so."""
    deadline = time.monotonic() + 30
    servers = [launcher.serving() for launcher in found]
    for server in servers:
        server.__enter__()
    while not until():
        assert time.monotonic() < deadline
    for server in servers:
        server.__exit__(None, None, None)


@pytest.mark.parametrize("begun", [[3], [3, 5], [4, 0, 2]])
def test_all_hosts_halt_after_the_most_steps_that_one_has_begun(begun: list[int]) -> None:
    found = launchers(begun)
    found[0].requests.queue.put(TERM)
    serve(found, lambda: all(launcher.halt is not None for launcher in found))
    assert {launcher.halt for launcher in found} == {max(begun)}
    for launcher in found:
        rank = launcher.gate.of_rank(0)
        assert all(rank.may_begin(k + 1) for k in range(rank.begun, max(begun)))
        assert not rank.may_begin(max(begun) + 1)
        assert isinstance(launcher.end_after(None), Preempted)


def test_a_step_that_went_wrong_halts_all_hosts_and_saves_nothing() -> None:
    found = launchers([4, 2], shared=False)
    found[1].halt_for_numbers()
    serve(found, lambda: not any(launcher.gate.is_clear for launcher in found))
    for launcher in found:
        assert launcher.gate.of_rank(0).may_begin(4)
        assert not launcher.gate.of_rank(0).may_begin(5)
        assert launcher.ending is None and launcher.end_after(None) is None


def test_where_a_host_leaves_the_others_meet_again_unless_they_are_asked_to_leave_too() -> None:
    found = launchers([3, 5, 4])
    for launcher in found:
        launcher.hosts.may_change = True
    found[1].requests.queue.put(TERM)
    found[2].requests.queue.put(Request("Ctrl-C", ends=True))
    settled = ("SIGTERM", "Ctrl-C")
    serve(
        found,
        lambda: (
            found[0].halt is not None
            and all(
                own.ending and own.ending.by == by
                for own, by in zip(found[1:], settled, strict=True)
            )
        ),
    )
    assert {launcher.halt for launcher in found} == {5}
    assert isinstance(found[0].end_after(None), Regroup)
    assert isinstance(found[1].end_after(None), Preempted)
    assert isinstance(found[2].end_after(None), KeyboardInterrupt)


def test_where_a_host_joins_all_meet_again() -> None:
    found = launchers([3, 5])
    for launcher in found:
        launcher.hosts.may_change = True
    found[0].make_room("node7")
    serve(found, lambda: all(launcher.halt is not None for launcher in found))
    for launcher in found:
        ended = launcher.end_after(None)
        assert isinstance(ended, Regroup)
        assert ended.problem == "a host joins (node7)."


def test_hosts_that_share_no_folder_end_at_once_where_it_is_asked() -> None:
    found = launchers([3, 5], shared=False)
    found[0].requests.queue.put(TERM)
    serve(found, lambda: found[0].early is not None)
    assert str(found[0].early) == "the launcher\n  stopped by SIGTERM."
    assert (found[1].early, found[1].halt) == (None, None)


def test_a_step_that_does_not_end_in_the_grace_time_is_given_up() -> None:
    (launcher,) = launchers([3], grace_s=0.05)
    launcher.requests.queue.put(TERM)
    serve([launcher], lambda: launcher.early is not None)
    assert "was not finished and saved within 0.05 s." in str(launcher.early)


def test_a_warning_after_another_request_puts_the_job_back() -> None:
    (launcher,) = launchers([3])
    for request in (TERM, SIGNALS[signal.SIGUSR2]):
        launcher.requests.queue.put(request)
    serve([launcher], lambda: launcher.ending is not None and launcher.ending.by == WARNING)
    ended = launcher.end_after(None)
    assert isinstance(ended, Preempted)
    assert (ended.by, ended.code) == (WARNING, 75)


def test_a_checkpoint_alone_lets_the_ranks_go_on() -> None:
    (launcher,) = launchers([3])
    rank = launcher.gate.of_rank(0)
    launcher.requests.queue.put(Request("SIGUSR1", ends=False))
    serve([launcher], lambda: not rank.may_begin(4))
    assert rank.go_on()
    assert rank.may_begin(4)
    assert launcher.end_after(None) is None


def test_a_signal_ends_what_has_not_begun_and_is_not_lost() -> None:
    requests = Requests(Launch())
    with requests.handling(), pytest.raises(Preempted):
        signal.raise_signal(signal.SIGTERM)
    assert requests.queue.get(timeout=1) == TERM


def test_a_signal_that_comes_again_at_once_counts_once() -> None:
    requests = Requests(Launch())
    requests.running = True
    ended: list[Request] = []
    requests.at_once = ended.append
    with requests.handling():
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert not ended
        requests._first[signal.SIGTERM] -= 2  # two seconds ago
        signal.raise_signal(signal.SIGTERM)
    assert ended == [TERM]


@pytest.mark.parametrize(
    ("limit", "seconds"), [(None, None), (90, 5400), (0.5, 30), ("01:02:03", 3723)]
)
def test_a_time_limit_is_minutes_or_a_time(limit: Any, seconds: float | None) -> None:
    assert time_limit_s(Launch(time_limit=limit)) == seconds


@pytest.mark.parametrize("limit", ["soon", "1:99:00", "00:00:00", "0"])
def test_what_is_no_time_limit_is_refused(limit: str) -> None:
    with pytest.raises(RecipeError, match=r"launch\.time_limit"):
        load(["recipe=mlp_hybrid", f"launch.time_limit={limit}"])
