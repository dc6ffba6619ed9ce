"""Hosts: this launcher among those of the other hosts.

The launchers meet at launch.rdzv_endpoint.  The one whose machine has that address holds the hub
(hub.py), and connects to it like every other.  Over this connection, which lasts as long as a run,
they compare what they are about to run, number the hosts, send each other what happens, and
learn at once when a launcher has gone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.launch.hosts.alone import Alone, HostsChanged, Receive, Save, hold_nothing
from flowrun.launcher.launch.hosts.channel import (
    BEAT_S,
    JsonChannel,
    Silent,
    Stranger,
    WrongToken,
    connect,
    end_tasks,
    open_channel,
)
from flowrun.launcher.launch.hosts.endpoint import Endpoint, find_interface, listen
from flowrun.launcher.launch.hosts.hub import Hub, as_fields
from flowrun.launcher.launch.hosts.hub_server import (
    ENDED,
    NOTICE_S,
    HubServer,
    silent_for,
)
from flowrun.launcher.launch.hosts.meeting import Host
from flowrun.launcher.launch.hosts.patience import Patience
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace, open_store
from flowrun.launcher.recipe.schema import Launch, Nodes, nodes_of

TOKEN = "FLOWRUN_TOKEN"  # a secret of the run, in the environment of each host

_STOPPED_S = 3.0  # after which it is said that this process was stopped itself
_CONNECT_S = 5.0
_GREETING_S = 1.0  # for host 0 to answer, at least; it is asked again
_FLUSH_S = 0.5  # for the last messages, if the network is down
_KEY = "launch.rdzv_endpoint"
_ADVICE = "Check that every host runs the same command and can reach this endpoint."

T = TypeVar("T")


class Hosts:
    """This launcher's connection to those of the other hosts.

    number, names: of this host and of all, once they have met.  listener: where this host takes
    copies of its neighbour's state in the next round; None if it has not the memory.  token: that
    hosts have to know.  shared: True if this host's run has
    the folder of the first host's.  may_change: hosts may join and leave.
    """

    def __init__(self, launch: Launch, silence_s: float, say: Callable[[str], None]) -> None:
        """launch: the recipe's keys.  silence_s: seconds without a sign of life after which a host
        counts as gone; 0: never.  say: shows a line to a person.
        """
        self.number = 0
        self.names: list[str] = []
        self.shared = False
        self.may_change = nodes_of(launch).may_change
        self.listener: socket.socket | None = None
        self._rounds = 0
        self._launch = launch
        self._endpoint = Endpoint.parse(launch.rdzv_endpoint)
        self._say = say
        self._silence_s = silence_s or float("inf")
        self.token = os.environ.get(TOKEN, "")
        self._channel: JsonChannel | None = None
        self._server: HubServer | None = None
        self._stores: list[Any] = []  # of all rounds, if the hub is here
        self._address = self._own_address = ""  # of the hub, and of this host
        self._parted = False
        self._answers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[int, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._receive: Receive = lambda host, event: None
        self._threads = (
            threading.Thread(target=self._loop.run_forever, daemon=True),
            threading.Thread(target=self._hand_over, daemon=True),
        )
        for thread in self._threads:
            thread.start()

    # ---- the meeting -----------------------------------------------------------------------------

    def meet(
        self, describe: Callable[[], Host], receive: Receive, save: Save = hold_nothing
    ) -> MeetingPlace:
        """Meet the other hosts, and return where the ranks of all are to meet.

        describe: describes this host, also where the hub was lost and another is found; it may
        raise an error.  receive: gets the events of other hosts from now on, in a
        thread of its own, and ("gone", name, why) and ("silent", name, seconds) of a host.  save:
        writes what `describe` said that this host holds, or completes what all have.  Raises
        RecipeError if the hosts cannot train together, or if nobody can meet at the endpoint;
        RunError if not all come within launch.join_s; HostsChanged.
        """
        self._receive, host = receive, replace(describe(), rounds=self._rounds)
        patience = Patience(self._launch.join_s, self._say)
        self._enter(host, patience)
        here, nodes = [host.name], nodes_of(self._launch)
        while True:
            missing = _missing(len(here), nodes)
            names = ", ".join(here)
            what = f"waiting for {missing} at {self._endpoint}, where the same command is to run"
            match self._answer(patience, what):
                case ("met", number, hosts, port, folder, name, links):
                    self.number, self.names = number, hosts
                    self.shared = folder == host.folder and number > 0
                    self._rounds += 1
                    return self._place(port, name, links)
                case ("save" | "complete" as word, step, what):
                    save(word, step, what)
                    self._enter(replace(describe(), rounds=self._rounds), patience)
                case ("plan", num_hosts, step):
                    raise HostsChanged(num_hosts, step)
                case ("waiting", list(here)):
                    pass
                case ("refused", where, problem, instead):
                    raise RecipeError(where, problem, instead)
                case ("lost",) if self.may_change:  # another host holds the hub from now on
                    self._enter(replace(describe(), rounds=self._rounds), patience)
                case ("lost",):
                    raise RunError(f"{_KEY} {self._endpoint}", f"host 0: {ENDED}", _ADVICE)
                case None:
                    waited = f"{missing} did not come in launch.join_s={self._launch.join_s:g} s"
                    raise RunError(f"{_KEY} {self._endpoint}", f"{waited}; here: {names}.", _ADVICE)

    def _enter(self, host: Host, patience: Patience) -> None:
        """Ask to meet the others; connect to the hub before, if this launcher is not."""
        if self._channel is None:
            self._channel = channel = self._connect(patience)
            self._own_address = self._address if self._server else channel.own_address
            self._answers = queue.SimpleQueue()
            self._submit(self._listen(channel, self._answers))
        self._parted = False
        if self.listener:
            self.listener.close()  # nobody of an earlier round comes to that of a later one
        self.listener = listen(self._own_address) if host.copies else None
        link = (self._own_address, self.listener.getsockname()[1]) if self.listener else None
        self._post("meet", as_fields(replace(host, link=link)))

    def _place(self, port: int, name: str, links: Sequence[Any]) -> MeetingPlace:
        return MeetingPlace(
            number=self.number,
            num_hosts=len(self.names),
            address=self._address,
            port=port,
            interface=find_interface(self._own_address),
            name=name,
            links=tuple(link and Endpoint(str(link[0]), int(link[1])) for link in links),
        )

    def _connect(self, patience: Patience) -> JsonChannel:
        """Hold the hub if the endpoint is this machine's; else connect to it."""
        addresses = self._resolve(patience)
        rank = self._launch.node_rank
        if rank in (None, 0):
            for address in addresses:
                if listener := self._try_to_listen(address, only_here=rank == 0):
                    self._address = address
                    return self._hold_hub(listener)
        while True:
            for address in addresses:
                try:
                    self._address = address
                    return self._run(self._open(address, max(_GREETING_S, patience.pause_s)))
                except (OSError, EOFError) as error:
                    why = _reason(error)
                except Silent:
                    why = "a program there says nothing: it is stopped, or no launcher of this run"
                except Stranger as error:
                    raise RecipeError(
                        _KEY,
                        f"the program that listens at {self._endpoint} {error}: "
                        "it is no launcher of this run.",
                        "Choose a port that is free on that host.",
                    ) from None
                except WrongToken:
                    raise RecipeError(
                        _KEY,
                        f"the launcher at {self._endpoint} has another {TOKEN}.",
                        f"Give every host the same value of the environment variable {TOKEN}.",
                    ) from None
            patience.wait(f"waiting for host 0 at {self._endpoint}: {why}")
            if patience.is_over:
                within = f"within launch.join_s={self._launch.join_s:g} s"
                raise RunError(
                    f"{_KEY} {self._endpoint}", f"host 0 did not come {within}: {why}.", _ADVICE
                )

    def _resolve(self, patience: Patience) -> list[str]:
        while True:
            try:
                return self._endpoint.resolve()
            except OSError as error:
                why = f"the name {self._endpoint.host} does not resolve: {error.strerror or error}"
                final = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
                if final or patience.is_over:
                    raise RecipeError(_KEY, f"{why}.", "Give a name or an address.") from None
            patience.wait(why)

    def _try_to_listen(self, address: str, only_here: bool) -> socket.socket | None:
        try:
            return listen(address, self._endpoint.port)
        except OSError as error:
            elsewhere = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
            if elsewhere and not only_here:
                return None
            raise RecipeError(
                _KEY,
                f"host 0 cannot listen at {self._endpoint}: {_reason(error)}.",
                "Give an address of host 0, and a port that is free there.",
            ) from None

    def _hold_hub(self, listener: socket.socket) -> JsonChannel:
        hub = Hub(nodes_of(self._launch), self._open_store)
        self._server = HubServer(hub, self.token, self._silence_s)
        ours, its = socket.socketpair()
        self._run(self._server.start(listener, its))
        return self._run(open_channel(ours))

    def _open_store(self) -> int:
        self._stores.append(open_store(self._address))
        return int(self._stores[-1].port)

    async def _open(self, address: str, within_s: float) -> JsonChannel:
        channel = await connect(address, self._endpoint.port, _CONNECT_S)
        await channel.greet_or_close(self.token, within_s)
        return channel

    # ---- the run ---------------------------------------------------------------------------------

    def name(self, number: int) -> str:
        """Name a host for a person."""
        return f"host {number} ({self.names[number]})"

    def broadcast(self, *event: Any) -> None:
        """Send an event to all other hosts."""
        self._post("broadcast", event)

    def part(self, within_s: float | None = None) -> None:
        """Say that this host has sent all, and wait until the others have; within_s: at most."""
        if self._channel is None or not self.names:
            return
        self._post("part")
        patience = Patience(within_s or float("inf"), self._say)
        while not patience.is_over:
            answer = self._answer(patience, "waiting for the other hosts to end")
            if answer in (("parted",), ("lost",)):
                return

    def close(self) -> None:
        """Let the last messages leave; then close all connections, and the ranks' store."""
        if not self._loop.is_running():
            return
        self._run(self._shut())
        self._events.put(None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()
        self._stores.clear()

    async def _shut(self) -> None:
        if self._channel is not None:
            await self._channel.flush(_FLUSH_S)
        if self._server is not None:
            await self._server.close(_FLUSH_S)
        if self.listener is not None:
            self.listener.close()
        await end_tasks()

    async def _listen(self, channel: JsonChannel, answers: queue.SimpleQueue[Any]) -> None:
        """Take what comes from the hub, until the connection ends.  answers: gets that it has."""
        beating = asyncio.create_task(self._beat(channel))
        why = ENDED
        try:
            while True:
                self._take(await channel.receive())
        except TimeoutError:
            why = silent_for(self._silence_s)
        except (OSError, EOFError):
            pass
        beating.cancel()
        if not self._parted and self.names and not self._server:
            self._events.put((0, ("gone", self.names[0], why)))
        channel.writer.close()
        self._channel = None
        answers.put(("lost",))

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("event", number, what):
                self._events.put((number, tuple(what)))
            case ("gone" | "silent" as kind, number, name, what):
                self._events.put((number, (kind, name, what)))
            case ("joining", name):
                self._events.put((self.number, ("joining", name)))
            case _:
                self._parted = message == ("parted",)
                self._answers.put(message)

    async def _beat(self, channel: JsonChannel) -> None:
        """Let the hub know that this host is alive, and notice if the hub is not."""
        noticed = False
        while True:
            await asyncio.sleep(BEAT_S)
            if (stopped_s := channel.beat()) > _STOPPED_S:
                self._say(f"this host was stopped for {stopped_s:.0f} s")
            if self._server is None and channel.silent_s > self._silence_s:
                channel.reader.set_exception(TimeoutError())
            elif channel.silent_s < NOTICE_S:
                noticed = False
            elif self._server is None and self.names and not noticed:
                noticed = True
                self._events.put((0, ("silent", self.names[0], channel.silent_s)))

    def _hand_over(self) -> None:
        while (event := self._events.get()) is not None:
            self._receive(*event)

    # ---- the event loop --------------------------------------------------------------------------

    def _post(self, *message: Any) -> None:
        if channel := self._channel:  # else it is lost, which is an answer
            self._loop.call_soon_threadsafe(channel.send, message)

    def _answer(self, patience: Patience, what: str) -> tuple[Any, ...] | None:
        """Return what the hub answers; None if the time is up.  what: is said every few seconds."""
        while not patience.is_over:
            try:
                return self._answers.get(timeout=patience.pause_s)
            except queue.Empty:
                patience.say(what)
        return None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the event loop, and wait; Ctrl-C interrupts it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _submit(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)


@contextmanager
def open_hosts(
    launch: Launch, silence_s: float, say: Callable[[str], None]
) -> Iterator[Hosts | Alone]:
    """Yield this launcher among the others; at the end all connections are closed.

    launch: the recipe's keys.  silence_s: after which a host counts as gone; 0: never.  say: shows
    a line to a person.
    """
    together = launch.num_hosts > 1 and launch.name == "local"
    hosts = Hosts(launch, silence_s, say) if together else Alone()
    try:
        yield hosts
    finally:
        hosts.close()


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
