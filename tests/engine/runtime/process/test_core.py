import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowrun.engine.runtime.process.core import pin_near, pin_to_core

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not a Linux")


def kept(pin: Callable[..., None], *where: object) -> set[int]:
    """The cores of a thread, which alone is changed."""

    def change() -> set[int]:
        pin(*where)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(change).result()


def test_ranks_take_cores_in_turn_where_none_is_left_over() -> None:
    cores = sorted(os.sched_getaffinity(0))
    many = len(cores) + 1
    assert [kept(pin_to_core, rank, many) for rank in range(many)] == [
        {c} for c in [*cores, cores[0]]
    ]
    last = len(cores) - 1
    assert kept(pin_to_core, last, len(cores)) == {cores[-1]}
    assert kept(pin_to_core, last, len(cores), 2) == set(cores)  # of two threads each
    assert len(cores) == 1 or kept(pin_to_core, 0, last) == set(cores)
    assert sorted(os.sched_getaffinity(0)) == cores


def test_a_rank_on_cuda_keeps_to_its_cores_near_the_device(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    texts = {f"{cores[-1]}\n": {cores[-1]}, f"{cores[0]},{cores[-1]}-9999\n": {cores[0], cores[-1]}}
    texts |= {"9990-9999\n": set(cores), "\n": set(cores)}
    for text, expected in texts.items():
        (tmp_path / "0000:4b:00.0").mkdir(exist_ok=True)
        (tmp_path / "0000:4b:00.0" / "local_cpulist").write_text(text)
        assert kept(pin_near, "0000:4b:00.0", tmp_path) == expected, text
    assert kept(pin_near, "0000:00:00.0", tmp_path) == set(cores)
