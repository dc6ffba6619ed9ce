import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.ranks.rank_events import CANCELLED, DIED, LEFT, RAISED, Failure, Reason
from flowrun.launcher.supervise.life.verdicts import Attempts, Blame, Terms

ENDINGS = st.tuples(st.sampled_from([DIED, RAISED, LEFT, CANCELLED]), st.integers(0, 5))


def at_most(restarts: int) -> Terms:
    return Terms(steps=8, num_ranks=2, restarts=restarts)


@given(st.integers(0, 4), st.lists(ENDINGS, max_size=30))
def test_a_run_ends_after_as_many_restarts_without_a_new_step(
    limit: int, endings: list[tuple[str, int]]
) -> None:
    attempts: Attempts | None = Attempts()
    furthest, fruitless = 0, 0
    for ending, reached in endings:
        assert attempts is not None
        fruitless = 0 if reached > furthest else fruitless
        furthest = max(furthest, reached)
        attempts = attempts.after(ending, reached, at_most(limit))
        if attempts is None:
            return
        fruitless += 1
        assert ending is not CANCELLED
        assert attempts.in_row == fruitless <= limit
        assert attempts.furthest == furthest


def test_an_error_raised_at_the_same_step_twice_ends_the_run() -> None:
    once = Attempts().after(RAISED, 7, at_most(9))
    assert once is not None
    assert once.after(RAISED, 7, at_most(9)) is None
    assert once.after(RAISED, 8, at_most(9)) is not None
    assert once.after(DIED, 7, at_most(9)) is not None


def test_the_first_restart_is_at_once_and_later_ones_wait_up_to_a_minute() -> None:
    attempts, waits = Attempts(), []
    for _ in range(10):
        again = attempts.after(DIED, 0, at_most(10))
        assert again is not None
        attempts = again
        waits.append(attempts.wait_s)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


KILLED = Reason("rank 1", "the process was killed by SIGKILL.")
EXITED = Reason("rank 0", "the process ended with exit status 1.")
BROKEN = Reason("metrics.jsonl", "No space left on device.")
OWN = Failure(Reason("rank 2, actor head", "ValueError: no."), RAISED)
LOST = Failure(Reason("rank 0, actor all_reduce", "lost another rank."), RAISED, lost_peer=True)
HANG = Reason("rank 1, actor x", "nothing has gone on")


@pytest.mark.parametrize(
    ("blame", "fault", "how"),
    [
        (Blame(failures=(LOST,), death=KILLED), KILLED, DIED),
        (Blame(failures=(LOST,), death=EXITED), LOST.fault, DIED),
        (Blame(failures=(LOST, OWN), death=KILLED), OWN.fault, RAISED),
        (Blame(hung=HANG, killed=True, failures=(OWN,)), HANG, DIED),
        (Blame(broken=BROKEN, killed=True, death=KILLED), BROKEN, CANCELLED),
    ],
    ids=["killed", "without a peer", "raised", "hung", "a full disk"],
)
def test_the_one_who_is_to_blame_comes_before_those_that_suffer(
    blame: Blame, fault: Reason, how: str
) -> None:
    assert blame.find_fault() == fault
    assert blame.find_how(fault) == how


def test_other_hosts_hear_what_they_do_not_know() -> None:
    blame = Blame(failures=(LOST, OWN), death=KILLED)
    assert blame.describe(OWN.fault) is None
    lost, died = blame.describe(LOST.fault), blame.describe(KILLED)
    assert lost and lost.lost_peer
    assert died and (died.how, died.lost_peer) == (DIED, False)
