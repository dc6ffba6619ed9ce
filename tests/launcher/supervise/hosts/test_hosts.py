import asyncio
import re
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from flowrun.launcher.ranks.rank_events import RankEnded, StepDone
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.schema import Launch
from flowrun.launcher.supervise.hosts import channel, hub, hub_link, token
from flowrun.launcher.supervise.hosts.hosts import Hosts
from flowrun.launcher.supervise.hosts.words import Host
from flowrun.launcher.supervise.life.events import (
    FromHost,
    HostGone,
    LauncherFailed,
    Met,
    Parted,
    PlanWanted,
)
from support.runs.command import free_port
from support.runs.plain_host import plain_host


class One:
    """A launcher: what has happened to it, and what it said to its person."""

    def __init__(self, port: int, folder: Path, rank: int | None = None, **keys: Any) -> None:
        self.planned = 2
        self.events: asyncio.Queue[Notice] = asyncio.Queue()
        self.lines: list[str] = []
        given = {"nnodes": 2, "node_rank": rank, "rdzv_endpoint": f"127.0.0.1:{port}"}
        self.launch = Launch(**given | {"join_s": 20.0} | keys)
        say, post = self.lines.append, self.events.put_nowait
        self.hosts = Hosts(self.launch, folder, 60.0, say, post, self.describe)

    def describe(self) -> Host:
        rank, recipe = self.launch.node_rank, {"launch.nnodes": str(self.launch.nnodes)}
        return plain_host(f"node{rank}", node_rank=rank, recipe=recipe, planned=self.planned)

    async def next(self) -> Notice:
        return await asyncio.wait_for(self.events.get(), 60)

    async def meet(self) -> Notice:
        meeting = asyncio.create_task(self.hosts.meet())
        found = await self.next()
        meeting.cancel()  # it waits on, where hosts are refused
        return found

    async def part(self, within_s: float = 20.0) -> list[Notice]:
        """Part, and return what has happened until then."""
        await self.hosts.part(within_s)
        found = []
        while not isinstance(event := await self.next(), Parted):
            found.append(event)
        return found


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(token.TOKEN, raising=False)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds in a run takes tenths."""
    for name in ("_FIRST_LINE_S", "_NEXT_LINE_S", "_RETRY_S"):
        monkeypatch.setattr(hub_link, name, 0.05)


def run(test: Callable[..., Coroutine[Any, Any, None]], *ones: One) -> None:
    """Run a test with launchers, which are closed at its end."""

    async def live() -> None:
        try:
            await test(*ones)
        finally:
            for one in ones:
                await one.hosts.close()

    asyncio.run(live())


async def together(*calls: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*calls))


def pair(folder: Path, **keys: Any) -> tuple[One, One]:
    port = free_port()
    return One(port, folder, 0, **keys), One(port, folder, 1, **keys)


async def met(first: One, second: One) -> None:
    """Let two launchers meet."""
    names = ("node0", "node1")
    both = [came.company for came in await together(first.meet(), second.meet())]
    assert [(one.number, one.shared) for one in both] == [(0, False), (1, True)]
    assert [(one.names, one.epoch) for one in both] == [(names, 1), (names, 1)]
    places = first.hosts.place, second.hosts.place
    assert places[0] and places[1] and places[0].port == places[1].port
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    make(places[1].address, places[1].port, is_master=False).set("key", "value")


def test_hosts_hear_each_other_and_part_together(tmp_path: Path) -> None:
    async def live(first: One, second: One) -> None:
        await met(first, second)
        done, ended = StepDone(0, {"loss": 1.5}, 0.1, {}), RankEnded(0, {})
        second.hosts.broadcast(done)
        first.hosts.broadcast(ended)
        heard = await together(first.part(), second.part())
        assert heard == [[FromHost(1, done)], [FromHost(0, ended)]]
        await second.hosts.close()
        assert first.events.empty()  # nobody has gone

    run(live, *pair(tmp_path))


def failure(event: Notice, refused: bool) -> Any:
    assert isinstance(event, LauncherFailed)
    assert event.refused is refused
    return event.fault


def test_hosts_that_want_other_numbers_of_hosts_are_refused(tmp_path: Path) -> None:
    async def live(*both: One) -> None:
        for event in await together(*(one.meet() for one in both)):
            fault = failure(event, refused=True)
            assert fault.where == "launch.nnodes"
            assert fault.problem == "launch.nnodes is 2 on node0, and 4 on node1."

    port = free_port()
    run(live, One(port, tmp_path, 0), One(port, tmp_path, 1, nnodes=4))


@pytest.mark.usefixtures("soon")
def test_a_host_that_waits_says_for_whom(tmp_path: Path) -> None:
    port = free_port()

    async def live(first: One, second: One) -> None:
        alone = failure(await first.meet(), refused=False)
        assert alone.problem == "1 of 2 hosts did not come in launch.join_s=0.3 s; here: node0."
        assert first.lines[0].startswith(f"waiting for 1 of 2 hosts at 127.0.0.1:{port}, where the")
        assert re.search(r": \d+ s of [\d.]+ s$", first.lines[0])
        await first.hosts.close()
        early = failure(await second.meet(), refused=False)
        assert early.problem.endswith("within launch.join_s=0.3 s: connection refused.")
        waits = f"waiting for host 0 at 127.0.0.1:{port}: connection refused: "
        assert second.lines[0].startswith(waits)

    run(live, *(One(port, tmp_path, rank, join_s=0.3) for rank in (0, 1)))


@pytest.mark.parametrize("who", [0, 1], ids=["the hub's host", "another host"])
def test_a_host_that_may_leave_is_gone_without(
    tmp_path: Path, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the hub goes with it, the other host holds a new one."""
    monkeypatch.setattr(hub, "_LAST_CALL_AGAIN_S", 0.0)
    port = free_port()

    async def live(*both: One) -> None:
        places = [came.company for came in await together(*(one.meet() for one in both))]
        assert sorted(place.number for place in places) == [0, 1]
        gone = next(one for one, place in zip(both, places, strict=True) if place.number == who)
        left = next(one for one in both if one is not gone)
        await gone.hosts.close()
        lost = await left.next()
        assert isinstance(lost, HostGone) and lost.host == who
        await left.part(1.0)
        assert await left.meet() == PlanWanted(1, 0)
        left.planned = 1
        again = await left.meet()
        assert isinstance(again, Met) and again.company.names == ("nodeNone",)
        assert again.company.epoch == (1 if who else 2)

    run(live, *(One(port, tmp_path, nnodes="1:2") for _ in range(2)))


