"""Copies of this host's state in its neighbour's memory, and of the other neighbour's in its own.

Which step is copied, and when a copy may be written over, is decided in aims.py; this file moves
the bytes.  A thread of low priority of the launcher looks at the stamps of the ranks' memory, and
sends what is whole to the next host of the ring, over a connection whose two ends have proved to
know FLOWRUN_TOKEN (hosts/channel.py).  The bytes go from memory to memory; nothing is unpickled.
What ranks of both hosts hold alike, as they divide a batch, is not sent.

The connection and the memory are those of one round.  When its ranks have ended the thread ends,
and what lies in memory is this host's Holding until the next round begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.rank.pieces import count_bytes, count_copied_bytes, find_lent
from flowrun.launcher.launch.hosts.alone import Alone
from flowrun.launcher.launch.hosts.channel import (
    JsonChannel,
    Stranger,
    WrongToken,
    attend,
    connect,
    end_tasks,
)
from flowrun.launcher.launch.hosts.holdings import Holding, Steps
from flowrun.launcher.launch.hosts.hosts import Hosts
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace
from flowrun.launcher.launch.restart.aims import Aims
from flowrun.launcher.launch.restart.restarts import write_rank
from flowrun.launcher.launch.restart.snapshot_memory import (
    SnapshotMemory,
    find_interval,
    find_shortage,
)
from flowrun.launcher.launch.restart.stamps import NONE
from flowrun.launcher.report.record import Record
from flowrun.launcher.store import checkpoint as checkpoints

_NICE = 5  # ranks that have use for the core come first, and a step is copied within the next
_LOOK_S = 0.005  # from one look at the stamps to the next, at least
_LONGEST_LOOK_S = 0.05
_LOOKS_IN_A_STEP = 10  # which costs about 0.5 % of a core
_PART = 1 << 20  # bytes that are sent or taken at a time
_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """The ring in which the hosts of a plan copy their states.

    every: steps from one to the next.  hosts, local_ranks: the ring.
    """

    every: int
    hosts: int
    local_ranks: int

    def ranks_of(self, host: int) -> range:
        """The ranks of a host; numbers go round."""
        first = host % self.hosts * self.local_ranks
        return range(first, first + self.local_ranks)


def plan_copies(record: Record, training: Rehearsed, hosts: int) -> CopyPlan | None:
    """Plan copies, where the recipe wants them and this host has the memory.

    record: takes a note where it has not.  training: the plan.  hosts: the ring.
    """
    job, plan = record.job, training.plan
    if not (every := find_interval(job)):
        return None
    ring = CopyPlan(every=every, hosts=hosts, local_ranks=plan.num_ranks // hosts)
    copied = count_copied_bytes(plan, hosts)
    for host in range(hosts):  # this one may come to be any
        own = sum(count_bytes(plan, rank, {}) for rank in ring.ranks_of(host))
        needed = 2 * (own + copied[host - 1])
        if why := find_shortage(job, training, ring.ranks_of(host), needed):
            record.note(
                f"train.snapshot_every: snapshots and copies {why}; what was done since the newest"
                " checkpoint is lost with a host."
            )
            return None
    return ring


class Copies:
    """The copies of one round, on one host.

    own: memory of the snapshots of its ranks.  votes: events of other hosts.  saved, files: see
    Holding.
    """

    def __init__(
        self,
        record: Record,
        ring: CopyPlan,
        plan: Plan,
        place: MeetingPlace,
        hosts: Hosts | Alone,
        votes: SimpleQueue[tuple[int, tuple[Any, ...]]],
    ) -> None:
        """record: of the run.  ring, plan: what is copied.  place: of the round.  hosts: this
        launcher among the others.  votes: what comes from those.
        """
        self.record, self.plan, self.place, self.votes = record, plan, place, votes
        self.hosts, self.number, self.listener = hosts, place.number, hosts.listener
        self.own = SnapshotMemory(plan, ring.every, ring.ranks_of(self.number), aimed=True)
        before = ring.ranks_of(self.number - 1) if place.num_hosts > 1 else range(0)
        self.copy = SnapshotMemory(plan, ring.every, before, aimed=True, lender=self.own)
        after = ring.ranks_of(self.number + 1) if place.num_hosts > 1 else range(0)
        self.lent = find_lent(plan, ring.ranks_of(self.number), after)
        first = record.first
        self.aims = Aims.begin(place.num_hosts, ring.every, first)
        self.own.stamps.aim(first, self.aims.target)
        self.saved, self.files = NONE, tuple[tuple[int, int, int], ...]()
        self._steps: Steps = ()

    # ---- while ranks train -----------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copy while the ranks of a round train."""
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._run())
        thread = threading.Thread(target=_live, args=(loop, task), name="copies", daemon=True)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()

    async def _run(self) -> None:
        works = [self._vote()]
        if self.place.num_hosts > 1:
            works += [self._while_it_lasts(self._send_copies)]
            works += [self._while_it_lasts(self._take_copies)]
        await asyncio.gather(*works)

    async def _while_it_lasts(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work until the neighbour closes the connection, as its ranks have ended."""
        try:
            await work()
        except (ConnectionError, EOFError):
            pass
        except (OSError, ValueError, TypeError, Stranger, WrongToken) as error:
            self.record.note(
                f"copies between hosts have stopped: {error}; what is lost with a host is what was"
                f" done since step {self.own.stamps.aims[0]}"
            )

    async def _vote(self) -> None:
        """Take what other hosts say, and say what becomes of the target here."""
        stamps, answered = self.own.stamps, NONE
        while True:
            try:
                while True:
                    self._hear(*self.votes.get_nowait())
            except Empty:
                pass
            target = stamps.aims[1]
            if answered != target and stamps.is_missed:
                answered = target
                self._tell("missed", target)
            elif answered != target and self.place.num_hosts == 1 and self._is_whole(target):
                answered = target
                self._tell("copied", target)
            await asyncio.sleep(self._look_s)

    @property
    def _look_s(self) -> float:
        last = self.record.steps.last
        return min(_LONGEST_LOOK_S, max(_LOOK_S, (last.step_s if last else 0) / _LOOKS_IN_A_STEP))

    def _hear(self, host: int, message: tuple[Any, ...]) -> None:
        word, name, step, *more = message
        if name != self.place.name:
            return  # a host has not left the round before yet
        if word == "aim":
            self.own.stamps.aim(int(step), int(more[0]))
        elif self.number == 0:
            before = self.aims
            self.aims = before.take(host, word, int(step), self.record.reached)
            if self.aims.target != before.target:
                self.own.stamps.aim(self.aims.kept, self.aims.target)
                self.hosts.broadcast("aim", name, self.aims.kept, self.aims.target)

    def _tell(self, word: str, step: int) -> None:
        self.hosts.broadcast(word, self.place.name, step)
        self.votes.put((self.number, (word, self.place.name, step)))

    def _is_whole(self, step: int) -> bool:
        """Return whether the ranks of this host hold a step whose results are written down."""
        stamps = self.own.stamps
        held = all(step in stamps.of(rank) for rank in stamps.updating)
        return held and self.record.reached >= step

    async def _send_copies(self) -> None:
        """Send each target, once it is whole, to the next host."""
        channel = await self._connect()
        sent = NONE
        try:
            while True:
                kept, target = self.own.stamps.aims
                if sent == target or not self._is_whole(target):
                    await asyncio.sleep(self._look_s)
                    continue
                sent = target
                channel.send(("copy", kept, target))
                for rank in self.own.stamps.ranks:
                    await self._send_rank(channel, rank, target)
                channel.send(("whole" if self._is_whole(target) else "torn", target))
                await channel.writer.drain()
        finally:
            channel.writer.transport.abort()

    async def _send_rank(self, channel: JsonChannel, rank: int, step: int) -> None:
        """Send what the next host does not hold of a rank."""
        raw = self.own.raw(rank, self.own.find_buffer(rank, step))
        for start, end in self.own.runs(rank, self.lent[rank]):
            for first in range(start, end, _PART):  # a copy: what waits in a socket may not change
                channel.writer.write(bytes(raw[first : min(end, first + _PART)]))
                await channel.writer.drain()

    async def _connect(self) -> JsonChannel:
        to = self.place.links[(self.number + 1) % self.place.num_hosts]
        assert to is not None
        try:
            channel = await connect(to.host, to.port, _CONNECT_S)
        except OSError as error:
            raise ValueError(f"the next host cannot be reached at {to}: {error!r}") from None
        await channel.greet_or_close(self.hosts.token)
        channel.send((self.place.name, self.number))
        return channel

    async def _take_copies(self) -> None:
        """Take the copies of the host before this one in the ring."""
        came: asyncio.Future[JsonChannel] = asyncio.get_running_loop().create_future()

        async def admit(channel: JsonChannel) -> None:
            is_taken = False
            try:
                await channel.greet(self.hosts.token, hub=True)
                before = (self.number - 1) % self.place.num_hosts
                if await channel.receive() == (self.place.name, before) and not came.done():
                    came.set_result(channel)
                    is_taken = True
            except (Stranger, WrongToken, OSError, EOFError, ValueError, TypeError):
                pass
            finally:
                if not is_taken:
                    channel.writer.transport.abort()

        assert self.listener is not None
        end_admission = attend(self.listener.dup(), admit, limit=4 * _PART)
        try:
            channel = await came
            end_admission()
            while True:
                await self._take_copy(channel)
        finally:
            end_admission()
            if came.done() and not came.cancelled():
                came.result().writer.transport.abort()

    async def _take_copy(self, channel: JsonChannel) -> None:
        _, kept, target = await channel.receive()
        stamps = self.copy.stamps
        stamps.aim(max(int(kept), self.own.stamps.aims[0]), int(target))
        buffers = {rank: stamps.open(rank, int(target)) for rank in stamps.ranks}
        for rank, buffer in buffers.items():
            assert buffer is not None
            raw, at = self.copy.raw(rank, buffer), 0
            while at < len(raw):
                if not (part := await channel.reader.read(min(_PART, len(raw) - at))):
                    raise EOFError
                raw[at : at + len(part)] = part
                at += len(part)
        word, _ = await channel.receive()
        if word != "whole":
            return
        while self.record.reached < target:  # its results are under way, through the hub
            await asyncio.sleep(self._look_s)
        for rank, buffer in buffers.items():
            assert buffer is not None
            stamps.close(rank, buffer, int(target))
        self._tell("copied", int(target))

    # ---- when they have ended --------------------------------------------------------------------

    def rest(self, bad: int | None = None) -> None:
        """Note what is held, now that the ranks have ended and the other hosts have sent all.

        bad: steps begun by the end of one that is not finite, from which on nothing counts; None:
        no such.  A rank that reports and trains nothing has no copy that could hold it back.
        """
        memories, reached = (self.own, self.copy), self.record.reached
        last = reached if bad is None else min(reached, bad - 1)
        found = {step for memory in memories for step in memory.stamps.all_steps()}
        found = {step for step in {*found, *self.own.stamps.aims} if 0 < step <= last}
        self._steps = tuple(
            (step, tuple(r for m in memories for r in m.stamps.ranks if m.holds(r, step)))
            for step in sorted(found)
        )

    @property
    def holding(self) -> Holding:
        """This host says what it holds to the others."""
        return Holding(
            round=self.place.name,
            ranks=self.plan.num_ranks,
            steps=self._steps,
            saved=self.saved,
            files=self.files,
        )

    def save(self, word: str, step: int, what: Sequence[Any]) -> None:
        """Do what the hub asks: `save` the state of some ranks after `step` steps, or `complete`
        the checkpoint that all have saved.

        word: which of both.  what: the ranks, or the files.  What cannot be saved counts no more.
        """
        folder = checkpoints.partial_folder(self.record.run_folder, step)
        try:
            if word == "save":
                self._write(folder, step, what)
            else:
                self._complete(folder, step, what)
        except (OSError, RunError) as error:
            self._steps = ()
            self.record.note(f"step {step}, of the hosts' memory, could not be saved: {error}")

    def _write(self, folder: Path, step: int, ranks: Sequence[int]) -> None:
        if step != self.saved:
            self.saved, self.files = step, ()
        folder.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            memory = self.own if rank in self.own.stamps.ranks else self.copy
            held = memory.read(rank, step)
            size, checksum = write_rank(self.record.job, self.plan, folder, rank, held)
            self.files += ((rank, size, checksum),)

    def _complete(self, folder: Path, step: int, files: Sequence[Any]) -> None:
        sums = {logical_checkpoint.file_of(folder, rank).name: sums for rank, *sums in files}
        if absent := [name for name in sums if not (folder / name).is_file()]:
            raise RunError(str(folder), f"{absent[0]}, of another host, is not there.")
        self.record.complete_checkpoint(folder, step, sums)
        self.record.job.start = self.record.checkpoints[-1]
        self.record.note(f"step {step} is saved from the memory of the hosts that are here")


def _live(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    if sys.platform == "linux":  # there a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    asyncio.set_event_loop(loop)
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.run_until_complete(end_tasks())  # also of a connection that has just come
