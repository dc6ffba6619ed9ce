"""The door of a launcher: what listens on this host for other launchers.

They look for the hub, which may come to be here in the middle of a run, and fetch files
(other_folder.py).  Who does not know the token is not let in (channel.py).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Coroutine

from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.hosts import channel as channels
from flowrun.launcher.supervise.hosts.channel import JsonChannel, Stranger
from flowrun.launcher.supervise.hosts.endpoint import Endpoint
from flowrun.launcher.supervise.hosts.hub import Hub, Outgoing
from flowrun.launcher.supervise.hosts.other_folder import FileServer
from flowrun.launcher.supervise.hosts.words import FileWanted, HubHere, HubWanted

_MOST_STRANGERS = 64  # unauthenticated connections at once
_BACK_OFF_S = 1.0  # where this process can open no more files
_OWN = 0  # the hub's connection to its own host
_LOOK_S = 0.01


class Door:
    """Serves each program that connects, in a task of its own, as asyncio.Server does; but that
    leaves open what connects while it closes, and where no file can be opened any more it prints a
    traceback for each program that connects.  Where the hub is here, it feeds that with what comes
    from the hosts, and sends what it answers.

    hub: None while it is elsewhere.  at: the first address that it is open at.  token: that others
    have to know; set before it opens.
    """

    def __init__(self, files: FileServer, silence_s: float) -> None:
        """silence_s: after which a host counts as gone."""
        self.hub: Hub | None = None
        self.at = self.token = ""
        self._files, self._silence_s = files, silence_s
        self._listeners: dict[socket.socket, asyncio.Task[None]] = {}
        self._strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: dict[int, JsonChannel] = {}  # to hosts
        self._keys = itertools.count()

    def open(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.at = self.at or str(Endpoint(*listener.getsockname()[:2]))
        self._listeners[listener] = asyncio.create_task(self._accept(listener))

    async def hold_hub(self, hub: Hub) -> JsonChannel:
        """Hold the hub here; return the connection of this host, which is its first."""
        ours, its = socket.socketpair()
        self._begin(self._attend(hub, await channels.open_channel(its)))
        self._begin(self._beat(hub))
        channel = await channels.open_channel(ours)
        self.hub = hub
        return channel

    async def _attend(self, hub: Hub, channel: JsonChannel) -> None:
        """Serve a host; the first is that of the hub."""
        key = next(self._keys)
        self._channels[key] = channel
        why = await channel.listen(lambda came: self._send(hub.receive(key, came)), self._silence_s)
        del self._channels[key]
        self._send(hub.lose(key, why))

    def _send(self, outgoing: Outgoing) -> None:
        for to, message in outgoing:
            if to in self._channels:
                self._channels[to].send(message)

    async def _beat(self, hub: Hub) -> None:
        """Let the hub see that time goes by."""
        while True:
            await asyncio.sleep(channels.BEAT_S)
            self._send(hub.tick(time.monotonic()))
            for key, channel in list(self._channels.items()):
                channel.beat(self._silence_s)
                if channel.falls_silent():
                    self._send(hub.notice(key, channel.silent_s))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine until the door closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue  # it has gone again
            except OSError:  # no more files: those that connect wait
                await asyncio.sleep(_BACK_OFF_S)
                continue
            if self._strangers < _MOST_STRANGERS:
                self._strangers += 1
                self._begin(self._admit(connected))
            else:
                connected.close()

    async def _admit(self, connected: socket.socket) -> None:
        try:
            channel = await channels.open_channel(connected)
            await channel.greet(self.token, hub=True)
            first = await channel.receive(channels.GREETING_S)
        except (Stranger, OSError, EOFError, ValueError):
            return
        finally:
            self._strangers -= 1
        await self._serve(channel, first)

    async def _serve(self, channel: JsonChannel, first: Notice) -> None:
        try:
            if isinstance(first, HubWanted):
                channel.send(HubHere(self.hub is not None))
                if self.hub is not None:
                    await self._attend(self.hub, channel)
            elif isinstance(first, FileWanted):
                await self._files.serve(channel, first)
        finally:
            channel.writer.close()

    async def close(self, within_s: float) -> None:
        """Let what the hub has sent leave, for so long at most; then close all connections."""
        for accepting in self._listeners.values():
            accepting.cancel()
        await asyncio.gather(*self._listeners.values(), return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        until_s = time.monotonic() + within_s  # what this host has said last is taken before
        while _OWN in self._channels and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        await asyncio.gather(*(channel.flush(within_s) for channel in self._channels.values()))
        for task in list(self._tasks):
            task.cancel()
