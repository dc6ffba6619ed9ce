"""The process side of the hub (hub.py): connections of hosts, in an event loop of asyncio."""

from __future__ import annotations

import asyncio
import itertools
import time

from flowrun.launcher.supervise.hosts.channel import BEAT_S, JsonChannel
from flowrun.launcher.supervise.hosts.hub import Hub, Outgoing

_OWN = 0  # the connection of the hub's own host
_LOOK_S = 0.01


class HubServer:
    """Feeds the hub with what comes from the hosts, and sends what it answers."""

    def __init__(self, hub: Hub, silence_s: float) -> None:
        """hub: its state.  silence_s: after which a host counts as gone."""
        self.hub, self._silence_s = hub, silence_s
        self._channels: dict[int, JsonChannel] = {}
        self._keys = itertools.count()

    async def attend(self, channel: JsonChannel) -> None:
        """Serve a host; the first is that of the hub."""
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

    async def beat(self) -> None:
        """Let the hub see that time goes by."""
        while True:
            await asyncio.sleep(BEAT_S)
            self._send(self.hub.tick(time.monotonic()))
            for key, channel in list(self._channels.items()):
                channel.beat(self._silence_s)
                if channel.falls_silent():
                    self._send(self.hub.notice(key, channel.silent_s))

    async def close(self, within_s: float) -> None:
        """Take what this host has said last, and let all leave, for so long at most."""
        until_s = time.monotonic() + within_s
        while _OWN in self._channels and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
        await asyncio.gather(*(channel.flush(within_s) for channel in self._channels.values()))
