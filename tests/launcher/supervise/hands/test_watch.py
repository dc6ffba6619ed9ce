import itertools
import queue
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.actors.standstill import Owed, RankState, Standstill, describe_owed
from flowrun.engine.ir.placement import Placement
from flowrun.engine.runtime.drivers.pulse import Activity, Pulses
from flowrun.engine.runtime.process.vital_signs import ProcessWork
from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.supervise.hands import watch as watch_module
from flowrun.launcher.supervise.hands.watch import (
    Pace,
    Quiet,
    explain_hang,
    find_limit,
    find_silence,
    waits_inside,
)
from support.plans.unit_pipeline import unit_plan
from support.runs.unit_watch import unit_watch


def test_a_run_hangs_after_a_minute_or_twenty_foreseen_steps() -> None:
    assert find_limit(None, step_s=0.1) == 60
    assert find_limit(None, step_s=30.0) == 600
    assert find_limit(2.0, step_s=30.0) == 2
    assert find_limit(0, step_s=30.0) == 0
    assert find_silence(3600.0) > 3600
    assert find_silence(0) > 86400


def seconds_until_hung(quiet: Quiet, looks: list[tuple[int, float]]) -> int | None:
    """The number of the first look, one a second, that finds the run hanging."""
    hung = (now for now, (acts, work) in enumerate(looks, 1) if quiet.look(acts, [work], now))
    return next(hung, None)


