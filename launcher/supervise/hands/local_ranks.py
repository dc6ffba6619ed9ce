"""launch=local: one process a rank, forked from this one, which has captured and planned."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context

from flowrun.engine.runtime.drivers.pulse import Pulses
from flowrun.engine.runtime.process.outputs import ProcessOutputs
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.ranks.pipes import EventReader
from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.ranks.snapshot_memory import SnapshotMemory, map_snapshots
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.ranks.worker import Worker
from flowrun.launcher.report.record import LOGS, Record
from flowrun.launcher.supervise.hands.desk import Desk
from flowrun.launcher.supervise.hands.forks import RankProcesses
from flowrun.launcher.supervise.hands.newest_state import place_of
from flowrun.launcher.supervise.hands.watch import Watch, find_limit, find_silence
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace
from flowrun.launcher.supervise.hosts.meeting import ranks_of_a_host
from flowrun.launcher.supervise.life.events import (
    Frozen,
    HangSeen,
    RankDied,
    RanksForked,
    RanksGone,
)
from flowrun.launcher.terminal.console import STDERR, STDOUT

_LOOK_S = 0.05  # from one look at the processes to the next
_CLEAR_S = 0.02  # from one look to the next whether ranks have gone on from a halt
_PATIENCE_S = 5.0  # a rank holds the gate's lock for a microsecond, unless it was killed within
_GONE_S = 30.0  # after which processes that were killed should have ended


@dataclass(frozen=True, kw_only=True)
class Wires:
    """What ranks' hands need of the driver.

    record: of the run.  desk: the main thread.  post: takes events.  waits: True while too many
    events wait.  host_of: names the host of a rank.  own: see Watch.
    """

    record: Record
    desk: Desk
    post: Callable[[Notice], None]
    waits: Callable[[], bool]
    host_of: Callable[[int], str]
    own: Callable[[], tuple[float, str]]


@dataclass(kw_only=True)
class _Forked:
    """The processes of a round, and what watches them."""

    processes: RankProcesses
    gate: StepGate
    outputs: ProcessOutputs
    pulses: Pulses
    stacks: Stacks
    readers: list[EventReader] = field(default_factory=list)
    watch: Watch | None = None
    killed_s: float | None = None


class LocalRanks:
    """The ranks of this host, round by round."""

    def __init__(self, compiled: Compiled, wires: Wires) -> None:
        self.compiled, self._wires = compiled, wires
        job, training = compiled.job, compiled.training
        self.count = ranks_of_a_host(training.plan.num_ranks, job.recipe.launch)
        self._limit_s = find_limit(job.recipe.launch.hang_s, training.rehearsal.step_s)
        self.snapshots: SnapshotMemory | None = map_snapshots(job, training, wires.record.note)
        self._round: _Forked | None = None
        self._following: asyncio.Task[None] | None = None

    def fork(self, place: MeetingPlace) -> None:
        """Fork the ranks, and follow them; RanksForked is posted, at the end RanksGone."""
        self._round = round_ = self._prepare(place.number * self.count)
        try:
            self._wires.desk.do_alone("forking ranks", lambda: self._fork(round_, place))
        finally:
            self._wires.post(RanksForked(place_of(self.compiled.job.start)))
            round_.watch = self._watch(round_)
            round_.watch.__enter__()
            self._following = asyncio.create_task(self._follow(round_))

    def kill(self) -> None:
        """Kill the ranks."""
        if self._round:
            self._round.killed_s = time.monotonic()
            self._round.processes.kill()

    async def freeze(self) -> None:
        """Freeze the gate, once all ranks have gone on from the last halt; Frozen is posted.  A
        rank that was killed as it passed leaves it shut: the ranks end anyway.
        """
        round_ = self._round
        while round_ and not round_.gate.is_clear:
            await asyncio.sleep(_CLEAR_S)
            if round_ is not self._round:
                return
        until = time.monotonic() + _PATIENCE_S
        while round_ and round_ is self._round and time.monotonic() < until:
            if round_.gate.freeze(0):
                self._wires.post(Frozen(round_.gate.begun))
                return
            await asyncio.sleep(_CLEAR_S)

    def open(self, halt: int | None, ends: int) -> None:
        """Open the gate.  halt, ends: see StepGate."""
        if self._round:
            self._round.gate.open(halt, ends)

    def _prepare(self, first: int) -> _Forked:
        job, count = self.compiled.job, self.count
        plans = [p.plan for p in (self.compiled.training, self.compiled.evaluation) if p]
        folder = self._wires.record.run_folder / LOGS
        logs = [folder / f"rank_{rank}.log" for rank in range(first, first + count)]
        return _Forked(
            processes=RankProcesses(first),
            gate=StepGate.make_shared(count, job.start.step if job.start else 0),
            outputs=ProcessOutputs(logs, (STDOUT, STDERR), self._wires.record.lose),
            pulses=Pulses(plans, count),
            stacks=Stacks(count),
        )

    def _fork(self, round_: _Forked, place: MeetingPlace) -> None:
        compiled, count = self.compiled, self.count
        pipes = [os.pipe() for _ in range(count)]
        round_.readers = [EventReader(reader) for reader, _ in pipes]
        worker = Worker(
            job=compiled.job,
            training=compiled.training,
            evaluation=compiled.evaluation,
            kernels=compiled.kernels,
            folder=self._wires.record.run_folder,
            launcher=os.getpid(),
            silence_s=find_silence(self._limit_s),
            gate=round_.gate,
            snapshots=self.snapshots,
            pipes=tuple(writer for _, writer in pipes),
            born=get_context("fork").Barrier(count),
            pulses=round_.pulses,
            stacks=round_.stacks,
            outputs=round_.outputs,
            interface=place.interface,
        )
        round_.outputs.__enter__()
        try:
            threads = compiled.job.recipe.launch.threads
            round_.processes.fork(worker.live, place, count, threads)
        finally:
            for _, writer in pipes:
                os.close(writer)

    def _watch(self, round_: _Forked) -> Watch:
        launch, wires = self.compiled.job.recipe.launch, self._wires
        return Watch(
            round_.pulses,
            round_.stacks,
            self._limit_s,
            folder=lambda: wires.record.folder,
            say=wires.record.note,
            fail=lambda error: wires.post(HangSeen(Reason(error.where, error.problem))),
            host_of=lambda rank: wires.host_of(rank // self.count),
            compares=self.compiled.job.device_type == "cpu",
            grows=launch.hang_s is None,
            own=wires.own,
        )

    async def _follow(self, round_: _Forked) -> None:
        """Take what ranks send, and notice when one has died, until all have gone."""
        loop = asyncio.get_running_loop()
        reading = {reader.pipe: reader for reader in round_.readers}
        for reader in round_.readers:
            loop.add_reader(reader.pipe, self._read, reader, reading)
        while True:
            for rank, how in round_.processes.poll():
                for reader in reading.values():
                    self._post_all(reader.read())  # why it died, first
                self._wires.post(RankDied(rank, how))
            if round_.processes.are_gone:
                break
            if round_.killed_s and time.monotonic() - round_.killed_s > _GONE_S:
                round_.killed_s = None
                self._wires.record.note("ranks that were killed have not ended yet")
            await asyncio.sleep(_LOOK_S)
        reading.clear()
        for reader in round_.readers:
            loop.remove_reader(reader.pipe)
            self._post_all(reader.drain())
            reader.close()
        self._round = None
        await self._wires.desk.do("closing logs", lambda: self._close(round_))
        self._wires.post(RanksGone())

    def _read(self, reader: EventReader, reading: dict[int, EventReader]) -> None:
        """Take what a rank has sent; where too much waits, ranks wait for a moment, too."""
        self._post_all(reader.read())
        loop = asyncio.get_running_loop()
        if reader.ended:
            reading.pop(reader.pipe, None)
            loop.remove_reader(reader.pipe)
        elif self._wires.waits():
            loop.remove_reader(reader.pipe)
            loop.call_later(_LOOK_S, self._read_again, reader, reading)

    def _read_again(self, reader: EventReader, reading: dict[int, EventReader]) -> None:
        if reader.pipe in reading and self._round:
            loop = asyncio.get_running_loop()
            loop.add_reader(reader.pipe, self._read, reader, reading)

    def _post_all(self, events: Iterator[Notice]) -> None:
        for event in events:
            self._wires.post(event)

    def _close(self, round_: _Forked) -> None:
        if round_.watch:
            round_.watch.__exit__()
        round_.outputs.__exit__(None, None, None)
