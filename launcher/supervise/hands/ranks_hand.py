"""The hand of ranks: processes (local_ranks.py), or all in this one (VirtualRanks)."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from flowrun.engine.errors import RunError
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.ranks.failure import describe
from flowrun.launcher.ranks.finite import NotFinite
from flowrun.launcher.ranks.rank_events import Failure, Reason
from flowrun.launcher.ranks.snapshot_memory import SnapshotMemory
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.virtual_run import train
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.report.record import Record
from flowrun.launcher.supervise.hands.desk import Desk, Interrupted
from flowrun.launcher.supervise.hands.event_loop import Loop
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace
from flowrun.launcher.supervise.life.events import Frozen, RanksGone

_CLEAR_S = 0.01  # from one look to the next whether ranks have gone on from a halt


@dataclass(frozen=True, kw_only=True)
class Wires:
    """What ranks' hands need of the driver.

    waits: True while too many events wait.  host_of: names the host of a rank.
    """

    record: Record
    desk: Desk
    loop: Loop
    waits: Callable[[], bool]
    host_of: Callable[[int], str]


class RanksHand(ABC):
    """The ranks of this host, round by round.

    gate: of those that run.  snapshots: what they left in memory.  exception: what a user's code
    raised, which the run ends with.
    """

    def __init__(self, compiled: Compiled, wires: Wires) -> None:
        self.compiled, self.wires = compiled, wires
        self.gate: StepGate | None = None
        self.snapshots: SnapshotMemory | None = None
        self.exception: Exception | None = None

    @abstractmethod
    def fork(self, place: MeetingPlace) -> None:
        """Let ranks train; at the end RanksGone is posted."""

    @abstractmethod
    def kill(self) -> None:
        """End the ranks."""

    async def freeze(self) -> None:
        """Freeze the gate, once all ranks have gone on from the last halt; Frozen is posted.  A
        rank that was killed as it passed leaves it shut: the ranks end anyway.
        """
        gate = self.gate
        while gate and gate is self.gate:
            if gate.is_clear and gate.freeze(0):
                self.wires.loop.post(Frozen(gate.begun))
                return
            await asyncio.sleep(_CLEAR_S)


_FULL_S = 0.002  # from one look to the next whether fewer events wait


class VirtualRanks(RanksHand):
    """All ranks of the plan in this process: the main thread runs them."""

    _stops = False

    def fork(self, place: MeetingPlace) -> None:
        job, self._stops = self.compiled.job, False
        first = job.start.step if job.start else 0
        self.gate = StepGate.of_threads(self.compiled.training.plan.num_ranks, first)
        self.wires.desk.begin("training", self._run, yields_to=2)

    def kill(self) -> None:
        """Let the main thread stop at the next step; a second signal interrupts it."""
        self._stops = True

    def _run(self) -> None:
        assert self.gate is not None
        try:
            train(self.compiled, self.wires.record.run_folder, self._send, self.gate)
        except RunError as error:
            bad = error.steps if isinstance(error, NotFinite) else 0
            self.wires.loop.post(Failure(replace(describe(error), story=""), bad=bad))
        except (_Stopped, Interrupted):
            pass
        except Exception as error:  # of a user's code
            self.exception = error
            self.wires.loop.post(Failure(Reason("the virtual cluster", repr(error))))
        finally:
            self.gate = None
            self.wires.loop.post(RanksGone())

    def _send(self, event: Notice) -> None:
        self.wires.loop.post(event)
        while self.wires.waits() and not self._stops:
            time.sleep(_FULL_S)
        if self._stops:
            raise _Stopped


class _Stopped(Exception):
    """The main thread is to train no further."""
