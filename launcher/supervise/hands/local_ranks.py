"""launch=local: one process a rank, forked from this one, which has captured and planned.

The launcher forks them itself, with the variables that torch.distributed reads.  They must be
forked by the main thread: the kernel ends a child whose parent's thread has ended
(engine/runtime/process/lifetime.py).
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

from flowrun.engine.runtime.drivers.pulse import Pulses
from flowrun.engine.runtime.process.outputs import ProcessOutputs
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.ranks.failure import describe_exit
from flowrun.launcher.ranks.snapshot_memory import map_snapshots
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.wire import EventReader, Notice
from flowrun.launcher.ranks.worker import Worker
from flowrun.launcher.store.run_files import LOGS
from flowrun.launcher.supervise.hands.event_loop import find_quiet
from flowrun.launcher.supervise.hands.ranks_hand import RanksHand, Wires
from flowrun.launcher.supervise.hands.watch import Watch, find_limit, find_silence
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace
from flowrun.launcher.supervise.hosts.meeting import ranks_of_a_host
from flowrun.launcher.supervise.life.events import HangSeen, RankDied, RanksGone
from flowrun.launcher.terminal.console import STDERR, STDOUT

_LOOK_S = 0.05  # from one look at the processes to the next
_PAUSE_S = 0.01  # from one reading of a rank's pipe to the next
_GONE_S = 30.0  # after which processes that were killed should have ended


@dataclass(kw_only=True)
class _Forked:
    """The processes of a round, and what watches them.

    closing: of their logs and the watch.  readers: of those that may say more.
    """

    processes: RankProcesses
    outputs: ProcessOutputs
    pulses: Pulses
    stacks: Stacks
    closing: ExitStack = field(default_factory=ExitStack)
    readers: list[EventReader] = field(default_factory=list)
    killed_s: float | None = None


class LocalRanks(RanksHand):
    """The ranks of this host, a process each."""

    def __init__(self, compiled: Compiled, wires: Wires) -> None:
        super().__init__(compiled, wires)
        job, training = compiled.job, compiled.training
        self._count = ranks_of_a_host(training.plan.num_ranks, job.recipe.launch)
        self._limit_s = find_limit(job.recipe.launch.hang_s, training.rehearsal.step_s)
        self.snapshots = map_snapshots(job, training, wires.record.note)
        self._round: _Forked | None = None

    def fork(self, place: MeetingPlace) -> None:
        start, count, record = self.compiled.job.start, self._count, self.wires.record
        first, logs = place.number * count, record.run_folder / LOGS
        files = [logs / f"rank_{rank}.log" for rank in range(first, first + count)]
        self._round = round_ = _Forked(
            processes=RankProcesses(first),
            outputs=ProcessOutputs(files, (STDOUT, STDERR), record.lose),
            pulses=Pulses(self.compiled.plans, count),
            stacks=Stacks(count),
        )
        self.gate = gate = StepGate.make_shared(count, start.step if start else 0)
        try:
            self.wires.desk.do_alone("forking ranks", lambda: self._fork(round_, gate, place))
        finally:
            self.wires.loop.begin(self._follow(round_, self._watch(round_)))

    def kill(self) -> None:
        if self._round:
            self._round.killed_s = time.monotonic()
            self._round.processes.kill()

    def _fork(self, round_: _Forked, gate: StepGate, place: MeetingPlace) -> None:
        compiled, count = self.compiled, self._count
        pipes = [os.pipe() for _ in range(count)]
        round_.readers = [EventReader(reader) for reader, _ in pipes]
        worker = Worker(
            compiled=compiled,
            folder=self.wires.record.run_folder,
            launcher=os.getpid(),
            limit_s=self._limit_s,
            silence_s=find_silence(self._limit_s),
            gate=gate,
            snapshots=self.snapshots,
            pipes=tuple(writer for _, writer in pipes),
            born=get_context("fork").Barrier(count),
            pulses=round_.pulses,
            stacks=round_.stacks,
            outputs=round_.outputs,
            interface=place.interface,
        )
        round_.closing.enter_context(round_.outputs)
        try:
            round_.processes.fork(worker.live, place, count, compiled.job.recipe.launch.threads)
        finally:
            for _, writer in pipes:
                os.close(writer)

    def _watch(self, round_: _Forked) -> Watch:
        wires, job = self.wires, self.compiled.job
        return Watch(
            pulses=round_.pulses,
            stacks=round_.stacks,
            limit_s=self._limit_s,
            folder=lambda: wires.record.folder,
            say=wires.record.note,
            fail=lambda fault: wires.loop.post(HangSeen(fault)),
            host_of=lambda rank: wires.host_of(rank // self._count),
            compares=job.device_type == "cpu",
            grows=job.recipe.launch.hang_s is None,
            own=partial(find_quiet, wires.desk, wires.loop),
        )

    async def _follow(self, round_: _Forked, watch: Watch) -> None:
        """Take what ranks send, and notice when one has died, until all have gone."""
        round_.closing.enter_context(watch)
        for reader in round_.readers:
            self._listen(round_, reader)
        while True:
            for rank, how in round_.processes.poll():
                for reader in round_.readers:
                    self._post_all(reader.read())  # why it died, first
                self.wires.loop.post(RankDied(rank, how))
            if round_.processes.are_gone:
                break
            if round_.killed_s and time.monotonic() - round_.killed_s > _GONE_S:
                round_.killed_s = None
                self.wires.record.note("ranks that were killed have not ended yet")
            await asyncio.sleep(_LOOK_S)
        self._round = self.gate = None
        for reader in round_.readers:
            asyncio.get_running_loop().remove_reader(reader.pipe)
            self._post_all(reader.drain())
            reader.close()
        await self.wires.desk.do("closing logs", round_.closing.close)
        self.wires.loop.post(RanksGone())

    def _listen(self, round_: _Forked, reader: EventReader) -> None:
        if round_ is self._round and not reader.ended:
            loop = asyncio.get_running_loop()
            loop.add_reader(reader.pipe, self._read, round_, reader)

    def _read(self, round_: _Forked, reader: EventReader) -> None:
        """Take what a rank has sent, and pause, so that short steps do not take a core from a rank
        each.  Where too much waits, ranks wait, too.
        """
        self._post_all(reader.read())
        loop = asyncio.get_running_loop()
        loop.remove_reader(reader.pipe)
        pause_s = _LOOK_S if self.wires.waits() else _PAUSE_S
        loop.call_later(pause_s, self._listen, round_, reader)

    def _post_all(self, events: Iterator[Notice]) -> None:
        for event in events:
            self.wires.loop.events.put_nowait(event)


class RankProcesses:
    """Processes of this host, by number among them.  first: the rank of the first."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._processes: list[BaseProcess] = []
        self._ended: set[int] = set()  # their numbers

    def fork(
        self,
        live: Callable[[Mapping[str, str]], None],
        place: MeetingPlace,
        count: int,
        threads: int,
    ) -> None:
        """Fork all of them.

        live: what each does, from its first line to its exit, with these variables.

        Neither this process nor a rank looks for garbage among what is there now, graphs and plans.
        To look is to write to each object: every rank would copy all their pages, 0.4 s of its
        first steps for a GPT of 4 blocks on 4 ranks.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        context = get_context("fork")
        gc.freeze()
        try:
            for local in range(count):
                variables, name = _variables(place, local, count), f"rank {self.first + local}"
                process = context.Process(target=live, args=(variables,), name=name)
                process.start()
                self._processes.append(process)
        finally:
            gc.unfreeze()

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield the ranks that have ended badly since the last call, and how."""
        for number, process in enumerate(self._processes):
            if number not in self._ended and (status := process.exitcode) is not None:
                self._ended.add(number)
                if status:
                    yield self.first + number, describe_exit(status)

    @property
    def are_gone(self) -> bool:
        return len(self._ended) == len(self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def _variables(place: MeetingPlace, local: int, count: int) -> dict[str, str]:
    """Return what torch.distributed reads of the environment (init_method env://)."""
    return {
        "RANK": str(place.number * count + local),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(place.number),
        "WORLD_SIZE": str(place.num_hosts * count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": str(place.num_hosts),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher's: no rank opens one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "flowrun",
    }
