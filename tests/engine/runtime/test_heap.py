"""engine/runtime/heap.py, in a process of its own: what it asks of malloc holds for all of it."""

import subprocess
import sys

import pytest

from flowrun.engine.runtime import heap

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(heap._glibc() is None, reason="glibc alone can be told"),
]

_FAULTS = """
import resource
from flowrun.engine.runtime import heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        bytes = bytearray({size})  # malloc's, all written
        del bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{first}
print(faults(), faults())
"""
_SIZE = 48 << 20  # more than malloc ever maps by a threshold of its own
_PAGES = _SIZE // 4096


def _faults(first: str) -> tuple[int, int]:
    """Page faults of three buffers, one after the other; of three more."""
    program = _FAULTS.format(size=_SIZE, first=first)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    begin, end = map(int, ran.stdout.split())
    return begin, end


def test_by_default_every_large_buffer_is_faulted_in_again() -> None:
    assert min(_faults("")) > 2 * _PAGES


def test_kept_pages_are_faulted_in_once() -> None:
    begin, end = _faults("assert heap.keep_pages()")
    assert _PAGES * 0.9 < begin < 1.1 * _PAGES
    assert end < _PAGES * 0.01
