"""What a launcher keeps does not grow with steps."""

import asyncio
import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.job.job import Job
from flowrun.launcher.listeners.make import NamedListener
from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report import record as records
from flowrun.launcher.report import report
from flowrun.launcher.report.record import Record
from flowrun.launcher.store.checkpoint import Checkpoint
from flowrun.launcher.supervise import driver as module
from flowrun.launcher.supervise.driver import Driver, supervising
from flowrun.launcher.supervise.hands.lease import Lease
from flowrun.launcher.supervise.hands.ranks_hand import RanksHand
from flowrun.launcher.supervise.hands.signals import Signals
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace
from flowrun.launcher.supervise.life import events as ev
from flowrun.launcher.supervise.life import instructions as do

BATCH = 100  # steps that ranks report at once
STEPS = (1000, 3000)
OPAQUE = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType)


def size_of(*roots: object) -> int:
    """The bytes of all objects that some lead to."""
    seen: dict[int, object] = {}
    found = list(roots)
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, OPAQUE):
            seen[id(each)] = each
            found += gc.get_referents(each)
    return sum(map(sys.getsizeof, seen.values()))


class ReportingRanks(RanksHand):
    """Ranks that report steps and a checkpoint after each, and train nothing.

    sizes: of what the driver keeps, after some steps.
    """

    driver: Driver
    sizes: tuple[int, ...] = ()

    def fork(self, place: MeetingPlace) -> None:
        self.wires.loop.begin(self._report())

    def kill(self) -> None:
        raise AssertionError("they do not fail")

    async def _report(self) -> None:
        for first in range(0, STEPS[-1], BATCH):
            for step in range(first, first + BATCH):
                self.wires.loop.post(said.StepDone(step, {"loss": 1.5}, 0.1, {"waited_s": 0.5}))
                for rank in range(self.driver.state.terms.num_ranks):
                    self.wires.loop.post(said.FileWritten(step + 1, f"rank{rank}", (1, 2)))
            while self.driver.record.reached < first + BATCH or self.driver.loop.events.qsize():
                await asyncio.sleep(0)
            if first + BATCH in STEPS:
                self.driver.listeners.end("restarted")  # all that waits for them is taken
                self.sizes += (measure(self.driver),)
        for rank in range(self.driver.state.terms.num_ranks):
            self.wires.loop.post(said.RankEnded(rank, {}))
        self.wires.loop.post(ev.RanksGone())


def measure(driver: Driver) -> int:
    """The bytes that a driver keeps, without what is made before the first step."""
    known = ("job", "asked")
    record = {name: each for name, each in vars(driver.record).items() if name not in known}
    kept: dict[str, Any] = {**vars(driver.loop), "loop": None, "_tasks": None}
    return size_of(driver.state, driver.ledger, driver.listeners, record, kept)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    keys = ["recipe=mlp_data_parallel", f"train.steps={STEPS[-1]}", "train.save_every=1"]
    job = Job(load(keys), values=False)
    monkeypatch.setattr(report, "_STEPS_KEPT", BATCH)
    monkeypatch.setattr(
        records, "complete", lambda folder, about, *_, **__: Checkpoint(tmp_path, about.step)
    )
    monkeypatch.setattr(module, "LocalRanks", ReportingRanks)
    compiled = Compiled(job=job, training=job.training, evaluation=None, kernels=None)  # type: ignore[arg-type]
    record = Record(tmp_path / "run", job, None)
    named = [NamedListener("silent", object(), may_end=False)]
    made = Driver(record, compiled, named, None, Lease(record.run_folder))  # type: ignore[arg-type]
    assert isinstance(made.ranks, ReportingRanks)
    made.ranks.driver = made
    record.begin()
    yield made
    record.close()


def test_a_launcher_keeps_the_same_bytes_after_any_number_of_steps(driver: Driver) -> None:
    with supervising(driver, Signals()) as end:
        pass
    assert (end.status, end.fault) == (do.COMPLETE, None)
    assert isinstance(driver.ranks, ReportingRanks)
    first, last = driver.ranks.sizes
    assert last - first < STEPS[1] - STEPS[0], "more than a byte a step"


def test_a_planted_list_of_steps_is_seen(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    before = driver._publish

    def publish(event: said.StepDone) -> None:
        driver.record.lost.append(f"step {event.step}")
        before(event)

    monkeypatch.setattr(driver, "_publish", publish)
    with supervising(driver, Signals()):
        pass
    assert isinstance(driver.ranks, ReportingRanks)
    first, last = driver.ranks.sizes
    assert last - first > 8 * (STEPS[1] - STEPS[0])
