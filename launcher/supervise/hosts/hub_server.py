"""The process side of the hub (hub.py): connections of hosts, in an event loop of asyncio."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Coroutine
from typing import Any

from flowrun.launcher.supervise.hosts.channel import BEAT_S, JsonChannel, Stranger, open_channel
from flowrun.launcher.supervise.hosts.hub import Hub, Outgoing

_MOST_STRANGERS = 64  # unauthenticated connections at once
_BACK_OFF_S = 1.0  # where this process can open no more files


class HubServer:
    """Feeds the hub with what comes from the hosts, and sends what it answers.

    It serves each program that connects, in a task of its own, as asyncio.Server does; but there
    what connects while it closes stays open, and where no file can be opened any more it prints a
    traceback for each program that connects.
    """

    def __init__(self, hub: Hub, token: str, silence_s: float, listener: socket.socket) -> None:
        """hub: its state.  token: that hosts have to know.  silence_s: after which a host counts as
        gone.  listener: to which hosts come.
        """
        self.hub, self._token, self._silence_s = hub, token, silence_s
        self._listener = listener
        self._channels: dict[int, JsonChannel] = {}
        self._strangers = 0
        self._keys = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, own: socket.socket) -> None:
        """Serve hosts, and this host at the other end of `own`, which is the first."""
        self._begin(self._attend(await open_channel(own)))
        self._begin(self._beat())
        self._listener.setblocking(False)
        self._listen()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has gone again
        except OSError:  # no more files: those that connect wait
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_BACK_OFF_S, self._listen)
            return
        if self._strangers >= _MOST_STRANGERS:
            connected.close()
            return
        self._strangers += 1
        self._begin(self._admit(connected))

    async def _admit(self, connected: socket.socket) -> None:
        try:
            channel = await open_channel(connected)
            await channel.greet(self._token, hub=True)
        except (Stranger, OSError, EOFError):
            return
        finally:
            self._strangers -= 1
        await self._attend(channel)

    async def _attend(self, channel: JsonChannel) -> None:
        key = next(self._keys)
        self._channels[key] = channel
        why = await channel.listen(
            lambda came: self._send(self.hub.receive(key, came)), self._silence_s
        )
        del self._channels[key]
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
                channel.beat(self._silence_s)
                if channel.falls_silent():
                    self._send(self.hub.notice(key, channel.silent_s))

    async def close(self, within_s: float) -> None:
        """Let what was sent leave, for so long at most; then close all connections."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(channel.flush(within_s) for channel in self._channels.values()))
