from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.ranks.rank_events import COMPLETES, ENDS, LEFT
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import Launch, time_limit_s
from flowrun.launcher.supervise.life import instructions as do
from flowrun.launcher.supervise.life.events import ANSWER, GRACE, Asked, Company, HaltOffered
from flowrun.launcher.supervise.life.halts import Halts
from flowrun.launcher.supervise.life.verdicts import NUMBERS, WARNING, Terms

TERM = Asked("SIGTERM")


@dataclass
class Launcher:
    """A host among others: its halts, what its ranks have begun, and how its gate was opened."""

    halts: Halts
    begun: int
    others: list[Launcher] = field(default_factory=list)
    came: list[tuple[int, HaltOffered]] = field(default_factory=list)
    frozen: bool = False
    opened: list[do.HaltAfter] = field(default_factory=list)
    out: list[do.Instruction] = field(default_factory=list)

    def take(self, answer: Any) -> None:
        self.halts, out = answer
        self.out += out
        for each in out:
            if isinstance(each, do.Freeze):
                self.frozen = True
            elif isinstance(each, do.HaltAfter):
                self.opened.append(each)
            elif isinstance(each, do.SendAll):
                for other in self.others:
                    other.came.append((self.halts.company.number, each.event))  # type: ignore[arg-type]


def launchers(begun: list[int], **keys: Any) -> list[Launcher]:
    """Launchers of hosts with a rank each, which has begun some steps of 100."""
    names = tuple(f"node{k}" for k in range(len(begun))) if len(begun) > 1 else ()
    found, terms = [], Terms(steps=100, num_ranks=len(begun), grace_s=30.0, **keys)
    for k, steps in enumerate(begun):
        company = Company(number=k, names=names)
        found.append(Launcher(Halts(terms=terms, company=company, saved=0), steps))
    for each in found:
        each.others = [other for other in found if other is not each]
    return found


def settle(found: list[Launcher], seed: int = 0) -> None:
    """Let all that is under way come, in any order."""
    order = random.Random(seed)
    while busy := [each for each in found if each.frozen or each.came]:
        one = order.choice(busy)
        if one.frozen and (not one.came or order.random() < 0.5):
            one.frozen = False
            one.take(one.halts.freeze(one.begun))
        else:
            one.take(one.halts.take_offer(*one.came.pop(0)))


def test_a_step_that_went_wrong_halts_all_hosts_and_saves_nothing() -> None:
    found = launchers([4, 2])
    found[1].take(found[1].halts.ask(Asked(NUMBERS)))
    settle(found)
    for launcher in found:
        assert launcher.opened == [do.HaltAfter(4, ENDS)]
        assert launcher.halts.ending is None and launcher.halts.find_end(early=False) is None


def test_where_a_host_leaves_the_others_meet_again_unless_they_are_asked_to_leave_too() -> None:
    found = launchers([3, 5, 4], may_change=True)
    for asked, by in zip(found[1:], ("SIGTERM", "Ctrl-C"), strict=True):
        asked.take(asked.halts.ask(Asked(by)))
    settle(found)
    ends = [launcher.halts.find_end(early=False) for launcher in found]
    assert {launcher.halts.halt for launcher in found} == {5}
    assert [end and end.how for end in ends] == [LEFT, "", ""]
    assert [end and end.status for end in ends[1:]] == [do.PREEMPTED, do.STOPPED]


def test_where_a_host_joins_all_meet_again() -> None:
    found = launchers([3, 5], may_change=True)
    found[0].take(found[0].halts.ask(Asked("a host joins (node7)", regroups=True)))
    settle(found)
    for launcher in found:
        end = launcher.halts.find_end(early=False)
        assert end and end.fault and end.fault.problem == "a host joins (node7)."


@pytest.mark.parametrize(
    ("timer", "problem"), [(GRACE, "within 30 s"), (ANSWER, "it did not answer to SIGTERM.")]
)
def test_nobody_waits_for_ever(timer: str, problem: str) -> None:
    one, _ = launchers([3, 5])
    one.take(one.halts.ask(TERM))
    one.take(one.halts.freeze(3))
    one.take(one.halts.time_out(timer))
    late = one.halts.late
    assert late and late.fault and problem in late.fault.problem
    assert do.KillRanks() in one.out


def test_a_warning_after_another_request_puts_the_job_back() -> None:
    (one,) = launchers([3])
    for by in ("SIGTERM", WARNING):
        one.take(one.halts.ask(Asked(by)))
    settle([one])
    end = one.halts.find_end(early=False)
    assert end and (end.status, end.by) == (do.PREEMPTED, WARNING)


@pytest.mark.parametrize(
    ("asked", "then"),
    [(Asked("SIGUSR1", 0), 0), (Asked("callback X", COMPLETES), COMPLETES)],
    ids=["a checkpoint alone", "a callback completes the run"],
)
def test_some_requests_end_no_run(asked: Asked, then: int) -> None:
    (one,) = launchers([3])
    one.take(one.halts.ask(asked))
    settle([one])
    assert one.opened == [do.HaltAfter(3, then)]
    assert one.halts.find_end(early=False) is None


def test_a_second_request_of_a_kind_ends_at_once() -> None:
    (one,) = launchers([3])
    for again in (False, True):
        one.take(one.halts.ask(replace(TERM, again=again)))
    assert one.halts.late and do.KillRanks() in one.out


@pytest.mark.parametrize(
    ("limit", "seconds"), [(None, None), (90, 5400), (0.5, 30), ("01:02:03", 3723)]
)
def test_a_time_limit_is_minutes_or_a_time(limit: Any, seconds: float | None) -> None:
    assert time_limit_s(Launch(time_limit=limit)) == seconds


@pytest.mark.parametrize("limit", ["soon", "1:99:00", "00:00:00", "0"])
def test_what_is_no_time_limit_is_refused(limit: str) -> None:
    with pytest.raises(RecipeError, match=r"launch\.time_limit"):
        load(["recipe=mlp_hybrid", f"launch.time_limit={limit}"])
