"""Hosts: this launcher among those of the other hosts, in the event loop of the driver.

The launchers meet at launch.rdzv_endpoint.  The one whose machine has that address holds the hub
(hub.py), and connects to it like every other.  Over this connection, which lasts as long as a run,
they compare what they are about to run, number the hosts, send each other what happens, and
learn at once when a launcher has gone.

Everything here runs in the loop's thread, and nothing blocks; what happens is posted as an event.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.schema import Launch, Nodes, nodes_of
from flowrun.launcher.supervise.hosts.channel import (
    BEAT_S,
    JsonChannel,
    Silent,
    Stranger,
    WrongToken,
    connect,
    open_channel,
)
from flowrun.launcher.supervise.hosts.endpoint import (
    LOOPBACK,
    Endpoint,
    MeetingPlace,
    find_interface,
    listen,
    open_store,
)
from flowrun.launcher.supervise.hosts.hub import Hub
from flowrun.launcher.supervise.hosts.hub_server import ENDED, NOTICE_S, HubServer, silent_for
from flowrun.launcher.supervise.hosts.patience import Patience
from flowrun.launcher.supervise.hosts.token import TOKEN, find_token, make_token
from flowrun.launcher.supervise.hosts.words import (
    Host,
    HostsHere,
    Leaving,
    Numbered,
    Ready,
    Refused,
    Spread,
)
from flowrun.launcher.supervise.life.events import (
    HostGone,
    HostSilent,
    MeetingFailed,
    Met,
    Parted,
    PlanWanted,
)

_STOPPED_S = 3.0  # after which it is said that this process was stopped itself
_CONNECT_S = 5.0
_GREETING_S = 1.0  # for host 0 to answer, at least; it is asked again
_FLUSH_S = 0.5  # for the last messages, if the network is down
_TOKEN_S = 15.0  # for a file of another host's to be seen here
_KEY = "launch.rdzv_endpoint"
_ADVICE = "Check that every host runs the same command and can reach this endpoint."

Post = Callable[[Notice], None]
Say = Callable[[str], None]


class Alone:
    """The only host of a run: there is nobody else to meet.  See Hosts."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._store: Any = None
        self.place: MeetingPlace | None = None

    async def meet(self, describe: Callable[[], Host]) -> None:
        """Open a new store on loopback, where the ranks meet."""
        self._store = open_store(LOOPBACK)
        self.place = MeetingPlace(
            number=0,
            num_hosts=1,
            address=LOOPBACK,
            port=self._store.port,
            interface=find_interface(LOOPBACK),
        )
        self._post(Met(0, (), False))

    def broadcast(self, event: Notice) -> None:
        """Do nothing."""

    async def part(self, within_s: float) -> None:
        """Wait for nobody."""
        self._post(Parted())

    async def close(self) -> None:
        """Close the store."""
        self._store = None


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
                    self.own_address = self.channel.own_address
                    return self.channel
            await patience.wait(f"waiting for host 0 at {self.endpoint}: {why}")
            if patience.is_over:
                within = f"within launch.join_s={self.launch.join_s:g} s"
                raise RunError(
                    f"{_KEY} {self.endpoint}", f"host 0 did not come {within}: {why}.", _ADVICE
                )

    async def _try_to_join(self, address: str, within_s: float) -> str:
        """Connect to the hub; return why that is not possible yet."""
        try:
            channel = await connect(address, self.endpoint.port, _CONNECT_S)
            if not (token := find_token(self.folder)):
                channel.writer.close()
                return self._miss_token()
            await channel.greet_or_close(token, within_s)
        except (OSError, EOFError) as error:
            return _reason(error)
        except Silent:
            return "a program there says nothing: it is stopped, or no launcher of this run"
        except Stranger as error:
            raise RecipeError(
                _KEY,
                f"the program that listens at {self.endpoint} {error}: "
                "it is no launcher of this run.",
                "Choose a port that is free on that host.",
            ) from None
        except WrongToken:
            raise RecipeError(
                _KEY,
                f"the launcher at {self.endpoint} has another {TOKEN}.",
                f"Give every host the same value of the environment variable {TOKEN}, or one"
                " folder (hydra.run.dir) that all of them see.",
            ) from None
        self.channel = channel
        return ""

    def _miss_token(self) -> str:
        self._seen_s = self._seen_s or time.monotonic()
        if time.monotonic() - self._seen_s > _TOKEN_S:
            raise RecipeError(
                TOKEN,
                f"host 0 answers at {self.endpoint}, and {self.folder} has no secret of its.",
                f"Give every host the same value of the environment variable {TOKEN}, or one"
                " folder (hydra.run.dir) that all of them see.",
            )
        return f"it has made its secret, and {self.folder} does not show it yet"

    async def _resolve(self, patience: Patience) -> list[str]:
        while True:
            try:
                return await self.endpoint.resolve()
            except OSError as error:
                why = f"the name {self.endpoint.host} does not resolve: {error.strerror or error}"
                final = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
                if final or patience.is_over:
                    raise RecipeError(_KEY, f"{why}.", "Give a name or an address.") from None
            await patience.wait(why)

    def _try_to_listen(self, address: str, only_here: bool) -> socket.socket | None:
        try:
            return listen(address, self.endpoint.port)
        except OSError as error:
            elsewhere = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
            if elsewhere and not only_here:
                return None
            raise RecipeError(
                _KEY,
                f"host 0 cannot listen at {self.endpoint}: {_reason(error)}.",
                "Give an address of host 0, and a port that is free there.",
            ) from None

    async def _hold_hub(self, listener: socket.socket) -> JsonChannel:
        hub = Hub(nodes_of(self.launch), self._open_store)
        self.server = HubServer(hub, make_token(self.folder), self.silence_s)
        ours, its = socket.socketpair()
        await self.server.start(listener, its)
        return await open_channel(ours)

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


