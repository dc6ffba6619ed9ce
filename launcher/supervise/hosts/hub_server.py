"""The process side of the hub (hub.py): connections of hosts, in an event loop of asyncio."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable

from flowrun.launcher.supervise.hosts.channel import (
    BEAT_S,
    JsonChannel,
    Stranger,
    WrongToken,
    attend,
    open_channel,
)
from flowrun.launcher.supervise.hosts.hub import Hub, Outgoing

NOTICE_S = 10.0  # of silence, after which a host is named
_MOST_STRANGERS = 64  # connections at once that have not greeted yet
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
        self._strangers = 0
        self._keys = itertools.count()
        self._quiet: set[int] = set()  # of whom the others know that they are silent
        self._tasks: set[asyncio.Task[None]] = set()
        self._end_admission: Callable[[], None] | None = None

    async def start(self, listener: socket.socket, own: socket.socket) -> None:
        """Serve the hosts that come to `listener`, and this host at the other end of `own`."""
        self._start_task(asyncio.create_task(self._attend(await open_channel(own))))
        self._start_task(asyncio.create_task(self._beat()))
        self._end_admission = attend(
            listener, self._admit, lambda: self._strangers >= _MOST_STRANGERS
        )

    def _start_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, channel: JsonChannel) -> None:
        self._strangers += 1
        try:
            await channel.greet(self.token, hub=True)
        except (Stranger, WrongToken, OSError, EOFError):
            channel.writer.close()
            return
        finally:
            self._strangers -= 1
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
        except ValueError as error:
            why = f"its launcher sent what makes no sense: {error}"
        finally:
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
        if self._end_admission is not None:
            self._end_admission()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(channel.flush(within_s) for channel in self._channels.values()))
