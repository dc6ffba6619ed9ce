"""A few strikes, of many that `python tests/chaos/chaos.py` makes, and what judges them."""

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.blows import BLOWS, PREEMPTED, Blow, Strike, make_strike
from chaos.chaos import SUBJECTS, Chaos
from chaos.soak import Usage, growth
from chaos.verdicts import Ended, Observed, faults, table

STRUCK = ("worker SIGKILL", "launcher SIGKILL", "worker SIGKILL, restarts")


@pytest.mark.processes
def test_runs_that_are_struck_end_and_go_on_as_if_nobody_had(tmp_path: Path) -> None:
    chaos = Chaos(SUBJECTS[2], tmp_path)
    seen = [
        chaos.strike(make_strike(seed, 2, [blow_called(name)])) for seed, name in enumerate(STRUCK)
    ]
    assert [faults(each) for each in seen] == [[], [], []], seen


def blow_called(name: str) -> Blow:
    return next(blow for blow in BLOWS if blow.name == name)


WORKER_KILLED = Strike(0, blow_called("worker SIGKILL"), 0.5, 0, 2, 2)
WELL = Observed(
    strike=WORKER_KILLED,
    ends=[Ended(status=1, printed="rank 2\n  the process was killed by SIGKILL.")],
    seconds=1.0,
    missed=False,
    lost=3,
    left=[],
    resumed="",
    differs="",
)


def test_a_run_that_ended_as_it_should_has_no_fault() -> None:
    assert faults(WELL) == []


PLANTED = {
    "did not end": {"ends": [Ended(status=None, printed="rank 2 SIGKILL")]},
    "status 3": {"ends": [Ended(status=3, printed="rank 2 SIGKILL")]},
    "by signal 9": {"ends": [Ended(status=-9, printed="")]},
    "does not name": {"ends": [Ended(status=1, printed="rank 1: SIGKILL")]},
    "steps are lost": {
        "ends": [Ended(status=PREEMPTED, printed="rank 2 SIGKILL")],
        "strike": replace(WORKER_KILLED, blow=replace(WORKER_KILLED.blow, statuses=(PREEMPTED,))),
    },
    "left over: 17": {"left": ["17 running"]},
    "did not go on": {"resumed": "no checkpoint"},
    "undisturbed run: weights": {"differs": "weights"},
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_fault_is_found(said: str) -> None:
    (found,) = faults(replace(WELL, **PLANTED[said]))  # type: ignore[arg-type]
    assert said in found


def test_each_of_two_hosts_that_a_cut_link_parts_names_the_other() -> None:
    strike = make_strike(0, 4, [blow_called("link down")])
    ends = [Ended(status=1, printed=f"host {other} (node): nothing came") for other in (1, 0)]
    seen = replace(WELL, strike=strike, ends=ends)
    assert faults(seen) == []
    assert len(faults(replace(seen, ends=ends[::-1]))) == 2


def test_a_run_that_was_over_before_the_blow_names_nobody() -> None:
    assert faults(replace(WELL, missed=True, ends=[Ended(status=0, printed="")])) == []


def test_strikes_take_turns_among_the_blows_and_repeat_by_their_seed() -> None:
    strikes = [make_strike(seed, 4) for seed in range(len(BLOWS))]
    assert [strike.blow for strike in strikes] == list(BLOWS)
    assert strikes == [make_strike(seed, 4) for seed in range(len(BLOWS))]
    assert all(strike.local_rank == strike.rank % 2 for strike in strikes if strike.host)


def test_the_table_has_a_line_a_blow() -> None:
    lines = table([WELL, replace(WELL, differs="weights")]).splitlines()
    assert lines[1].split() == ["worker", "SIGKILL", "2", "0", "1", "1.0", "1.0"]


def test_a_process_that_grows_is_named() -> None:
    flat = [Usage(1e8, 60, 5)] * 60
    assert growth(flat)[2] == ""
    leak = [Usage(1e8 + 3e5 * k, 60 + k // 30, 5) for k in range(60)]
    assert growth(leak)[2] == "memory, descriptors"
