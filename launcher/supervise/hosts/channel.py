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
from collections.abc import Callable

from flowrun.launcher.ranks.wire import Notice, decode, encode
from flowrun.launcher.supervise.hosts.words import Alive

GREETING_S = 10.0  # a launcher greets at once; another program may say nothing at all
BEAT_S = 1.0  # from one Alive of a side to the next
ENDED = "its launcher has ended: it was killed, or its machine failed."
QUIET = "nothing came from it"
_NOTICE_S = 10.0  # of silence, after which a side is named
_LENGTH = struct.Struct(">I")
_MAX_GREETING = 1 << 10  # bytes
_MAX_MESSAGE = 1 << 26
_PROTOCOL = 2


class Stranger(Exception):
    """The other end is no launcher of flowrun, or one of another version."""


class Silent(Stranger):
    """The other end has accepted the connection and says nothing: it may be stopped."""


class WrongToken(Stranger):
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
        self._is_quiet = False

    async def greet(self, token: str, hub: bool, within_s: float = GREETING_S) -> None:
        """Exchange greetings and proofs; close the connection if that fails.

        token: the secret that both sides share.  hub: which side this is.  within_s: after which
        the other is silent.  Raises Stranger, or OSError and EOFError if the connection ends.
        """
        greeted = False
        try:
            async with asyncio.timeout(within_s):
                await self._greet(token, hub)
            greeted = True
        except TimeoutError:
            raise Silent("says nothing") from None
        except (ValueError, KeyError, TypeError):
            raise Stranger("answers with something else") from None
        finally:
            if not greeted:
                self.writer.close()
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

    async def listen(self, take: Callable[[Notice], None], silence_s: float) -> str:
        """Take what comes until the connection ends; close it, and return why it did.

        silence_s: for how long nothing had come where `beat` ended it.
        """
        try:
            while True:
                take(await self.receive())
        except TimeoutError:
            return f"{QUIET} for {silence_s:.0f} s: it hangs, or the network is down."
        except (OSError, EOFError):
            return ENDED
        except ValueError as error:
            return f"its launcher sent what makes no sense: {error}"
        finally:
            self.writer.close()

    async def receive(self, within_s: float | None = None) -> Notice:
        """Return the next message; close the connection if there is none.  Raises OSError or
        EOFError if it ends or the time is up, ValueError for a frame that holds no message.
        """
        try:
            async with asyncio.timeout(within_s):
                while isinstance(came := decode(await self._read(_MAX_MESSAGE)), Alive):
                    pass
        except (OSError, EOFError, ValueError):
            self.writer.close()
            raise
        return came

    def beat(self, silence_s: float = float("inf")) -> float:
        """Let the other side know that this one is alive, every BEAT_S; return the seconds for
        which this process was stopped since the last time.

        silence_s: after which the other has gone: `listen` ends.
        """
        now = time.monotonic()
        late_s = max(0.0, now - self._beaten_s - 2 * BEAT_S)
        self._beaten_s = now
        self.last_s = min(now, self.last_s + late_s)
        self.send(Alive())
        if self.silent_s > silence_s:
            self.reader.set_exception(TimeoutError())
        return late_s

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_s

    def falls_silent(self) -> bool:
        """Return whether nothing has come for some seconds, once."""
        before, self._is_quiet = self._is_quiet, self.silent_s >= _NOTICE_S
        return self._is_quiet and not before

    async def flush(self, within_s: float) -> None:
        """Wait until all has left, for so long at most; then close."""
        try:
            async with asyncio.timeout(within_s):
                self.writer.close()
                await self.writer.wait_closed()
        except OSError:
            self.writer.transport.abort()

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


async def open_channel(connected: socket.socket) -> JsonChannel:
    """Return the channel of a socket that is connected."""
    connected.setblocking(False)
    return JsonChannel(*await asyncio.open_connection(sock=connected))


async def connect(address: str, port: int, within_s: float) -> JsonChannel:
    """Connect to a launcher that listens, without a greeting.  Raises OSError if nobody answers."""
    async with asyncio.timeout(within_s):
        return JsonChannel(*await asyncio.open_connection(address, port))


def _prove(token: str, hub: bool, own: str, other: str) -> str:
    text = f"{'hub' if hub else 'host'} {own} {other}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