@contextmanager
def program(banner: bytes) -> Iterator[int]:
    """Another program that listens and says `banner` to all who come; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as came:
                came.sendall(banner)
                while came.recv(1 << 16):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def refused(one: One) -> Any:
    async def live(one: One) -> None:
        faults.append(failure(await one.meet(), refused=True))

    faults: list[Any] = []
    run(live, one)
    return faults[0]


def test_a_port_of_another_program_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(token.TOKEN, "known")
    with program(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "answers with something else" in refused(One(port, tmp_path)).problem
    with socket.create_server(("127.0.0.1", 0)) as server:
        fault = refused(One(server.getsockname()[1], tmp_path, rank=0))
        assert fault.problem.endswith("address already in use.")


def test_a_program_that_says_nothing_may_be_a_host_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_link, "_GREETING_S", 0.1)
    monkeypatch.setenv(token.TOKEN, "known")

    async def live(one: One) -> None:
        fault = failure(await one.meet(), refused=False)
        assert fault.problem.startswith("host 0 did not come within launch.join_s=0.3 s: a program")

    with program(b"") as port:
        run(live, One(port, tmp_path, join_s=0.3))


def test_a_launcher_that_was_stopped_does_not_take_others_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(channel.time, "monotonic", lambda: now)
    stopped_early = channel.JsonChannel(Mock(), Mock())
    one = channel.JsonChannel(Mock(), Mock())
    assert one.beat() == 0
    now += 1.5
    assert one.beat() == 0
    assert one.silent_s == 1.5
    now += 60.0
    assert one.beat() == 58.0
    assert one.silent_s == 3.5
    assert stopped_early.beat() == 59.5


def test_a_launcher_that_waited_for_an_answer_was_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0

    async def answer_late(*_: Any) -> None:
        nonlocal now
        now += 8.0

    monkeypatch.setattr(channel.time, "monotonic", lambda: now)
    monkeypatch.setattr(channel.JsonChannel, "_greet", answer_late)
    one = channel.JsonChannel(Mock(), Mock())
    asyncio.run(one.greet("", hub=False))
    assert one.beat() == 0


def test_a_name_that_does_not_resolve_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    fault = refused(One(1, tmp_path, rdzv_endpoint="nosuch:1"))
    assert fault.problem == "the name nosuch does not resolve: Name or service not known."


def test_hosts_with_another_token_do_not_meet(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        token.make_token(tmp_path / name)

    async def live(first: One, second: One) -> None:
        alone, wrong = await together(first.meet(), second.meet())
        failure(alone, refused=False)  # what connects does not end the run
        assert "has another FLOWRUN_TOKEN" in failure(wrong, refused=True).problem

    port = free_port()
    run(live, One(port, tmp_path / "a", 0, join_s=1.0), One(port, tmp_path / "b", 1))


def test_a_host_without_the_first_ones_folder_needs_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_link, "_TOKEN_S", 0.0)
    (tmp_path / "b").mkdir()

    async def live(first: One, second: One) -> None:
        _, wrong = await together(first.meet(), second.meet())
        fault = failure(wrong, refused=True)
        assert fault.where == "FLOWRUN_TOKEN" and "hydra.run.dir" in fault.instead

    port = free_port()
    run(live, One(port, tmp_path / "a", 0, join_s=2.0), One(port, tmp_path / "b", 1))


SENSELESS = [
    {"is": "Ready", "host": {"nodes": "2", "recipe": 5}},
    {"is": "Ready", "host": 7},
    {"is": "nothing"},
    ["meet", {}],
    {"is": "StepDone"},
]


@pytest.mark.parametrize("frame", SENSELESS)
def test_what_makes_no_sense_leaves_the_meeting_of_others_alone(
    tmp_path: Path, frame: object
) -> None:
    """Also from one who knows the token, and before the others have come."""

    async def live(first: One, second: One) -> None:
        meeting = asyncio.create_task(first.meet())
        port = int(first.launch.rdzv_endpoint.rpartition(":")[2])
        while not (known := token.find_token(tmp_path)):
            await asyncio.sleep(0)
        stranger = await connected(port)
        await stranger.greet(known, hub=False)
        stranger._write(frame)
        with pytest.raises((EOFError, OSError)):
            while True:
                await stranger.receive()
        stranger.writer.close()
        assert isinstance(await second.meet(), Met)
        assert isinstance(await meeting, Met)

    run(live, *pair(tmp_path))


async def connected(port: int) -> channel.JsonChannel:
    while True:
        try:
            return await channel.connect("127.0.0.1", port, 5.0)
        except OSError:
            await asyncio.sleep(0)


def test_connections_without_a_greeting_are_few_and_print_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def live(first: One, second: One) -> None:
        meeting = asyncio.create_task(first.meet())
        port = int(first.launch.rdzv_endpoint.rpartition(":")[2])
        knocking = [(await connected(port)).writer for _ in range(100)]
        for writer in knocking:
            writer.close()
        assert isinstance(await second.meet(), Met)
        assert isinstance(await meeting, Met)

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 160), hard))
    try:
        run(live, *pair(tmp_path, join_s=60.0))  # strangers have the files for 10 s
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert capfd.readouterr().err == ""


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made = token.make_token(tmp_path)
    assert token.make_token(tmp_path) == token.find_token(tmp_path) == made
    (tmp_path / token.FILE).chmod(0o644)
    with pytest.raises(Exception, match="others can read"):
        token.find_token(tmp_path)
