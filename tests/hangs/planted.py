"""Faults that leave a run hanging, planted in one of its ranks: the data set of `plant.py`.

They replace functions of flowrun in the launcher, before ranks are forked.  In rank 1 the fault
strikes once, and the file `struck` in the working directory says when.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowrun.engine.actors.plan import BOX, SEND, RegionWork
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.engine.runtime.transport.host_peers import WRITTEN, HostPeer
from flowrun.launcher.ranks.rank_saves import RankSaves
from flowrun.launcher.ranks.worker import RankProcess
from flowrun.launcher.report import record

ACT = 6  # of an actor, from which the fault strikes
LONG_S = 3600.0


def strikes() -> bool:
    """Return whether the fault strikes now, and note when: in rank 1, once."""
    if os.environ.get("RANK") != "1" or Path("struck").exists():
        return False
    Path("struck").write_text(str(time.time()))
    return True


def wrap(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function of a class or module; `instead` takes the old one first."""
    before = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: instead(before, *arguments, **options))


def sleep() -> None:
    time.sleep(LONG_S)


def spin() -> None:
    while True:
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_compute(do: Callable[[], None], evaluation: bool = False) -> Callable[[], None]:
    """Return what plants a fault into the compute of a region, of training or evaluation."""

    def compute(before: Any, self: DistributedRank, actor: Any, act: int) -> None:
        trains = any(v.kind == "state" for v in self.plan.variables.values())
        late = act >= (ACT if trains else 0)
        if isinstance(actor.work, RegionWork) and trains != evaluation and late and strikes():
            self.pulse.begin(actor.id, act)
            do()
        before(self, actor, act)

    return lambda: wrap(DistributedRank, "_compute", compute)


def slow_down() -> None:
    """Let each act of compute of rank 1 take 10 ms longer."""

    def compute(before: Any, self: DistributedRank, actor: Any, act: int) -> None:
        if self.rank == 1:
            strikes()
            time.sleep(0.01)
        before(self, actor, act)

    wrap(DistributedRank, "_compute", compute)


def in_issue(do: Callable[[], None], after: bool = False) -> Callable[[], None]:
    """Return what plants a fault before, or after, a collective is issued."""

    def issue(before: Any, self: DistributedRank, actor: Any, act: int) -> None:
        struck = actor.kind == BOX and act >= ACT and strikes()
        if struck and not after:
            do()
            return
        before(self, actor, act)
        if struck:
            do()

    return lambda: wrap(DistributedRank, "_issue", issue)


def in_callback() -> None:
    """Sleep between two acts, where an act has ended."""

    def end(before: Any, self: DistributedRank, scheduler: Any, actor: Any, act: int) -> None:
        before(self, scheduler, actor, act)
        if act >= ACT and strikes():
            sleep()

    wrap(DistributedRank, "_end", end)


def lose_message() -> None:
    """Lose a message: it is written, and the other rank is not woken for it."""
    sent = 0

    def notify(before: Any, self: HostPeer, what: int, *rest: int, **where: int) -> None:
        nonlocal sent
        sent += what == WRITTEN
        if not (what == WRITTEN and sent > 20 and strikes()):
            before(self, what, *rest, **where)

    wrap(HostPeer, "notify", notify)


def send_wrong_shape() -> None:

    def inputs(before: Any, self: Rank, actor: Any, act: int) -> list[torch.Tensor]:
        found = before(self, actor, act)
        if actor.kind in (BOX, SEND) and act >= ACT and strikes():
            return [value.flatten()[: value.numel() // 2] for value in found]
        return list(found)

    wrap(Rank, "inputs", inputs)


def before_call(owner: type, name: str) -> Callable[[], None]:
    """Return what plants a sleep before a method of a class."""

    def instead(before: Any, *arguments: Any) -> Any:
        if strikes():
            sleep()
        return before(*arguments)

    return lambda: wrap(owner, name, instead)


def block_disk() -> None:
    """Write the checkpoint to a pipe that nobody reads."""

    def write(before: Any, *arguments: Any, **options: Any) -> Any:
        if strikes():
            os.mkfifo("pipe")
            Path("pipe").open("wb").close()
        return before(*arguments, **options)

    wrap(logical_checkpoint, "write", write)


def block_launcher() -> None:
    """Let the launcher's main thread wait for a disk, where it completes a checkpoint."""

    def complete(*_: Any, **__: Any) -> None:
        Path("struck").write_text(str(time.time()))
        sleep()

    wrap(record, "complete", complete)


PLANTS: dict[str, Callable[[], None]] = {
    "sleeps": in_compute(sleep),
    "spins": in_compute(spin),
    "stops": in_compute(stop),
    "skips": in_issue(lambda: None),
    "loses": lose_message,
    "shape": send_wrong_shape,
    "dies": in_issue(die, after=True),
    "between": in_callback,
    "meets": before_call(RankProcess, "run"),
    "makes": before_call(RankProcess, "_body"),
    "evaluates": in_compute(sleep, evaluation=True),
    "disk": block_disk,
    "completes": block_launcher,
    "saves": before_call(RankSaves, "save_checkpoint"),
    "reads": lambda: None,  # below
    "frozen": lambda: None,  # plant.py
    "cut": lambda: None,
    "slow": slow_down,
}


class Samples:
    """Samples of random numbers; plant: the fault."""

    def __init__(self, plant: str = "") -> None:
        self.plant = plant
        self.read = 0
        if plant:
            PLANTS[plant]()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read += 1
        if self.plant == "reads" and self.read > 28 and strikes():
            sleep()
        made = torch.Generator().manual_seed(index)
        return {"images": torch.rand(8, generator=made), "labels": torch.tensor(index % 4)}
