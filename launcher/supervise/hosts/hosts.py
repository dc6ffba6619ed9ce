"""Hosts: this launcher among those of the other hosts, in the event loop of the driver.

The launchers meet at launch.rdzv_endpoint.  The one whose machine has that address holds the hub
(hub.py), and connects to it like every other (hub_link.py).  Over this connection, which lasts as
long as a run or the hub, they compare what they are about to run, number the hosts, send each other
what happens, and learn at once when a launcher has gone.

Where a host does not see the folder of the first, the first fetches what its ranks write, and it
fetches the checkpoint that it is to begin at (other_folder.py): what a rank has written becomes
known once it is here.

Everything here runs in the loop's thread, and nothing blocks; what happens is posted as an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.launcher.ranks.failure import reason_of
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.schema import STORE, Launch, Nodes, nodes_of
from flowrun.launcher.supervise.hosts import words
from flowrun.launcher.supervise.hosts.channel import BEAT_S, ENDED, QUIET, JsonChannel
from flowrun.launcher.supervise.hosts.endpoint import (
    LOOPBACK,
    MeetingPlace,
    find_interface,
    open_store,
)
from flowrun.launcher.supervise.hosts.hub_link import ADVICE, KEY, LONG_S, HubLink, Patience
from flowrun.launcher.supervise.hosts.moves import Moves
from flowrun.launcher.supervise.life import events

_NOTHING = (
    "hosts share neither a folder nor a store: host 0 collects checkpoints, and host 1 has a copy;"
    " hydra.run.dir on a disk that all see, or train.store, keeps them where both are lost"
)
_MAY_TRAIN = (
    "{} may train on, and nothing in common would end it: only the larger part of the hosts"
    " continues; with one folder (hydra.run.dir) or train.store any part does"
)
_STOPPED_S = 3.0  # after which it is said that this process was stopped itself
_ANSWERS = (words.HostsHere, events.Met, events.PlanWanted, events.Parted)

Post = Callable[[Notice], None]
Say = Callable[[str], None]


class Alone:
    """The only host of a run: there is nobody else to meet.  See Hosts."""

    moves: Moves | None = None

    def __init__(self, post: Post) -> None:
        self._post = post
        self._store: Any = None
        self.place: MeetingPlace | None = None

    async def meet(self) -> None:
        """Open a new store on loopback, where the ranks meet."""
        self._store = open_store(LOOPBACK)
        self.place = MeetingPlace(0, 1, LOOPBACK, self._store.port, find_interface(LOOPBACK))
        self._post(events.Met(events.Company(), self._store.port))

    def broadcast(self, event: Notice) -> None:
        pass

    async def part(self, within_s: float) -> None:
        self._post(events.Parted())

    async def close(self) -> None:
        self._store = None


class Hosts:
    """This launcher's connection to those of the other hosts.  met: the last round."""

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        silence_s: float,
        say: Say,
        post: Post,
        describe: Callable[[], words.Host],
        known: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """silence_s: seconds without a sign of life after which a host counts as gone; 0: never.
        say: shows a line to a person.  post: takes events.  known: see HubLink.
        """
        self.met: events.Company | None = None
        self.place: MeetingPlace | None = None
        self._link = HubLink(launch, folder, silence_s or float("inf"), known)
        self.moves = Moves(folder, self._link.files, silence_s or LONG_S, post)
        self._say, self._post, self._describe = say, post, describe
        self._has_store = self._doubts = False
        self._answers: asyncio.Queue[Notice | None] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None

    async def meet(self) -> None:
        """Meet the other hosts; post Met, PlanWanted or LauncherFailed."""
        try:
            self._post(await self._meet())
        except FlowrunError as error:
            refused = isinstance(error, RecipeError)
            self._post(events.LauncherFailed(reason_of(error), refused))

    async def _meet(self) -> events.Met | events.PlanWanted:
        launch, endpoint = self._link.launch, self._link.place
        at = f"{KEY} {endpoint}"
        self.moves.stop()
        nodes, patience = nodes_of(launch), Patience(launch.join_s, self._say)
        here: tuple[str, ...] = (await self._enter(patience),)
        while True:
            missing = _missing(len(here), nodes)
            what = f"waiting for {missing} at {endpoint}, where the same command is to run"
            answer = await self._answer(patience, what)
            if isinstance(answer, events.Met):
                self._take_number(answer.company, answer.port)
            if isinstance(answer, (events.Met, events.PlanWanted)):
                return answer
            if isinstance(answer, words.HostsHere):
                here = answer.names
            elif patience.is_over:
                waited = f"{missing} did not come in launch.join_s={launch.join_s:g} s"
                raise RunError(at, f"{waited}; here: {', '.join(here)}.", ADVICE)
            elif not nodes.may_change:
                raise RunError(at, f"host 0: {ENDED}", ADVICE)
            else:  # another host holds the hub now
                await self._enter(patience)

    async def _enter(self, patience: Patience) -> str:
        """Ask to meet the others; connect to the hub before, if this launcher is not.  Return the
        name of this host.
        """
        if self._link.channel is None:
            channel = await self._link.connect(patience)
            self._answers = asyncio.Queue()
            self._listening = asyncio.create_task(self._listen(channel, self._answers))
        host = replace(self._describe(), door=self._link.door.at)
        self._has_store = bool(host.recipe.get(STORE))
        if met := self.met:
            number, count = met.number, len(met.names)
            quorum = (count // 2 + 1 if number else (count + 1) // 2) if self._doubts else 1
            host = replace(host, quorum=quorum, epoch=met.epoch)
        self._send(words.Ready(host))
        return host.name

    def _take_number(self, met: events.Company, port: int) -> None:
        alone = not all(met.sees) and not self._has_store
        if alone and not met.number and not self.met and nodes_of(self._link.launch).may_change:
            self._say(_NOTHING)
        self.met = self.moves.met = self._link.met = met
        self._doubts = False
        interface = find_interface(self._link.own_address)
        self.place = MeetingPlace(met.number, len(met.names), self._link.address, port, interface)

    def _doubt(self, host: int) -> None:
        """A host is silent, and may train on.  Where one of both would not find the folder or the
        store taken, this one continues with more than half of the hosts, or with the half that has
        the first.
        """
        if (met := self.met) and not met.sees[met.number or host] and not self._has_store:
            self._doubts = True
            self._say(_MAY_TRAIN.format(met.names[host]))

    def broadcast(self, event: Notice) -> None:
        self.moves.owe(event)
        self._send(event)

    async def part(self, within_s: float) -> None:
        """Say that this host has sent all, and wait until the others have, so long at most."""
        if self._link.channel is not None and self.met:
            ends_s = time.monotonic() + within_s
            await self.moves.files.settle(
                lambda: self._link.channel is None or time.monotonic() > ends_s
            )
            self._send(words.Leaving())
            patience = Patience(within_s, self._say)
            while not patience.is_over:
                answer = await self._answer(patience, "waiting for the other hosts to end")
                if answer is None or isinstance(answer, events.Parted):
                    break
            await self.moves.settle(within_s)
        self._post(events.Parted())

    async def close(self) -> None:
        """Let the last messages leave; then close all connections."""
        if self._listening is not None:
            self._listening.cancel()
        self.moves.stop()
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
        try:
            why = await channel.listen(lambda came: self._take(came, answers), self._link.silence_s)
        finally:
            beating.cancel()
        if self.met and not self._link.holds_hub:
            if why.startswith(QUIET):
                self._doubt(0)
            self._post(events.HostGone(0, why))
        self._link.channel = None
        answers.put_nowait(None)

    def _take(self, came: Notice, answers: asyncio.Queue[Notice | None]) -> None:
        if isinstance(came, events.HostGone) and came.why.startswith(QUIET):
            self._doubt(came.host)
        if isinstance(came, _ANSWERS):
            answers.put_nowait(came)
        elif not self.moves.takes(came):
            self._post(came)

    async def _beat(self, channel: JsonChannel) -> None:
        """Let the hub know that this host is alive, and notice if the hub is not."""
        link = self._link
        silence_s = float("inf") if link.holds_hub else link.silence_s
        while True:
            await asyncio.sleep(BEAT_S)
            if (stopped_s := channel.beat(silence_s)) > _STOPPED_S:
                self._say(f"this host was stopped for {stopped_s:.0f} s")
                if link.holds_hub and self.met and stopped_s >= link.silence_s:  # others went on
                    for host in range(1, len(self.met.names)):
                        self._doubt(host)
            if channel.falls_silent() and self.met and not link.holds_hub:
                self._post(words.say_silent(self.met.name(0), channel.silent_s))


def _missing(here: int, nodes: Nodes) -> str:
    if here < nodes.fewest:
        return f"{nodes.fewest - here} of {nodes.fewest} hosts"
    return f"hosts that finish their step, or for more than {here}"
