import subprocess
import sys

import pytest

from flowrun.engine.runtime.process import heap

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(heap._glibc() is None, reason="glibc alone can be told"),
]

_FAULTS = """
import ctypes
import resource
from flowrun.engine.runtime.process import heap

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault brings a page of 4 kB

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


_GROWTH = """
import ctypes
import torch
from flowrun.engine.runtime.process import heap

{first}
heap.keep_pages()

class Info(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [(str(k), ctypes.c_size_t) for k in range(10)]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
size = 1 << 22
one, beside, two = torch.empty(size), torch.empty(1000), torch.empty(size)
begin = getattr(info(), "0")  # bytes of the heap
for _ in range(20):
    del one
    one = torch.empty(size)
    del two
    two = torch.empty(size)
print((getattr(info(), "0") - begin) // (4 * size))
"""


@pytest.mark.skipif(
    heap._glibc() is not None and not hasattr(heap._glibc(), "mallinfo2"), reason="glibc 2.33"
)
def test_a_tensor_fits_where_one_of_its_size_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that come and go, 20 times.

    Other allocations may take a piece of a free place, so that 2 more were needed; by malloc's own
    cache it is 7 to 13, and by chance of addresses 1.
    """
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert _growth("heap.reexec_with_tunables()") <= 4


def test_what_the_user_told_malloc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import os
from flowrun.engine.runtime.process import heap
heap.reexec_with_tunables()
print(os.environ["GLIBC_TUNABLES"])
"""
    told = "glibc.malloc.perturb=0"
    for given in (told, f"{told}:glibc.malloc.tcache_count=3"):
        monkeypatch.setenv("GLIBC_TUNABLES", given)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        count = "" if "tcache" in given else ":glibc.malloc.tcache_count=0"
        assert ran.stdout.strip() == given + count, ran.stderr


def _growth(first: str) -> int:
    """Tensors for which the heap has grown."""
    program = _GROWTH.format(first=first)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)
