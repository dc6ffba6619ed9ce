import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowrun.engine.runtime.process.core import pin_to_core


def kept(rank: int, ranks: int) -> set[int]:
    """The cores of a thread, which alone is changed."""

    def change() -> set[int]:
        pin_to_core(rank, ranks)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(change).result()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not a Linux")
def test_ranks_take_cores_in_turn_where_they_are_more() -> None:
    cores = sorted(os.sched_getaffinity(0))
    many = len(cores) + 1
    assert [kept(rank, many) for rank in range(many)] == [{c} for c in [*cores, cores[0]]]
    assert kept(0, len(cores)) == set(cores)
    assert sorted(os.sched_getaffinity(0)) == cores
