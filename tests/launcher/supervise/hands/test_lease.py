"""One run writes to a folder, also where several machines see it."""

import json
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.supervise.hands import lease as module
from flowrun.launcher.supervise.hands.lease import Lease, Owner

OTHER = Owner("node7", 1, 1, "")
OURS = Owner.of_this(1, "node0:1")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)


def hold(folder: Path, owner: Owner) -> Path:
    file = folder / module.FILE
    file.write_text(json.dumps(asdict(owner)))
    return file


def test_the_folder_of_a_run_of_another_machine_is_refused(tmp_path: Path) -> None:
    file, over = hold(tmp_path, OTHER), threading.Event()

    def renew() -> None:
        while not over.wait(0.01):
            os.utime(file)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(RecipeError, match="process 1 on node7"):
            Lease(tmp_path).take(OURS)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "before", [OTHER, replace(OURS, process=2**22 + 1)], ids=["not renewed", "dead"]
)
def test_a_lease_that_nobody_holds_is_taken(tmp_path: Path, before: Owner) -> None:
    hold(tmp_path, before)
    lease = Lease(tmp_path)
    lease.take(OURS)
    lease.renew()
    lease.release()
    assert not (tmp_path / module.FILE).exists()


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_the_lease_of_a_first_host_that_was_silent_is_taken_by_a_later_epoch(
    tmp_path: Path, epoch: int
) -> None:
    silent, other = Lease(tmp_path), replace(OURS, machine="node7", epoch=epoch)
    silent.take(replace(OURS, epoch=2))
    if epoch <= 2:
        with pytest.raises(RunError, match=r"process \d+ on .* has taken the folder of this run"):
            Lease(tmp_path).take(other, follows=True)
        silent.check()
        return
    Lease(tmp_path).take(other, follows=True)
    with pytest.raises(RunError, match="on node7 has taken the folder of this run"):
        silent.check()
    silent.check()  # said once


def test_a_first_host_that_wakes_after_the_run_has_ended_writes_nothing_more(
    tmp_path: Path,
) -> None:
    silent, other = Lease(tmp_path / "run"), Lease(tmp_path / "run")
    (tmp_path / "run").mkdir()
    silent.take(OURS)
    other.take(replace(OURS, machine="node7", epoch=2), follows=True)
    other.release()
    with pytest.raises(RunError, match="which has ended, has taken the folder"):
        silent.check()


def test_a_folder_that_another_has_taken_ends_the_run(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    lease.take(OURS)
    file = hold(tmp_path, OTHER)
    with pytest.raises(RunError, match="has taken the folder of this run"):
        lease.renew()
    lease.release()
    assert file.exists()


def test_a_renewed_lease_is_newer(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    lease.take(OURS)
    file = tmp_path / module.FILE
    os.utime(file, (0, 0))
    lease.renew()
    assert abs(file.stat().st_mtime - time.time()) < 60