class Hosts:
    """This launcher's connection to those of the other hosts.

    number, names: of this host and of all, once they have met.  place: where the ranks meet.
    """

    def __init__(
        self, launch: Launch, folder: Path, silence_s: float, say: Say, post: Post
    ) -> None:
        """launch: the recipe's keys.  folder: of the run.  silence_s: seconds without a sign of
        life after which a host counts as gone; 0: never.  say: shows a line to a person.  post:
        takes events.
        """
        self.number = 0
        self.names: tuple[str, ...] = ()
        self.place: MeetingPlace | None = None
        self._link = HubLink(launch, folder, silence_s or float("inf"))
        self._say, self._post = say, post
        self._rounds = 0
        self._folder = ""
        self._parted = False
        self._answers: asyncio.Queue[Notice | None] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None

    async def meet(self, describe: Callable[[], Host]) -> None:
        """Meet the other hosts; post Met, PlanWanted or MeetingFailed.

        describe: describes this host, also where the hub was lost and another is found.
        """
        try:
            self._post(await self._meet(describe))
        except FlowrunError as error:
            refused = isinstance(error, RecipeError)
            fault = Reason(error.where, error.problem, error.instead)
            self._post(MeetingFailed(fault, refused))

    async def _meet(self, describe: Callable[[], Host]) -> Met | PlanWanted:
        launch, endpoint = self._link.launch, self._link.endpoint
        nodes, patience = nodes_of(launch), Patience(launch.join_s, self._say)
        here: tuple[str, ...] = ((await self._enter(describe, patience)).name,)
        while True:
            missing = _missing(len(here), nodes)
            what = f"waiting for {missing} at {endpoint}, where the same command is to run"
            answer = await self._answer(patience, what)
            if isinstance(answer, Numbered):
                return self._take_number(answer)
            if isinstance(answer, PlanWanted):
                return answer
            if isinstance(answer, HostsHere):
                here = answer.names
            elif isinstance(answer, Refused):
                raise RecipeError(answer.where, answer.problem, answer.instead)
            elif not patience.is_over and nodes.may_change:  # lost: another host holds the hub now
                await self._enter(describe, patience)
            elif not patience.is_over:
                raise RunError(f"{_KEY} {endpoint}", f"host 0: {ENDED}", _ADVICE)
            else:
                waited = f"{missing} did not come in launch.join_s={launch.join_s:g} s"
                raise RunError(f"{_KEY} {endpoint}", f"{waited}; here: {', '.join(here)}.", _ADVICE)

    async def _enter(self, describe: Callable[[], Host], patience: Patience) -> Host:
        """Ask to meet the others; connect to the hub before, if this launcher is not."""
        if self._link.channel is None:
            channel = await self._link.connect(patience)
            self._answers = asyncio.Queue()
            self._listening = asyncio.create_task(self._listen(channel, self._answers))
        self._parted = False
        self._folder = describe().folder
        host = replace(describe(), rounds=self._rounds)
        self._send(Ready(host))
        return host

    def _take_number(self, met: Numbered) -> Met:
        self.number, self.names = met.number, met.names
        self._rounds += 1
        self.place = MeetingPlace(
            number=met.number,
            num_hosts=len(met.names),
            address=self._link.address,
            port=met.port,
            interface=find_interface(self._link.own_address),
        )
        return Met(met.number, met.names, met.folder == self._folder and met.number > 0)

    # ---- the run ---------------------------------------------------------------------------------

    def broadcast(self, event: Notice) -> None:
        """Send an event to all other hosts."""
        self._send(Spread(event))

    async def part(self, within_s: float) -> None:
        """Say that this host has sent all, and wait until the others have, so long at most."""
        if self._link.channel is not None and self.names:
            self._send(Leaving())
            patience = Patience(within_s, self._say)
            while not patience.is_over:
                answer = await self._answer(patience, "waiting for the other hosts to end")
                if answer is None or isinstance(answer, Parted):
                    break
        self._post(Parted())

    async def close(self) -> None:
        """Let the last messages leave; then close all connections."""
        if self._listening is not None:
            self._listening.cancel()
        await self._link.close()

    def _send(self, sent: Notice) -> None:
        if channel := self._link.channel:  # else it is lost, which is an answer
            channel.send(sent)

    async def _answer(self, patience: Patience, what: str) -> Notice | None:
        """Return what the hub answers; None if it is lost, or the time is up.  what: is said every
        few seconds.
        """
        while not patience.is_over:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._answers.get(), patience.pause_s)
            patience.say(what)
        return None

    async def _listen(self, channel: JsonChannel, answers: asyncio.Queue[Notice | None]) -> None:
        """Take what comes from the hub, until the connection ends.  answers: gets that it has."""
        beating = asyncio.create_task(self._beat(channel))
        why = ENDED
        try:
            while True:
                self._take(await channel.receive(), answers)
        except TimeoutError:
            why = silent_for(self._link.silence_s)
        except (OSError, EOFError):
            pass
        except ValueError as error:
            why = f"its launcher sent what makes no sense: {error}"
        finally:
            beating.cancel()
            channel.writer.close()
        if not self._parted and self.names and not self._link.server:
            self._post(HostGone(0, self.names[0], why))
        self._link.channel = None
        answers.put_nowait(None)

    def _take(self, came: Notice, answers: asyncio.Queue[Notice | None]) -> None:
        if isinstance(came, (HostsHere, Numbered, Refused, PlanWanted, Parted)):
            self._parted = isinstance(came, Parted)
            answers.put_nowait(came)
        else:
            self._post(came)

    async def _beat(self, channel: JsonChannel) -> None:
        """Let the hub know that this host is alive, and notice if the hub is not."""
        noticed, link = False, self._link
        while True:
            await asyncio.sleep(BEAT_S)
            if (stopped_s := channel.beat()) > _STOPPED_S:
                self._say(f"this host was stopped for {stopped_s:.0f} s")
            if link.server is None and channel.silent_s > link.silence_s:
                channel.reader.set_exception(TimeoutError())
            elif channel.silent_s < NOTICE_S:
                noticed = False
            elif link.server is None and self.names and not noticed:
                noticed = True
                self._post(HostSilent(0, self.names[0], channel.silent_s))


def open_hosts(
    launch: Launch, folder: Path, silence_s: float, say: Say, post: Post
) -> Hosts | Alone:
    """Return this launcher among the others.  The parameters are those of Hosts."""
    together = launch.num_hosts > 1 and launch.name == "local"
    return Hosts(launch, folder, silence_s, say, post) if together else Alone(post)


def _missing(here: int, nodes: Nodes) -> str:
    if here < nodes.fewest:
        return f"{nodes.fewest - here} of {nodes.fewest} hosts"
    return f"hosts that finish their step, or for more than {here}"


def _reason(error: BaseException) -> str:
    """Say in a few words why a connection failed."""
    if isinstance(error, EOFError):
        return "it closes the connection"
    if isinstance(error, TimeoutError):
        return f"no answer in {_CONNECT_S:.0f} s"
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else str(error)
