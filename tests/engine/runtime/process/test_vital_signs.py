import os
import signal
import subprocess
import sys

import pytest

from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.engine.runtime.process.vital_signs import (
    ProcessWork,
    describe_halt,
    list_children,
    measure_work,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_a_process_that_a_signal_stopped_is_told_from_one_that_sleeps() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert describe_halt(process.pid) == ""
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert describe_halt(process.pid) == "is stopped by a signal"
        process.kill()
    assert describe_halt(process.pid) == ""
    assert measure_work(process.pid) == ProcessWork(0.0, 0)


def test_a_process_that_waits_for_one_it_has_vforked_sleeps_in_the_kernel() -> None:
    waits = "import ctypes; c = ctypes.CDLL(None); c.vfork() or c.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", waits], start_new_session=True) as process:
        while not (found := describe_halt(process.pid)):
            assert process.poll() is None
        assert found.startswith("sleeps in the kernel (")
        os.killpg(process.pid, signal.SIGKILL)


def test_work_counts_seconds_of_the_processor_and_bytes() -> None:
    work = measure_work(os.getpid())
    assert work.cpu_s > 0
    assert work.num_bytes > 0


def test_a_process_that_has_no_core_is_seen_to_wait_for_one() -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}})"
    with (
        subprocess.Popen([sys.executable, "-c", f"{pinned}\nwhile True: pass"]) as busy,
        subprocess.Popen([sys.executable, "-c", f"{pinned}; os.nice(19)\nwhile True: pass"]) as low,
    ):
        while (work := measure_work(low.pid)).starved_s < 0.3:
            assert low.poll() is None
        low.kill()
        busy.kill()
    assert work.cpu_s < work.starved_s


def test_a_process_writes_its_stacks_when_it_is_asked() -> None:
    stacks = Stacks(2)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        stacks.register(1)
        os.write(told, b"!")
        signal.pause()
    os.read(ready, 1)
    found = stacks.collect({1: child})
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    stacks.close()
    assert "test_a_process_writes_its_stacks" in found[1]


def wait_in_child(told: int) -> None:
    os.write(told, b"!")
    signal.pause()


def test_the_children_of_a_process_write_theirs() -> None:
    """Those that run another program, which the signal would end, are left alone."""
    stacks = Stacks(1)
    ready, told = os.pipe()
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        stacks.register(0)
        subprocess.Popen(["sleep", "60"])
        if not os.fork():
            wait_in_child(told)
        signal.pause()
    os.read(ready, 1)
    own = stacks.collect({0: process})
    found = stacks.collect_children(0, process)
    children = list_children(process)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    stacks.close()
    assert "wait_in_child" not in own[0]
    assert ["wait_in_child" in text for text in found.values()] == [True]
    assert len(children) == 2
