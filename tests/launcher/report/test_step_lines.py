import itertools
import re

import pytest

from flowrun.launcher.report.progress import SmoothSpeed, StepLines
from flowrun.launcher.report.report import StepRecord


def shown(steps: int, step_s: float, every: int = 0, last: int | None = None) -> list[str]:
    """Return the lines of a run whose steps take step_s."""
    now = [0.0]
    lines = StepLines(steps, every, "tokens", lambda: now[0])
    found = []
    for step in range(steps if last is None else last):
        now[0] += step_s
        record = StepRecord(step=step, loss=2.5, step_s=step_s, speed=100 / step_s)
        found.append(lines.line(record, 3e-4))
    return [line for line in found if line]


def test_a_line_has_each_update_of_its_step() -> None:
    others = {"loss/generator": 0.25, "lr/generator": 5e-4}
    record = StepRecord(step=0, loss=2.5, step_s=1.0, speed=1.0, others=others)
    line = StepLines(2, 0, "samples", lambda: 0.0).line(record, 2e-4)
    assert line and "  loss 2.5000, generator 0.2500  lr 0.0002, generator 0.0005  " in line


def numbers(lines: list[str]) -> list[int]:
    return [int(re.findall(r"step (\d+)/", line)[0]) for line in lines]


@pytest.mark.parametrize(
    ("steps", "step_s", "every", "expected"),
    [
        (25, 0.01, 0, [*range(0, 25, 2), 24]),
        (4, 0.01, 0, [0, 1, 2, 3]),
        (25, 0.01, 10, [0, 10, 20, 24]),
    ],
)
def test_a_short_run_has_a_line_a_tenth(
    steps: int, step_s: float, every: int, expected: list[int]
) -> None:
    assert [*dict.fromkeys(numbers(shown(steps, step_s, every)))] == [*dict.fromkeys(expected)]


def test_a_long_run_is_never_silent_for_more_than_a_minute() -> None:
    steps = numbers(shown(1_000_000, 1.0, last=5000))
    pauses = [b - a for a, b in itertools.pairwise(steps)]
    assert set(pauses[:9]) == {10} and max(pauses) == 60 and pauses[-1] == 60
    assert pauses == sorted(pauses)


def test_a_line_says_when_how_far_how_well_how_fast_and_how_long() -> None:
    *_, line = shown(100_000, 1.0, last=1001)
    when, said = line.split("  ", 1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", when)
    assert said.endswith("/100000  loss 2.5000  lr 0.0003  100 tokens/s  27 h 30 min left")
    assert not shown(3, 1.0)[-1].endswith("left")


def test_a_mean_speed_follows_the_newest_steps() -> None:
    speed = SmoothSpeed()
    record = lambda step_s: StepRecord(step=0, loss=1, step_s=step_s, speed=10 / step_s)  # noqa: E731
    assert speed.add(record(1.0)) == 10
    assert 9 < speed.add(record(2.0)) < 10
    for _ in range(200):
        found = speed.add(record(2.0))
    assert found == pytest.approx(5)
