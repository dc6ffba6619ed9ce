import os

import pytest

from flowrun.launcher.ranks.rank_memory import RankGauges


class Rank:
    waited_s = 0.0
    process = os.getpid()
    device_bytes = 0


def test_waits_are_those_of_one_step_and_memory_is_read_once_a_second() -> None:
    first, second, now = Rank(), Rank(), [5.0]
    gauges = RankGauges([first, second], True, lambda: now[0])  # type: ignore[list-item]
    assert gauges.read()["memory_bytes"] > 1e6
    first.waited_s, second.waited_s = 0.25, 0.5
    assert gauges.read() == {"waited_s": 0.5}
    first.waited_s = 1.25
    now[0] += 1.0
    found = gauges.read()
    assert found["waited_s"] == pytest.approx(1.0) and "memory_bytes" in found


def test_on_a_device_memory_is_its_allocator_s() -> None:
    rank = Rank()
    rank.device_bytes = 7 << 30
    assert RankGauges([rank], False).read() == {"memory_bytes": 7 << 30}  # type: ignore[list-item]
