from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.store.checkpoint import Checkpoint
from flowrun.launcher.supervise.hands.newest_state import find_rollback, find_start
from flowrun.launcher.supervise.life.verdicts import MOST_ROLLBACKS, Rollbacks

Updates = tuple[int, ...]  # the steps whose updates weights consist of
KEEP = 2


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is no files."""

    step: int
    weights: Updates = ()
    damaged: bool = False
    folder = Path()  # this one is there

    def damage(self) -> str:
        return "damaged" * self.damaged


def choose(found: list[Saved], every: int, bad: int) -> Saved | None:
    return find_rollback(found, every, bad + 1).weights  # type: ignore[arg-type, return-value]


def save(disk: list[Saved], new: Saved, every: int) -> list[Saved]:
    """What is on the disk after a checkpoint (store/checkpoint.py, complete)."""
    found = [each for each in disk if each.step < new.step] + [new]
    due = [each for each in found if each.step % every == 0][-1:]
    return [each for each in found if each in found[-KEEP:] or each in due]


def train(
    steps: int, every: int, is_bad: Callable[[int, Updates], bool], disturbed: Mapping[int, str]
) -> Updates | None:
    """Train a run that is killed, or preempted and resumed, before some steps, once each; return
    its weights, or None if it ends with an error.
    """
    disk: list[Saved] = []
    left, rollbacks, now = dict(disturbed), Rollbacks(), Saved(0)
    while now.step < steps:
        how = left.pop(now.step, "")
        if how == "preempted":
            disk = save(disk, now, every)
        if how:
            now, rollbacks = (disk or [Saved(0)])[-1], Rollbacks()
        step, weights = now.step, (*now.weights, now.step)
        if is_bad(step, now.weights):
            back = choose(disk, every, step) or Saved(0)
            again = rollbacks.after(back.step)
            if again is None:
                return None
            rollbacks, weights = again, back.weights
        now = Saved(step + 1, weights)
        if now.step % every == 0:
            disk = save(disk, now, every)
    return now.weights


@given(
    every=st.integers(1, 9),
    data=st.sets(st.integers(0, 39), max_size=12),
    salt=st.integers(2, 40),
    disturbed=st.dictionaries(st.integers(1, 39), st.sampled_from(["killed", "preempted"])),
)
def test_a_run_that_is_disturbed_has_the_updates_of_one_that_is_not(
    every: int, data: set[int], salt: int, disturbed: dict[int, str]
) -> None:
    def is_bad(step: int, weights: Updates) -> bool:  # a batch, or the weights that it meets
        return step in data or hash((step, weights)) % salt == 0

    disturbed = {k: how for k, how in disturbed.items() if how == "killed" or k >= every}
    whole = train(40, every, is_bad, {})
    assert whole is None or train(40, every, is_bad, disturbed) == whole


def test_a_run_goes_back_to_the_newest_checkpoint_that_was_due_and_is_whole() -> None:
    found = [Saved(10), Saved(20), Saved(30, damaged=True), Saved(33), Saved(40)]
    assert choose(found, 10, 40) == Saved(40)
    assert choose(found, 10, 39) == Saved(20)
    assert choose(found, 10, 9) is None
    assert choose([Saved(7), Saved(40)], 10, 12) == Saved(7)  # a preemption's, before any was due


def test_weights_that_are_no_good_end_the_run() -> None:
    assert train(100, 200, lambda step, weights: True, {}) is None
    assert train(MOST_ROLLBACKS, 200, lambda step, weights: True, {}) == ()
    good = train(100, 2, lambda step, weights: step % 2 == 1, {})
    assert good == ()  # each checkpoint, of the same weights, is gone back to once


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    damaged = Checkpoint(tmp_path, 8)  # a folder without any of its files
    gone = Checkpoint(tmp_path / "gone", 4)
    assert find_start([], None, 0) is None
    assert find_start([gone], None, 0) is None
    assert find_start([gone, damaged], None, 0) == damaged
