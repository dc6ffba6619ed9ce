"""The process side of the hub (hub.py): connections of hosts, in an event loop of asyncio."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time

from flowrun.launcher.launch.hosts.channel import BEAT_S, JsonChannel, Stranger, WrongToken
from flowrun.launcher.launch.hosts.hub import Hub, Outgoing

NOTICE_S = 10.0  # of silence, after which a host is named
ENDED = "its launcher has ended: it was killed, or its machine failed."


def silent_for(seconds: float) -> str:
    """Say why a host is given up."""
    return f"nothing came from it for {seconds:.0f} s: it hangs, or the network is down."


class HubServer:
    """Feeds the hub with what comes from the hosts, and sends what it answers.

    hub: its state.  token: that hosts have to know.  silence_s: after which a host counts as gone.
    """

    def __init__(self, hub: Hub, token: str, silence_s: float) -> None:
        self.hub = hub
        self.token = token
        self.silence_s = silence_s
        self._channels: dict[int, JsonChannel] = {}
        self._keys = itertools.count()
        self._quiet: set[int] = set()  # of whom the others know that they are silent
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket, own: socket.socket) -> None:
        """Serve the hosts that come to `listener`, and this host at the other end of `own`."""
        self._start_task(asyncio.create_task(self._attend(JsonChannel(*await open_channel(own)))))
        self._start_task(asyncio.create_task(self._beat()))
        self._server = await asyncio.start_server(self._admit, sock=listener)

    def _start_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = JsonChannel(reader, writer)
        try:
            await channel.greet(self.token, hub=True)
        except (Stranger, WrongToken, OSError, EOFError):
            writer.close()
        else:
            await self._attend(channel)

    async def _attend(self, channel: JsonChannel) -> None:
        key = next(self._keys)
        self._channels[key] = channel
        why = ENDED
        try:
            while True:
                self._send(self.hub.receive(key, await channel.receive()))
        except (OSError, EOFError):
            pass
        except (ValueError, TypeError) as error:
            why = f"its launcher sent what makes no sense: {error}"
        self._lose(key, why)

    def _lose(self, key: int, why: str) -> None:
        if channel := self._channels.pop(key, None):
            channel.writer.close()
            self._send(self.hub.lose(key, why))

    def _send(self, outgoing: Outgoing) -> None:
        for to, message in outgoing:
            if to in self._channels:
                self._channels[to].send(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._send(self.hub.tick(time.monotonic()))
            for key, channel in list(self._channels.items()):
                channel.beat()
                if channel.silent_s > self.silence_s:
                    self._lose(key, silent_for(self.silence_s))
                elif channel.silent_s < NOTICE_S:
                    self._quiet.discard(key)
                elif key not in self._quiet:
                    self._quiet.add(key)
                    self._send(self.hub.notice(key, channel.silent_s))

    async def close(self, within_s: float) -> None:
        """Let what was sent leave, for so long at most; then close all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(channel.flush(within_s) for channel in self._channels.values()))


async def open_channel(
    connected: socket.socket,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of a socket that is connected."""
    connected.setblocking(False)
    return await asyncio.open_connection(sock=connected)
