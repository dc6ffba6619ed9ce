"""Which step is saved from the memory of hosts that are left, and by whom."""

from __future__ import annotations

from flowrun.launcher.launch.hosts.holdings import Holding, Rescue, find_rescue

BOTH, FIRST = (0, 1), (0,)


def holding(*steps: tuple[int, tuple[int, ...]], round: str = "a") -> Holding:
    return Holding(round=round, ranks=2, steps=steps)


def test_the_newest_step_of_all_ranks_is_saved_by_those_that_hold_it() -> None:
    held = {0: holding((5, BOTH), (6, (0,))), 1: holding((5, BOTH), (6, (1,)))}
    assert find_rescue(held, newest=4) == Rescue(6, {0: (0,), 1: (1,)})
    assert find_rescue({0: held[0]}, newest=4) == Rescue(5, {0: BOTH})
    assert find_rescue({0: held[0]}, newest=5) is None
    assert find_rescue({}, newest=0) is None


def test_a_step_of_which_a_rank_is_missing_is_none() -> None:
    assert find_rescue({0: holding((5, FIRST))}, newest=0) is None


def test_states_of_two_rounds_are_not_put_together() -> None:
    held = {0: holding((5, (0,))), 1: holding((5, (1,)), round="b")}
    assert find_rescue(held, newest=0) is None


def test_once_all_is_written_one_host_completes_it() -> None:
    one = Holding(round="a", ranks=2, steps=((5, BOTH),), saved=5, files=((0, 10, 1),))
    other = Holding(round="a", ranks=2, steps=((5, BOTH),))
    assert find_rescue({3: one, 4: other}, newest=0) == Rescue(5, {3: (1,)})
    other = Holding(round="a", ranks=2, steps=((5, BOTH),), saved=5, files=((1, 20, 2),))
    complete = Rescue(5, files=((0, 10, 1), (1, 20, 2)), completes=3)
    assert find_rescue({3: one, 4: other}, newest=0) == complete
    assert find_rescue({3: one}, newest=0) == Rescue(5, {3: (1,)})  # it holds both


def test_what_comes_as_json_is_what_was_sent() -> None:
    told = {"round": "a", "ranks": 2, "steps": [[5, [0, 1]]], "saved": 5, "files": [[0, 10, 1]]}
    assert Holding.read(told) == Holding(
        round="a", ranks=2, steps=((5, BOTH),), saved=5, files=((0, 10, 1),)
    )
