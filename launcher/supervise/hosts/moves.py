"""Files move between this host and others in a round (how: other_folder.py).

The first host fetches what ranks of hosts write that do not see its folder.  The second, where it
does not, fetches each checkpoint that the first has completed: if the first is lost with its disk,
the run continues from there.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from flowrun.engine.errors import RunError
from flowrun.launcher.ranks.failure import reason_of
from flowrun.launcher.ranks.rank_events import FileWritten, WeightsWritten
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.store.checkpoint import Checkpoint, partial_folder
from flowrun.launcher.supervise.hosts.other_folder import FileServer, OtherFolder, open_folder
from flowrun.launcher.supervise.hosts.token import find_token
from flowrun.launcher.supervise.life import events

_AGAIN_S = 0.5  # before a file is fetched again
_MOST_FAILED = 5  # attempts in a row to fetch a checkpoint


class Moves:
    """Files on their way.  met: the round that they belong to.  files: of this host."""

    def __init__(
        self, folder: Path, files: FileServer, silence_s: float, post: Callable[[Notice], None]
    ) -> None:
        self.met: events.Company | None = None
        self._folder, self.files, self._silence_s, self._post = folder, files, silence_s, post
        self._tasks: dict[asyncio.Task[None], int] = {}  # and from which host
        self._newest = -1  # the step of the checkpoint to keep
        self._failed = 0  # in a row

    def owe(self, event: Notice) -> None:
        """Note what a rank of this host has written, if the first host will fetch it."""
        met = self.met
        if met and not met.sees[met.number] and (name := self._name_of(event)):
            self.files.owed.add(name)

    def takes(self, came: Notice) -> bool:
        """Fetch what a rank of another host has written, and post its event then; return False for
        any other event.
        """
        met = self.met
        if isinstance(came, events.HostGone):
            for task in [task for task, host in self._tasks.items() if host == came.host]:
                task.cancel()
        if met is None or met.number or not isinstance(came, events.FromHost):
            return False
        if met.sees[came.host] or not self._name_of(came.event):
            return False
        self._begin(self._collect(met, came), came.host)
        return True

    def keep(self, step: int, kept: Callable[[Checkpoint], None] | None) -> None:
        """The first host has a checkpoint: what this one has of it goes, if they share no folder.
        kept: where it is given, the second host fetches the whole one, as it may become the first.
        """
        met = self.met
        if met is None or met.sees[met.number]:
            return
        apart = [number for number, sees in enumerate(met.sees) if not sees]
        idle, self._newest = 0 not in self._tasks.values(), step
        if kept is None or met.number != apart[0]:
            partial = partial_folder(self._folder, step)
            drop = asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            self._begin(drop, met.number)
        elif idle:
            self._begin(self._keep(met.doors[0], kept), 0)

    async def fetch(self, step: int, door: str) -> str:
        """Fetch the checkpoint of a step from another host; return why it is not here, as that host
        may be lost.  Raises RunError after some failures in a row.
        """
        try:
            async with self._open(door) as other:
                if await other.fetch_checkpoint(self._folder, step, lines=True) is None:
                    raise ValueError(f"the checkpoint of step {step} has been removed")
        except RunError as error:
            self._failed += 1
            if self._failed == _MOST_FAILED:
                raise
            await asyncio.sleep(_AGAIN_S)
            return f"{error.where}: {error.problem}"
        self._failed = 0
        return ""

    async def settle(self, within_s: float) -> None:
        """Wait until all is here, for so long at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=min(within_s, self._silence_s))

    def stop(self) -> None:
        """End what is on its way: its round is over."""
        self.files.owed.clear()
        for task in self._tasks:
            task.cancel()

    def _open(self, door: str) -> AbstractAsyncContextManager[OtherFolder]:
        return open_folder(door, find_token(self._folder), self._silence_s)

    def _begin(self, work: Coroutine[object, object, None], host: int) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = host
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()):
            self._post(events.LauncherFailed(reason_of(error)))

    def _name_of(self, event: Notice) -> str:
        """Return the name of what a rank has written, within the run's folder; "": nothing."""
        if isinstance(event, FileWritten):
            file = partial_folder(self._folder, event.step) / event.name
            return file.relative_to(self._folder.absolute()).as_posix()
        return event.name if isinstance(event, WeightsWritten) else ""

    async def _collect(self, met: events.Company, came: events.FromHost) -> None:
        """Fetch a file until it is here, or its host is gone, which HostGone says."""
        name, event = self._name_of(came.event), came.event
        written = event.written if isinstance(event, FileWritten) else None
        until_s = time.monotonic() + 2 * self._silence_s
        while True:
            try:
                async with self._open(met.doors[came.host]) as other:
                    if not await other.get(name, self._folder / name, written):
                        raise ValueError(f"{name} is not there")
                self._post(came)
                return
            except RunError:
                if time.monotonic() > until_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _keep(self, door: str, kept: Callable[[Checkpoint], None]) -> None:
        done = -1
        while done < self._newest:  # one that was completed in between
            done = self._newest
            with suppress(RunError):  # then the one before is here, or the first host is gone
                async with self._open(door) as other:
                    here = await other.fetch_checkpoint(self._folder, done, lines=False)
                if here:
                    await asyncio.to_thread(kept, here)
