import sys

import pytest

from flowrun.engine.runtime.process.process_memory import most_taken, taken

_MB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_counted_when_touched_and_remembered_when_given_back() -> None:
    before = taken()
    held = bytearray(b"\1") * (64 * _MB)
    during = taken()
    del held
    assert 63 * _MB < during - before < 66 * _MB
    assert taken() < during - 63 * _MB
    assert most_taken() > during - _MB  # counters of single cores are added up now and then
