"""Messages between launchers: JSON over a socket, after both sides have proved that they know one
token.

A frame is its length in 4 bytes, then JSON.  Nothing that comes is ever unpickled, and before the
proofs are exchanged nothing is read but a short greeting.  The proof of a side is an HMAC-SHA256 of
both sides' random numbers (RFC 2104); what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

GREETING_S = 10.0  # a launcher greets at once; another program may say nothing at all
BEAT_S = 1.0  # a side with nothing to say says so

_LENGTH = struct.Struct(">I")
_MAX_GREETING = 1 << 10  # bytes
_MAX_MESSAGE = 1 << 28
_PROTOCOL = 1
_ALIVE = "alive"


class Stranger(Exception):
    """The other end is no launcher of flowrun, or one of another version."""


class Silent(Stranger):
    """The other end has accepted the connection and says nothing: it may be stopped."""


class WrongToken(Exception):
    """The launcher at the other end has another token."""


class JsonChannel:
    """One end of a connection to another launcher.

    last_s: when something last came from it, in seconds of the monotonic clock, later by the time
    for which this process itself was stopped.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.last_s = self._beaten_s = time.monotonic()

    async def greet(self, token: str, hub: bool, within_s: float = GREETING_S) -> None:
        """Exchange greetings and proofs.

        token: the secret that both sides share.  hub: which side this is.  within_s: after which
        the other is silent.  Raises Stranger, WrongToken, or OSError and EOFError if the connection
        ends.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._greet(token, hub)
        except TimeoutError:
            raise Silent("says nothing") from None
        except (ValueError, KeyError, TypeError):
            raise Stranger("answers with something else") from None
        self._beaten_s = time.monotonic()  # the other may have let this process wait

    async def _greet(self, token: str, hub: bool) -> None:
        own = secrets.token_hex(16)
        self.send({"flowrun": _PROTOCOL, "nonce": own})
        greeting = await self._read(_MAX_GREETING)
        if greeting["flowrun"] != _PROTOCOL:
            raise Stranger("is of another version of flowrun")
        other = str(greeting["nonce"])
        self.send(_prove(token, hub, own, other))
        if not hmac.compare_digest(
            str(await self._read(_MAX_GREETING)), _prove(token, not hub, other, own)
        ):
            raise WrongToken

    def send(self, message: Any) -> None:
        """Send a message; it leaves when the socket has room."""
        data = json.dumps(message).encode()
        self.writer.write(_LENGTH.pack(len(data)) + data)

    def beat(self) -> float:
        """Let the other side know that this one is alive, every BEAT_S; return the seconds for
        which this process was stopped since the last time.
        """
        now = time.monotonic()
        late_s = max(0.0, now - self._beaten_s - 2 * BEAT_S)
        self._beaten_s = now
        self.last_s = min(now, self.last_s + late_s)
        self.send(_ALIVE)
        return late_s

    async def receive(self) -> tuple[Any, ...]:
        """Return the next message.  Raises OSError or EOFError if the connection ends."""
        while (message := await self._read(_MAX_MESSAGE)) == _ALIVE:
            pass
        return tuple(message)

    async def _read(self, most: int) -> Any:
        (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
        if length > most:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(await self.reader.readexactly(length))
        self.last_s = time.monotonic()
        return message

    async def greet_or_close(self, token: str, within_s: float = GREETING_S) -> None:
        """Greet the side that listens; close the connection if that fails or is cancelled.

        token, within_s: as for greet.
        """
        try:
            await self.greet(token, hub=False, within_s=within_s)
        except BaseException:
            self.writer.close()
            raise

    @property
    def own_address(self) -> str:
        """The address of this side."""
        return str(self.writer.get_extra_info("sockname")[0])

    @property
    def silent_s(self) -> float:
        """Seconds since something came."""
        return time.monotonic() - self.last_s

    async def flush(self, within_s: float) -> None:
        """Wait until all has left, for so long at most; then close."""
        try:
            async with asyncio.timeout(within_s):
                self.writer.close()
                await self.writer.wait_closed()
        except (OSError, TimeoutError):
            self.writer.transport.abort()


def attend(
    listener: socket.socket,
    serve: Callable[[JsonChannel], Coroutine[Any, Any, None]],
    limit: int = 1 << 16,
) -> Callable[[], None]:
    """Serve each program that connects, in a task of its own; return what ends that.

    asyncio.Server does the same, but what connects while it closes stays open, and in Python 3.11
    so does a connection whose task is cancelled.

    listener: a socket that listens.  serve: gets the connection before any greeting, and closes it.
    limit: bytes that a connection keeps before they are read.
    """
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()
    listener.setblocking(False)

    async def begin(connected: socket.socket) -> None:
        await serve(await open_channel(connected, limit))

    def accept() -> None:
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has gone again
        task = loop.create_task(begin(connected))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def end() -> None:
        if listener.fileno() >= 0:  # it has not ended before
            loop.remove_reader(listener)
            listener.close()

    loop.add_reader(listener, accept)
    return end


async def open_channel(connected: socket.socket, limit: int = 1 << 16) -> JsonChannel:
    """Return the channel of a socket that is connected.  limit: bytes kept before they are read."""
    connected.setblocking(False)
    return JsonChannel(*await asyncio.open_connection(sock=connected, limit=limit))


async def connect(address: str, port: int, within_s: float) -> JsonChannel:
    """Connect to a launcher that listens, without a greeting yet.

    address, port: where it listens.  within_s: seconds to wait.  Raises OSError if nobody answers.
    """
    async with asyncio.timeout(within_s):
        return JsonChannel(*await asyncio.open_connection(address, port))


async def end_tasks() -> None:
    """Cancel the other tasks of this event loop, and wait until they and their connections end."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.sleep(0)  # one that has just been made begins: it closes what it was given
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes in the next turn


def _prove(token: str, hub: bool, own: str, other: str) -> str:
    text = f"{'hub' if hub else 'host'} {own} {other}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
