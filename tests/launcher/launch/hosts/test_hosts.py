"""Launchers that meet over loopback, each in a thread."""

from __future__ import annotations

import asyncio
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.launcher.launch.hosts import channel, hub, patience
from flowrun.launcher.launch.hosts import hosts as module
from flowrun.launcher.launch.hosts.alone import HostsChanged
from flowrun.launcher.launch.hosts.hosts import Hosts
from flowrun.launcher.launch.hosts.meeting import Host
from flowrun.launcher.recipe.schema import Launch, nodes_of
from support.runs.command import free_port


class One:
    """A launcher: what it was told, and what it said to its person."""

    def __init__(self, port: int, stack: ExitStack, rank: int | None = None, **keys: Any) -> None:
        self.planned = 2
        self.events: queue.SimpleQueue[tuple[int, tuple[Any, ...]]] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.launch = Launch(
            **{
                "nnodes": 2,
                "node_rank": rank,
                "rdzv_endpoint": f"127.0.0.1:{port}",
                "join_s": 20.0,
                **keys,
            }
        )
        self.hosts = Hosts(self.launch, 60.0, self.lines.append)
        stack.callback(self.hosts.close)

    def describe(self) -> Host:
        return Host(
            name=f"node{self.launch.node_rank}",
            nodes=str(nodes_of(self.launch)),
            node_rank=self.launch.node_rank,
            recipe={"launch.nnodes": str(self.launch.nnodes)},
            plan="",
            planned=self.planned,
            start=0,
            rounds=0,
            versions={},
            folder="/shared",
        )

    def meet(self) -> Any:
        return self.hosts.meet(self.describe, lambda *event: self.events.put(event))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds in a run takes tenths."""
    for name in ("_FIRST_LINE_S", "_NEXT_LINE_S", "_RETRY_S"):
        monkeypatch.setattr(patience, name, 0.05)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls at the same time; an error is its own result."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def met(stack: ExitStack) -> tuple[One, One]:
    """Two launchers that have met."""
    port = free_port()
    first, second = One(port, stack, 0), One(port, stack, 1)
    places = together(first.meet, second.meet)
    assert [(place.number, place.num_hosts) for place in places] == [(0, 2), (1, 2)]
    assert places[0].port == places[1].port
    made: Any = dist.TCPStore  # type: ignore[attr-defined]
    made(places[1].address, places[1].port, is_master=False).set("key", "value")
    return first, second


def test_hosts_tell_each_other_and_part_together(stack: ExitStack) -> None:
    first, second = met(stack)
    assert (first.hosts.shared, second.hosts.shared) == (False, True)
    second.hosts.broadcast("step", 0, {"loss": 1.5}, 0.1)
    first.hosts.broadcast("end", 0, {})
    together(first.hosts.part, second.hosts.part)
    assert first.events.get(timeout=5) == (1, ("step", 0, {"loss": 1.5}, 0.1))
    assert second.events.get(timeout=5) == (0, ("end", 0, {}))
    second.hosts.close()
    first.hosts.close()
    assert (first.events.empty(), second.events.empty()) == (True, True)  # nobody has "gone"


@pytest.mark.parametrize("who", [0, 1], ids=["host 0", "host 1"])
def test_a_launcher_that_ends_without_a_word_is_named(stack: ExitStack, who: int) -> None:
    both = met(stack)
    both[who].hosts.close()
    number, told = both[1 - who].events.get(timeout=5)
    assert (number, told[:2]) == (who, ("gone", f"node{who}"))
    both[1 - who].hosts.part(1.0)


def test_hosts_that_want_other_numbers_of_hosts_are_refused(stack: ExitStack) -> None:
    port = free_port()
    both = One(port, stack, 0), One(port, stack, 1, nnodes=4)
    for error in together(both[0].meet, both[1].meet):
        assert isinstance(error, RecipeError)
        assert (error.where, error.problem) == (
            "launch.nnodes",
            "launch.nnodes is 2 on node0, and 4 on node1.",
        )


@pytest.mark.usefixtures("soon")
def test_a_host_that_waits_says_for_whom(stack: ExitStack) -> None:
    port = free_port()
    first, second = One(port, stack, 0, join_s=0.3), One(port, stack, 1, join_s=0.3)
    alone = together(first.meet)[0]
    assert isinstance(alone, RunError)
    assert alone.problem == "1 of 2 hosts did not come in launch.join_s=0.3 s; here: node0."
    assert first.lines[0].startswith(f"waiting for 1 of 2 hosts at 127.0.0.1:{port}, where the")
    assert re.search(r": \d+ s of [\d.]+ s$", first.lines[0])
    first.hosts.close()
    early = together(second.meet)[0]
    assert isinstance(early, RunError)
    assert early.problem.endswith("within launch.join_s=0.3 s: connection refused.")
    asked = f"waiting for host 0 at 127.0.0.1:{port}: connection refused: "
    assert second.lines[0].startswith(asked)


@pytest.mark.parametrize("who", [0, 1], ids=["the hub's host", "another host"])
def test_a_host_that_may_leave_is_gone_without(
    stack: ExitStack, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the hub goes with it, the other host holds a new one."""
    monkeypatch.setattr(hub, "_LAST_CALL_AGAIN_S", 0.0)
    port = free_port()
    both = [One(port, stack, nnodes="1:2") for _ in range(2)]
    places = together(both[0].meet, both[1].meet)
    assert sorted(place.number for place in places) == [0, 1]
    gone = next(one for one, place in zip(both, places, strict=True) if place.number == who)
    left = next(one for one in both if one is not gone)
    gone.hosts.close()
    number, told = left.events.get(timeout=5)
    assert (number, told[0]) == (who, "gone")
    left.hosts.part(1.0)
    with pytest.raises(HostsChanged) as changed:
        left.meet()
    assert (changed.value.num_hosts, changed.value.step) == (1, 0)
    left.planned = 1
    assert (left.meet().number, left.hosts.names) == (0, ["nodeNone"])


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


def refused(port: int, stack: ExitStack, **keys: Any) -> FlowrunError:
    error = together(One(port, stack, **keys).meet)[0]
    assert isinstance(error, RecipeError)
    assert error.where == "launch.rdzv_endpoint"
    return error


def test_a_port_of_another_program_is_refused_at_once(stack: ExitStack) -> None:
    with program(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "answers with something else" in refused(port, stack).problem
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = refused(server.getsockname()[1], stack, rank=0)
        assert error.problem.endswith("address already in use.")


def test_a_program_that_says_nothing_may_be_a_host_that_is_stopped(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GREETING_S", 0.1)
    with program(b"") as port:
        one = One(port, stack, join_s=0.3)
        error = together(one.meet)[0]
    assert isinstance(error, RunError)
    assert error.problem.startswith("host 0 did not come within launch.join_s=0.3 s: a program")


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
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = refused(1, stack, rdzv_endpoint="nosuch:1")
    assert error.problem == "the name nosuch does not resolve: Name or service not known."


def test_hosts_with_another_token_do_not_meet(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(module.TOKEN, "one")
    first = One(port, stack, 0, join_s=1.0)
    monkeypatch.setenv(module.TOKEN, "another")
    second = One(port, stack, 1)
    errors = together(first.meet, second.meet)
    assert isinstance(errors[0], RunError)  # whoever knocks does not end the run
    assert isinstance(errors[1], RecipeError)
    assert "has another FLOWRUN_TOKEN" in errors[1].problem