def test_acts_and_work_put_the_end_off() -> None:
    assert seconds_until_hung(Quiet(10, 1), [(0, 0)] * 30) == 11
    assert seconds_until_hung(Quiet(10, 1), [(k // 9, 0) for k in range(90)]) is None
    assert seconds_until_hung(Quiet(10, 1), [(0, k // 9) for k in range(90)]) is None


def test_work_that_is_small_over_the_whole_limit_puts_nothing_off() -> None:
    assert seconds_until_hung(Quiet(10, 1), [(0, k / 11) for k in range(90)]) == 11
    assert seconds_until_hung(Quiet(10, 1), [(0, min(k / 4, 2.1)) for k in range(90)]) == 16
    assert seconds_until_hung(Quiet(10, 1), [(0, k / 9) for k in range(90)]) is None


def test_work_without_an_act_ends_after_half_an_hour() -> None:
    assert seconds_until_hung(Quiet(10, 1), [(0, k) for k in range(4000)]) == 1801


def test_the_limit_grows_with_what_takes_long() -> None:
    quiet = Quiet(10, 1, grows=True)
    assert seconds_until_hung(quiet, [(0, k) for k in range(200)]) is None
    assert seconds_until_hung(quiet, [(1, 0)] * 1000) == 598
    assert quiet.limit_s == 3 * 199


def test_time_in_which_the_launcher_itself_was_stopped_does_not_count() -> None:
    quiet = Quiet(10, 1)
    assert not quiet.look(0, [], 1)
    assert not quiet.look(0, [], 1000)
    assert quiet.acts_s == 2


def test_the_error_names_the_rank_its_act_and_one_wait_of_each_rank() -> None:
    plan = unit_plan(2, 2, "1f1b")
    state = RankState(activity="trains", entered=1, plan=plan, steps=1, begun=[1] * 9, done=[0] * 9)
    found = Standstill((Owed(1, 0, 0, "runs"),), {0: ("rank 0 waits", "and waits")})
    error = explain_hang({0: state, 1: state}, found, quiet_s=61.2, host_of=str)
    assert error.where == f"rank 1, actor {plan.actors[0].name}"
    assert error.problem.startswith("nothing has gone on for 61 s: rank 1 has begun actor 0 ")
    assert error.problem.endswith("and has not ended it.\nrank 0 waits")


def test_a_pulse_shows_what_a_rank_has_begun_and_done() -> None:
    plan = unit_plan(2, 2, "1f1b")
    pulses = Pulses([plan], 2)
    pulse = pulses.ranks[1]
    assert (pulse.activity, pulse.process, pulse.rank) == (Activity.STARTING, 0, 1)
    pulse.start(1)
    assert pulse.state().plan is None
    pulse.enter_steps(Scheduler(plan, 1, 6, 4), 4)
    actor = plan.stage_actors(1)[0]
    first = 4 * plan.acts_per_step(actor)
    pulse.begin(actor.id, first)
    state = pulse.state("is stopped")
    assert (state.at, state.begun[actor.id], state.done[actor.id]) == (actor.id, first + 1, first)
    assert (state.steps, state.halted, state.entered) == (6, "is stopped", 2)
    assert pulse.in_first_step
    before = pulses.copy()
    pulse.end(actor.id, first)
    pulse.sleep()
    assert pulse.state().at is None
    assert pulses.copy() != before
    pulse.report()
    assert pulse.state().halted.startswith("waits for its launcher")
    for each in plan.stage_actors(1):
        pulse.end(each.id, 5 * plan.acts_per_step(each) - 1)
    assert not pulse.in_first_step
    assert pulse.trained_steps == pytest.approx(5)


def test_a_rank_may_go_on_while_its_pulse_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulses([unit_plan(2, 2, "1f1b")], 1).ranks[0]
    pulse.start(0)
    activities = iter([Activity.TRAINING, *[Activity.LEAVING] * 9])
    monkeypatch.setattr(type(pulse), "activity", property(lambda self: next(activities)))
    assert pulse.in_first_step


def test_a_fault_of_the_watch_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: Pulses) -> None:
        raise KeyError(7)

    monkeypatch.setattr(Pulses, "copy", fail)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    failed: list[Reason] = []
    watch = unit_watch(tmp_path, limit_s=0.01, say=said.put, fail=failed.append, compares=True)
    with watch:
        text = said.get(timeout=60)
    assert text.startswith("from here on no hang and no slow rank is named: a bug in flowrun")
    assert "in fail)" in text and "KeyError: 7" in text
    assert not failed


def test_a_launcher_that_was_stopped_is_not_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, looks, left = itertools.count(0, 3600), [], queue.SimpleQueue[int]()

    def own() -> tuple[float, str]:
        looks.append(next(seconds))
        return 0.0, "the launcher"

    def leave(status: int) -> None:
        watching._ended.set()
        left.put(status)

    clock = SimpleNamespace(monotonic=lambda: looks[-1])
    monkeypatch.setattr(watch_module, "time", clock)
    monkeypatch.setattr(watch_module.os, "_exit", leave)
    watching = unit_watch(tmp_path, limit_s=0.08, own=own)
    with watching:
        assert left.get(timeout=60) == 1
    assert len(looks) >= 4, "an hour from one look to the next is no hour without a beat"


def test_a_rank_that_has_no_core_is_not_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread that writes a checkpoint gives way to all that a machine does."""
    pulses, looks = Pulses([unit_plan(2, 2, "1f1b")], 1), itertools.count()
    pulses.ranks[0].start(0)
    pulses.ranks[0].enter(Activity.SAVING)
    starves = [ProcessWork(0.0, 0, 0.9 * now) for now in range(100)]
    monkeypatch.setattr(watch_module, "measure_work", lambda process: starves[next(looks)])
    watching, quiet = unit_watch(tmp_path, pulses=pulses, limit_s=6.0), Quiet(6.0, 1)
    assert not any(quiet.look(0, watching._measure_work()[1], now) for now in range(1, 100))


class FakePulse:
    """A pulse that trains ten steps a second; one rank waits less than its peers."""

    def __init__(self, rank: int, waits: float) -> None:
        self.rank, self.waits, self.now = rank, waits, 0.0
        self.activity, self.plans = Activity.TRAINING, [plan_of_three()]

    @property
    def trained_steps(self) -> float:
        return 10 * self.now

    @property
    def waited_s(self) -> float:
        return self.waits * self.now


def plan_of_three() -> Plan:
    return replace(unit_plan(1, 2, "1f1b"), placements=(Placement((("data", 3),), (0, 1, 2)),))


def test_a_straggler_is_named_once_after_three_windows() -> None:
    pulses = [FakePulse(0, 0.5), FakePulse(1, 0.5), FakePulse(2, 0.1)]
    pace, said = Pace(pulses), []  # type: ignore[arg-type]
    for now in range(100):
        for pulse in pulses:
            pulse.now = now
        if text := pace.look(now):
            said.append((now, text))
    (found,) = said
    assert found[0] == 30
    assert found[1].startswith(
        "rank 2 is slower than its peers, which do the same: they wait 40 ms"
    )


STACKS = """\
Thread 0x1 (most recent call first):
  File "/lib/torch/distributed/x.py", line 1 in wait
Current thread 0x2 (most recent call first):
  File "{file}", line 4 in barrier
  File "/flowrun/launcher/supervise/ranks/worker.py", line 5 in _run
"""


def test_a_rank_that_waits_inside_of_torch_is_told_from_one_that_owes() -> None:
    waits = STACKS.format(file="/lib/torch/distributed/distributed_c10d.py")
    assert waits_inside(waits)
    assert not waits_inside(STACKS.format(file="/flowrun/x.py"))
    assert not waits_inside("")
    owed = (Owed(0, None, 0, "elsewhere"), Owed(1, None, 0, "elsewhere"))
    assert Standstill(owed, {}).without({0}, ()).owed == owed[1:]
    assert Standstill(owed, {}).without({0, 1}, ()).owed == owed


def test_ranks_that_all_wait_for_others_wait_for_other_hosts() -> None:
    owed = (Owed(1, None, 0, "elsewhere"),)
    (absent,) = Standstill(owed, {}).without({1}, {0}).owed
    said = describe_owed(absent, {}, host_of=lambda rank: f"host {rank} (one)")
    assert said == "rank 0, of host 0 (one), has not come to the others."
    assert Standstill(owed, {}).without((), {0}).owed == owed
