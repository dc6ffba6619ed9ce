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

from flowrun.launcher.ranks.wire import Notice, decode, encode
from flowrun.launcher.supervise.hosts.words import Alive

GREETING_S = 10.0  # a launcher greets at once; another program may say nothing at all
BEAT_S = 1.0  # a side with nothing to say says so

_LENGTH = struct.Struct(">I")
_MAX_GREETING = 1 << 10  # bytes
_MAX_MESSAGE = 1 << 26
_PROTOCOL = 1
_BACK_OFF_S = 1.0  # where this process can open no more files


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
        self._write({"flowrun": _PROTOCOL, "nonce": own})
        greeting = json.loads(await self._read(_MAX_GREETING))
        if greeting["flowrun"] != _PROTOCOL:
            raise Stranger("is of another version of flowrun")
        other = str(greeting["nonce"])
        self._write(_prove(token, hub, own, other))
        proof = str(json.loads(await self._read(_MAX_GREETING)))
        if not hmac.compare_digest(proof.encode(), _prove(token, not hub, other, own).encode()):
            raise WrongToken

    def send(self, sent: Notice) -> None:
        """Send a message; it leaves when the socket has room."""
        self._frame(encode(sent))

    def beat(self) -> float:
        """Let the other side know that this one is alive, every BEAT_S; return the seconds for
        which this process was stopped since the last time.
        """
        now = time.monotonic()
        late_s = max(0.0, now - self._beaten_s - 2 * BEAT_S)
        self._beaten_s = now
        self.last_s = min(now, self.last_s + late_s)
        self.send(Alive())
        return late_s

    async def receive(self) -> Notice:
        """Return the next message.  Raises OSError or EOFError if the connection ends, ValueError
        for a frame that holds no message.
        """
        while isinstance(came := decode(await self._read(_MAX_MESSAGE)), Alive):
            pass
        return came

    def _write(self, value: object) -> None:
        self._frame(json.dumps(value).encode())

    def _frame(self, data: bytes) -> None:
        self.writer.write(_LENGTH.pack(len(data)) + data)

    async def _read(self, most: int) -> bytes:
        (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
        if length > most:
            raise ValueError(f"a message of {length} bytes")
        data = await self.reader.readexactly(length)
        self.last_s = time.monotonic()
        return data

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
    is_full: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Serve each program that connects, in a task of its own; return what ends that.

    asyncio.Server does the same, but what connects while it closes stays open, and in Python 3.11
    so does a connection whose task is cancelled.  Where no file can be opened any more it prints a
    traceback for each program that knocks.

    listener: a socket that listens.  serve: gets the connection before any greeting, and closes it.
    is_full: True where one more is closed at once.
    """
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()
    listener.setblocking(False)

    async def begin(connected: socket.socket) -> None:
        await serve(await open_channel(connected))

    def accept() -> None:
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has gone again
        except OSError:  # no more files: those that knock wait
            loop.remove_reader(listener)
            loop.call_later(_BACK_OFF_S, listen_again)
            return
        if is_full():
            connected.close()
            return
        task = loop.create_task(begin(connected))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def listen_again() -> None:
        if listener.fileno() >= 0:
            loop.add_reader(listener, accept)

    def end() -> None:
        if listener.fileno() >= 0:  # it has not ended before
            loop.remove_reader(listener)
            listener.close()

    loop.add_reader(listener, accept)
    return end


async def open_channel(connected: socket.socket) -> JsonChannel:
    """Return the channel of a socket that is connected."""
    connected.setblocking(False)
    return JsonChannel(*await asyncio.open_connection(sock=connected))


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
