"""Files of a run between hosts that share no folder.

Each launcher serves those of its own folder, and fetches what it lacks: the first host what ranks
of the others have written, any host a whole checkpoint.  What is fetched is compared with the size
and checksum that its writer has sent, and counts once it is on the disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from flowrun.engine.errors import RunError
from flowrun.engine.ir.files import PARTIAL, replacing
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store.checkpoint import ABOUT, FOLDER, About, Checkpoint
from flowrun.launcher.store.kept_run import name_in
from flowrun.launcher.store.run_files import METRICS, RESTARTS
from flowrun.launcher.supervise.hosts.channel import JsonChannel, Stranger, connect
from flowrun.launcher.supervise.hosts.endpoint import Endpoint
from flowrun.launcher.supervise.hosts.words import FileComing, FileWanted

_SERVED = re.compile(
    rf"{FOLDER}/step_(\d{{8,}})(?:{PARTIAL})?/\w[\w.]*|weights\.rank\d{{5}}\.safetensors"
    rf"|{METRICS}|{RESTARTS}"
)
_PIECE = 1 << 22  # bytes
_CONNECT_S, _LOOK_S = 5.0, 0.05
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileServer:
    """Serves the files of a run's folder.

    reading: steps of checkpoints that are being read, which have to stay.  owed: names of files
    that the first host has not fetched yet, and will.
    """

    def __init__(self, folder: Path, silence_s: float) -> None:
        self.reading: Counter[int] = Counter()
        self._folder, self._silence_s = folder, silence_s
        self.owed = set[str]()

    async def settle(self, is_over: Callable[[], bool]) -> None:
        """Wait until nothing is owed, or nothing more is fetched.  is_over: nobody will."""
        left, since_s = len(self.owed), time.monotonic()
        while self.owed and not is_over() and time.monotonic() - since_s < self._silence_s:
            if len(self.owed) != left:
                left, since_s = len(self.owed), time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async def serve(self, channel: JsonChannel, wanted: Notice) -> None:
        """Give a launcher the file that it wants, and others, until it goes."""
        held = set[int]()
        with suppress(OSError, EOFError, ValueError):
            while isinstance(wanted, FileWanted) and (match := _SERVED.fullmatch(wanted.name)):
                if match[1] and (step := int(match[1])) not in held:
                    held.add(step)
                    self.reading[step] += 1
                await self._give(channel, wanted.name)
                wanted = await channel.receive(self._silence_s)
        self.reading.subtract(held)
        self.reading = +self.reading

    async def _give(self, channel: JsonChannel, name: str) -> None:
        try:
            handle = await asyncio.to_thread(os.open, self._folder / name, _READ)
        except OSError:
            channel.send(FileComing(-1))
            return
        try:
            left = os.fstat(handle).st_size
            channel.send(FileComing(left))
            while left:
                piece = await asyncio.to_thread(os.read, handle, min(left, _PIECE))
                if not piece:
                    raise EOFError
                channel.writer.write(piece)
                async with asyncio.timeout(self._silence_s):
                    await channel.writer.drain()
                left -= len(piece)
        finally:
            os.close(handle)
        self.owed.discard(name)


class OtherFolder:
    """The run's folder of another host, over a connection to its door."""

    def __init__(self, channel: JsonChannel, silence_s: float) -> None:
        self._channel, self._silence_s = channel, silence_s

    async def get(self, name: str, to: Path, written: tuple[int, int] | None = None) -> bool:
        """Make or replace a file, whole; return whether it is there.

        written: its size and CRC-32, as its writer has said; None: it has a header that says what
        is in it.  Raises ValueError where it has others, or does not belong to a run.
        """
        _check_name(name)
        if (left := await self._ask(name)) < 0:
            return False
        size, crc = left, 0
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as opened:
            while left:
                piece = await self._read(min(left, _PIECE))
                await asyncio.to_thread(opened.write, piece)
                crc = await asyncio.to_thread(zlib.crc32, piece, crc)
                left -= len(piece)
            opened.flush()
            await asyncio.to_thread(os.fsync, opened.fileno())
        if written and (size, crc) != written:
            raise ValueError(f"{name} has changed on its way, or since it was written")
        return True

    async def read(self, name: str) -> str:
        """Return a file's text; "" if it is not there.  Raises ValueError."""
        size = await self._ask(name)
        return (await self._read(size)).decode() if size > 0 else ""

    async def _ask(self, name: str) -> int:
        self._channel.send(FileWanted(name))
        coming = await self._channel.receive(self._silence_s)
        return coming.num_bytes if isinstance(coming, FileComing) else -1

    async def _read(self, count: int) -> bytes:
        async with asyncio.timeout(self._silence_s):
            return await self._channel.reader.readexactly(count)

    async def fetch_checkpoint(self, folder: Path, step: int, lines: bool) -> Checkpoint | None:
        """Make the checkpoint of a step in a run's folder what it is there; return it, or None if
        it has been removed there.  lines: metrics.jsonl and restarts.jsonl, too.  Raises ValueError
        for what is damaged.
        """
        here = Checkpoint((folder / name_in(step, ABOUT)).parent, step)
        partial = checkpoints.partial_folder(folder, step)
        text = await self.read(name_in(step, ABOUT))
        if not text:
            return None
        damage = await asyncio.to_thread(here.damage) if here.text() == text else "not the same"
        if damage:
            partial.mkdir(parents=True, exist_ok=True)
            for file, (size, crc) in About.from_json(text).files.items():
                name, to = name_in(step, file), partial / file
                _check_name(name)
                damaged = await asyncio.to_thread(checkpoints.damage_of, to, size, crc)
                if damaged and not await self.get(name, to, (size, crc)):
                    return None
            here = await asyncio.to_thread(checkpoints.publish, partial, step, text)
        for name in (METRICS, RESTARTS) if lines else ():
            await self.get(name, folder / name)
        return here


def _check_name(name: str) -> None:
    if not _SERVED.fullmatch(name):  # it is another host's word, and becomes a path here
        raise ValueError(f"{name!r} does not belong to a run")


@asynccontextmanager
async def open_folder(door: str, token: str, silence_s: float) -> AsyncIterator[OtherFolder]:
    """Connect to a host's door.  Raises RunError for what goes wrong, within, too."""
    try:
        place = Endpoint.parse(door)
        channel = await connect(place.host, place.port, _CONNECT_S)
        try:
            await channel.greet(token, hub=False)
            yield OtherFolder(channel, silence_s)
        finally:
            channel.writer.close()
    except (OSError, EOFError, ValueError, Stranger) as error:  # a timeout is an OSError, too
        if isinstance(error, OSError) and error.filename is not None:
            raise  # of this disk
        why = str(error) or type(error).__name__
        raise RunError(f"the files of {door}", f"{why}.", _ADVICE) from error


_ADVICE = "Let hosts reach each other's ports, or give them one folder (hydra.run.dir)."
