"""Launcher and ranks killed at once: the last complete checkpoint goes on.  With one host, see
test_slurm.py.
"""

import signal
from pathlib import Path

import pytest
import torch

from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_all
from support.runs.command import Command, free_port, losses, run_folder

pytestmark = pytest.mark.processes

STEPS, EVERY = 40, 8
RUN = (
    *("recipe=small", f"train.steps={STEPS}", f"train.save_every={EVERY}"),
    *("train.keep=0", "eval.batches=0", "optim=adamw"),
)


def test_a_run_that_is_killed_goes_on_on_two_hosts_with_one_disk(place: Path) -> None:
    whole, killed = place / "whole", place / "killed"
    assert Command(place, *RUN, run_folder(whole)).end().status == 0
    run = Command(place, *RUN, run_folder(killed))
    run.until(f"step {2 * EVERY}/")
    assert run.signal(signal.SIGKILL, group=True).status == -signal.SIGKILL

    # What was complete is there.
    saved = [checkpoint.step for checkpoint in find_all(killed)]
    first = saved[-1]
    assert saved == list(range(EVERY, first + 1, EVERY))  # the next one was being written
    assert first < STEPS
    assert losses(killed)[:first] == losses(whole)[:first]
    assert not (killed / "report.json").exists()

    # It goes on as if it had not been killed, bit for bit.
    meet = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    hosts = [Command(place, "resume", str(killed), *meet) for _ in range(2)]
    assert [(ended.status, ended.err) for ended in map(Command.end, hosts)] == [(0, "")] * 2
    assert losses(killed) == losses(whole)
    assert losses(killed / "host1") == losses(whole)[first:]
    found, expected = weights.load(killed), weights.load(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    every = list(range(EVERY, STEPS + 1, EVERY))
    assert [checkpoint.step for checkpoint in find_all(killed)] == every
