"""The connection of a launcher to the hub, and the hub where it is here."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.recipe.schema import Launch, nodes_of
from flowrun.launcher.supervise.hosts import channel as channels
from flowrun.launcher.supervise.hosts.channel import JsonChannel
from flowrun.launcher.supervise.hosts.endpoint import Endpoint, listen, open_store
from flowrun.launcher.supervise.hosts.hub import Hub
from flowrun.launcher.supervise.hosts.hub_server import HubServer
from flowrun.launcher.supervise.hosts.token import TOKEN, find_token, make_token

_FIRST_LINE_S, _NEXT_LINE_S, _LAST_LINE_S = 2.0, 5.0, 60.0  # pauses, of which each is twice as long
_RETRY_S = 0.5


class Patience:
    """Says what is awaited, every few seconds and then every minute, until the time is up."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._seconds, self._began = seconds, time.monotonic()
        self._until = self._began + seconds
        self._next_line, self._pause = self._began + _FIRST_LINE_S, _NEXT_LINE_S
        self._show = say

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def pause_s(self) -> float:
        """Return seconds until something is to be done."""
        return max(0.0, min(self._until, self._next_line) - time.monotonic())

    def say(self, what: str) -> None:
        """Say what is awaited, if it is time for a line."""
        if (now := time.monotonic()) >= self._next_line:
            self._show(f"{what}: {now - self._began:.0f} s of {self._seconds:g} s")
            self._next_line = now + self._pause
            self._pause = min(2 * self._pause, _LAST_LINE_S)

    async def wait(self, what: str) -> None:
        """Wait before something is tried again."""
        self.say(what)
        await asyncio.sleep(max(0.0, min(_RETRY_S, self._until - time.monotonic())))


KEY = "launch.rdzv_endpoint"
ADVICE = "Check that every host runs the same command and can reach this endpoint."
_CONNECT_S = 5.0
_GREETING_S = 1.0  # for host 0 to answer, at least; it is asked again
_FLUSH_S = 0.5  # for the last messages, if the network is down
_TOKEN_S = 15.0  # for a file of another host's to be seen here
_ONE_TOKEN = (
    f"Give every host the same value of the environment variable {TOKEN}, or one folder"
    " (hydra.run.dir) that all of them see."
)


class HubLink:
    """The connection to the hub, and the hub where it is here.

    channel: None before it is connected, and once it is lost.  address, own_address: of the hub and
    of this host.  stores: of the ranks of all rounds, if the hub is here.
    """

    def __init__(self, launch: Launch, folder: Path, silence_s: float) -> None:
        self.launch, self.folder, self.silence_s = launch, folder, silence_s
        self.endpoint = Endpoint.parse(launch.rdzv_endpoint)
        self.channel: JsonChannel | None = None
        self.server: HubServer | None = None
        self.address = self.own_address = ""
        self.stores: list[Any] = []
        self._seen_s: float | None = None  # when host 0 was first seen, without its token

    async def connect(self, patience: Patience) -> JsonChannel:
        """Hold the hub if the endpoint is this machine's; else connect to it.  Raises RecipeError,
        RunError.
        """
        addresses = await self._resolve(patience)
        rank = self.launch.node_rank
        for address in addresses if rank in (None, 0) else ():
            if listener := self._try_to_listen(address, only_here=rank == 0):
                self.address = self.own_address = address
                self.channel = await self._hold_hub(listener)
                return self.channel
        while True:
            why = ""
            for address in addresses:
                self.address = address
                why = await self._try_to_join(address, max(_GREETING_S, patience.pause_s))
                if self.channel:
                    return self.channel
            await patience.wait(f"waiting for host 0 at {self.endpoint}: {why}")
            if patience.is_over:
                within = f"within launch.join_s={self.launch.join_s:g} s"
                raise RunError(
                    f"{KEY} {self.endpoint}", f"host 0 did not come {within}: {why}.", ADVICE
                )

    async def _try_to_join(self, address: str, within_s: float) -> str:
        """Connect to the hub; return why that is not possible yet."""
        try:
            channel = await channels.connect(address, self.endpoint.port, _CONNECT_S)
            if not (token := find_token(self.folder)):
                channel.writer.close()
                return self._miss_token()
            await channel.greet(token, hub=False, within_s=within_s)
        except (OSError, EOFError) as error:
            return _reason(error)
        except channels.Silent:
            return "a program there says nothing: it is stopped, or no launcher of this run"
        except channels.WrongToken:
            problem = f"the launcher at {self.endpoint} has another {TOKEN}."
            raise RecipeError(KEY, problem, _ONE_TOKEN) from None
        except channels.Stranger as error:
            raise RecipeError(
                KEY,
                f"the program that listens at {self.endpoint} {error}: "
                "it is no launcher of this run.",
                "Choose a port that is free on that host.",
            ) from None
        self.own_address = str(channel.writer.get_extra_info("sockname")[0])
        self.channel = channel
        return ""

    def _miss_token(self) -> str:
        self._seen_s = self._seen_s or time.monotonic()
        if time.monotonic() - self._seen_s > _TOKEN_S:
            problem = f"host 0 answers at {self.endpoint}, and {self.folder} has no secret of its."
            raise RecipeError(TOKEN, problem, _ONE_TOKEN)
        return f"it has made its secret, and {self.folder} does not show it yet"

    async def _resolve(self, patience: Patience) -> list[str]:
        while True:
            try:
                return await self.endpoint.resolve()
            except OSError as error:
                why = f"the name {self.endpoint.host} does not resolve: {error.strerror or error}"
                final = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
                if final or patience.is_over:
                    raise RecipeError(KEY, f"{why}.", "Give a name or an address.") from None
            await patience.wait(why)

    def _try_to_listen(self, address: str, only_here: bool) -> socket.socket | None:
        try:
            return listen(address, self.endpoint.port)
        except OSError as error:
            elsewhere = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
            if elsewhere and not only_here:
                return None
            raise RecipeError(
                KEY,
                f"host 0 cannot listen at {self.endpoint}: {_reason(error)}.",
                "Give an address of host 0, and a port that is free there.",
            ) from None

    async def _hold_hub(self, listener: socket.socket) -> JsonChannel:
        hub, token = Hub(nodes_of(self.launch), self._open_store), make_token(self.folder)
        self.server = HubServer(hub, token, self.silence_s, listener)
        ours, its = socket.socketpair()
        await self.server.start(its)
        return await channels.open_channel(ours)

    def _open_store(self) -> int:
        self.stores.append(open_store(self.address))
        return int(self.stores[-1].port)

    async def close(self) -> None:
        """Let the last messages leave; then close all connections, and the ranks' store."""
        if self.channel is not None:
            await self.channel.flush(_FLUSH_S)
        if self.server is not None:
            await self.server.close(_FLUSH_S)
        self.stores.clear()


def _reason(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "it closes the connection"
    if isinstance(error, TimeoutError):
        return f"no answer in {_CONNECT_S:.0f} s"
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else str(error)
