import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.launcher.job import forked as module
from flowrun.launcher.job import job_plans
from flowrun.launcher.job.forked import run_in_fork, start_fork
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.job_plans import JobPlans
from flowrun.launcher.recipe.compose import load


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two cores and in a process of one thread, whatever the tests before left running, with
    a torch that is not built for GPUs.
    """
    monkeypatch.setattr(module, "may_fork", lambda: True)
    monkeypatch.setattr(job_plans, "forks_autograd", lambda: False)


@pytest.mark.processes
def test_the_result_is_made_by_another_process() -> None:
    with start_fork(lambda: (os.getpid(), "x" * 1_000_000)) as result:
        process, long = result()
    assert process not in (0, os.getpid())
    assert len(long) == 1_000_000


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: 1 / 0, ZeroDivisionError),
        (lambda: threading.Lock(), TypeError),
        (lambda: fail(Unpicklable(1, 2)), RunError),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RunError),
    ],
    ids=["an error", "no pickle", "an error that no pickle makes again", "killed"],
)
def test_what_fails_there_fails_here(
    make: Callable[[], object], error: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    with start_fork(make) as result, pytest.raises(error):
        result()
    assert capfd.readouterr() == ("", "")


class Unpicklable(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} of {other}")


def fail(error: Exception) -> None:
    raise error


@pytest.mark.processes
def test_who_does_not_wait_leaves_no_process_behind() -> None:
    read, write = os.pipe()
    with pytest.raises(KeyboardInterrupt), start_fork(lambda: threading.Event().wait()):
        os.close(write)  # the other copy is the process's
        raise KeyboardInterrupt
    assert os.read(read, 1) == b""
    os.close(read)


def test_beside_other_threads_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with start_fork(os.getpid, here=True) as result:
            assert result() == os.getpid()
    finally:
        ended.set()
        other.join()


@pytest.mark.processes
def test_the_plan_of_an_evaluation_captured_there_is_the_same(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    recipe = load(["recipe=small", "launch=virtual", "engine.cache=false"])
    here: list[JobPlans] = []  # those that captured evaluation in this process
    capture = JobPlans._capture_evaluation

    def capture_here(plans: JobPlans) -> LogicalGraph:
        here.append(plans)
        return capture(plans)

    monkeypatch.setattr(JobPlans, "_capture_evaluation", capture_here)
    there = Job(recipe).plans.compiled
    assert not here
    monkeypatch.setattr(module, "may_fork", lambda: False)
    assert Job(recipe).plans.compiled == there
    assert len(here) == 1


# ---- started, apart ------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("may_fork", [True, False])
def test_an_error_of_what_was_started_is_an_error_here(
    monkeypatch: pytest.MonkeyPatch, may_fork: bool
) -> None:
    monkeypatch.setattr(module, "may_fork", lambda: may_fork)

    with start_fork(os.getpid) as result:
        assert result() != os.getpid()
    wrong = RecipeError("model", "it has no layers.", "Add one.")
    with start_fork(lambda: fail(wrong)) as result, pytest.raises(RecipeError) as raised:
        result()
    assert (raised.value.problem, raised.value.instead) == (wrong.problem, wrong.instead)


@pytest.mark.processes
def test_tensors_made_apart_outlive_the_process() -> None:
    made = run_in_fork(lambda: [torch.full((1000,), float(k)) for k in range(50)])
    assert [float(x.sum()) for x in made] == [1000.0 * k for k in range(50)]


CAPTURES_NOTHING = """
import os, sys
import torch
from torch._functorch import aot_autograd
from flowrun.launcher.recipe import device
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

gpus, *names = sys.argv[1:]
device._num_gpus = lambda: int(gpus)
torch.backends.cuda.is_built = lambda: True
here, capture = os.getpid(), aot_autograd.aot_export_joint_with_descriptors

def elsewhere(*arguments, **named):
    assert os.getpid() != here
    return capture(*arguments, **named)

aot_autograd.aot_export_joint_with_descriptors = elsewhere
for name in names:
    job = Job(load(["recipe=small", "engine.cache=false", f"launch.device={name}"]))
    training, evaluation = job.plans.compiled
    assert job.device_type == name and job.training is training and evaluation is not None
print("ok")
"""


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [("8", "cpu", "cuda"), pytest.param(("0", "cpu"), marks=pytest.mark.thorough)],
    ids=["GPUs", "built for GPUs"],
)
def test_who_may_fork_ranks_for_gpus_captures_nothing_itself(
    place: Path, words: tuple[str, ...]
) -> None:
    """Capture runs autograd, which opens CUDA: no fork of that process could use either."""
    found = subprocess.run(
        [sys.executable, "-c", CAPTURES_NOTHING, *words],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (found.stdout, found.returncode) == ("ok\n", 0), found.stderr
