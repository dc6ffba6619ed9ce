"""The connection of a launcher to the hub, and the hub where it is here.

At first it is at launch.rdzv_endpoint.  Where the host that holds it is lost, the lowest number
that is left holds a new one, behind its door: all hosts look through the doors of the last round in
the order of numbers, and none is passed over that answers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.recipe.schema import Launch, nodes_of
from flowrun.launcher.supervise.hosts import channel as channels
from flowrun.launcher.supervise.hosts.channel import JsonChannel
from flowrun.launcher.supervise.hosts.door import Door
from flowrun.launcher.supervise.hosts.endpoint import Endpoint, listen, open_store
from flowrun.launcher.supervise.hosts.hub import Hub
from flowrun.launcher.supervise.hosts.other_folder import FileServer
from flowrun.launcher.supervise.hosts.token import TOKEN, find_token, make_token
from flowrun.launcher.supervise.hosts.words import HubHere, HubWanted
from flowrun.launcher.supervise.life.events import Company

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
_TURN_S = 10.0  # for the host of an endpoint to come before that of the next holds the hub
_GREETING_S = 1.0  # for host 0 to answer, at least; it is asked again
LONG_S = 600.0  # for another host to send a piece of a file, where it is never taken for gone
_FLUSH_S = 0.5  # for the last messages, if the network is down
_TOKEN_S = 15.0  # for a file of another host's to be seen here
_SILENT = "a program there says nothing: it is stopped, or no launcher of this run"
_ONE_TOKEN = (
    f"Give every host the same value of the environment variable {TOKEN}, or one folder"
    " (hydra.run.dir) that all of them see."
)


class HubLink:
    """The connection to the hub, and the hub where it is here.

    channel: None before it is connected, and once it is lost.  door: of this host.  own_address: of
    this host.  met: the last round.  stores: of the ranks of all rounds, if the hub is here.
    """

    def __init__(
        self, launch: Launch, folder: Path, silence_s: float, known: Callable[[], Sequence[str]]
    ) -> None:
        """known: doors behind which the hub may be of a run that is under way."""
        self.launch, self.folder, self.silence_s = launch, folder, silence_s
        texts = launch.rdzv_endpoint.replace(",", " ").split()
        self.endpoints = [Endpoint.parse(each) for each in texts]
        self.channel: JsonChannel | None = None
        self.files = FileServer(folder, min(silence_s, LONG_S))
        self.own_address = ""
        self.met: Company | None = None
        self.stores: list[Any] = []
        self.door = Door(self.files, silence_s)
        self._known = known
        self._seen_s: float | None = None  # when a hub was first seen, without its token

    @property
    def place(self) -> str:
        return " or ".join(map(str, self.endpoints))

    @property
    def holds_hub(self) -> bool:
        return self.door.hub is not None

    @property
    def address(self) -> str:
        """Return the address of the hub."""
        if self.holds_hub or self.channel is None:
            return self.own_address
        return str(self.channel.writer.get_extra_info("peername")[0])

    async def connect(self, patience: Patience) -> JsonChannel:
        """Connect to the hub; hold it here at this host's turn.  Raises RecipeError, RunError."""
        if self.met:
            places = [Endpoint.parse(door) for door in self.met.doors]
            places += [place for place in self.endpoints if place not in places]
            return await self._seek(places, self.met.number, None, patience)
        own, listener = await self._try_to_listen(patience)
        here = listener and str(Endpoint(*listener.getsockname()[:2]))
        others = [Endpoint.parse(door) for door in self._known() if door != here]
        turn = len(others) + own if listener else -1
        try:
            return await self._seek([*others, *self.endpoints], turn, listener, patience)
        finally:
            if listener and not self.holds_hub:
                listener.close()

    async def _seek(
        self, places: list[Endpoint], turn: int, listener: socket.socket | None, patience: Patience
    ) -> JsonChannel:
        """Look for the hub at all places, until it is there or it is this host's turn to hold it.

        turn: of this host among the places; -1: never.  listener: at its own, where it has no door
        yet: the hosts of endpoints before it have some time to come, and one that says nothing is
        waited for.
        """
        is_new, began_s = not self.met, time.monotonic()
        late_s = _TURN_S * (turn - (len(places) - len(self.endpoints))) if is_new else 0.0
        while True:
            why, waits = "nobody is there", False
            for k, place in enumerate(places):
                if k == turn:
                    continue
                why, answers = await self._try_to_join(place, patience)
                if self.channel:
                    return self.channel
                waits |= k < turn and (answers or (is_new and answers is None))
            if turn >= 0 and not waits and time.monotonic() - began_s >= late_s:
                return await self._hold_hub(listener)
            await patience.wait(f"waiting for host 0 at {self.place}: {why}")
            if patience.is_over:
                did_not = f"host 0 did not come within launch.join_s={self.launch.join_s:g} s"
                raise RunError(f"{KEY} {self.place}", f"{did_not}: {why}.", ADVICE)

    async def _try_to_join(self, place: Endpoint, patience: Patience) -> tuple[str, bool | None]:
        """Connect to the hub; return why that is not possible yet, and whether a launcher answers
        there; None: something does not answer.
        """
        why = f"the name {place.host} does not resolve"
        for address in await self._resolve(place, patience):
            try:
                channel = await channels.connect(address, place.port, _CONNECT_S)
                if not (token := find_token(self.folder)):
                    channel.writer.close()
                    return self._miss_token(place), True
                within_s = max(_GREETING_S, patience.pause_s)
                await channel.greet(token, hub=False, within_s=within_s)
                channel.send(HubWanted())
                here = await channel.receive(within_s)
            except (OSError, EOFError, ValueError) as error:
                why = _reason(error)
            except channels.Silent:
                return _SILENT, None
            except channels.WrongToken:
                problem = f"the launcher at {place} has another {TOKEN}."
                raise RecipeError(KEY, problem, _ONE_TOKEN) from None
            except channels.Stranger as error:
                if self.met or place not in self.endpoints:
                    return "another program has its port", False
                raise RecipeError(
                    KEY,
                    f"the program that listens at {place} {error}: it is no launcher of this run.",
                    "Choose a port that is free on that host.",
                ) from None
            else:
                if here != HubHere(True):
                    channel.writer.close()
                    return f"the launcher at {place} has not met the others yet", True
                self.own_address = str(channel.writer.get_extra_info("sockname")[0])
                self.channel = channel
                if not self.door.at:
                    self.door.token = token
                    self.door.open(listen(self.own_address))
                return "", True
        return why, False

    def _miss_token(self, place: Endpoint) -> str:
        self._seen_s = self._seen_s or time.monotonic()
        if time.monotonic() - self._seen_s > _TOKEN_S:
            problem = f"host 0 answers at {place}, and {self.folder} has no secret of its."
            raise RecipeError(TOKEN, problem, _ONE_TOKEN)
        return f"it has made its secret, and {self.folder} does not show it yet"

    async def _resolve(self, place: Endpoint, patience: Patience) -> list[str]:
        """Return the addresses of a place; none where its name does not resolve, and there are
        other places.
        """
        while True:
            try:
                return await place.resolve()
            except OSError as error:
                if self.met or [place] != self.endpoints:
                    return []
                why = f"the name {place.host} does not resolve: {error.strerror or error}"
                final = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
                if final or patience.is_over:
                    raise RecipeError(KEY, f"{why}.", "Give a name or an address.") from None
            await patience.wait(why)

    async def _try_to_listen(self, patience: Patience) -> tuple[int, socket.socket | None]:
        """Listen at the first endpoint of this machine, if this host may be the first; return its
        number, too.
        """
        rank = self.launch.node_rank
        for number, place in enumerate(self.endpoints if rank in (None, 0) else ()):
            for address in await self._resolve(place, patience):
                try:
                    return number, listen(address, place.port)
                except OSError as error:
                    elsewhere = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
                    if elsewhere and rank is None:
                        continue
                    raise RecipeError(
                        KEY,
                        f"host 0 cannot listen at {place}: {_reason(error)}.",
                        "Give an address of host 0, and a port that is free there.",
                    ) from None
        return -1, None

    async def _hold_hub(self, listener: socket.socket | None) -> JsonChannel:
        """Hold the hub behind this host's door.  listener: becomes its door; None: it has one, and
        opens its own among the endpoints, too, for hosts that come later.
        """
        if listener is not None:
            self.door.token = make_token(self.folder)
            self.own_address = str(listener.getsockname()[0])
        else:
            _, listener = await self._try_to_listen(Patience(0.0, print))
        if listener is not None:
            self.door.open(listener)
        self.channel = await self.door.hold_hub(Hub(nodes_of(self.launch), self._open_store))
        return self.channel

    def _open_store(self) -> int:
        self.stores.append(open_store(self.own_address))
        return int(self.stores[-1].port)

    async def close(self) -> None:
        """Let the last messages leave; then close all connections, and the ranks' store."""
        if self.channel is not None:
            await self.channel.flush(_FLUSH_S)
        await self.door.close(_FLUSH_S)
        self.stores.clear()


def _reason(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "it closes the connection"
    if isinstance(error, TimeoutError):
        return f"no answer in {_CONNECT_S:.0f} s"
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else str(error)
