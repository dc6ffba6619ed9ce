"""The hub, fed without sockets."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.launch.hosts.holdings import Holding
from flowrun.launcher.launch.hosts.hub import Hub, Outgoing, as_fields
from flowrun.launcher.launch.hosts.meeting import (
    NOTHING,
    Host,
    Mismatch,
    find_mismatch,
    number_hosts,
)
from flowrun.launcher.recipe.schema import Nodes

RECIPE = {"optim.lr": "0.1", "train.steps": "8", "hardware.cores": "2", "launch.node_rank": "0"}


def host(name: str = "a", rank: int | None = None, plan: str = "p", **keys: str) -> Host:
    """A host that runs RECIPE, but for some keys (optim__lr)."""
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return Host(
        name=name,
        nodes="2",
        node_rank=rank,
        recipe=RECIPE | given,
        plan=plan,
        planned=2,
        start=0,
        rounds=0,
        versions={"torch": "2.13"},
        folder=f"/{name}",
    )


class Net:
    """Hosts and what each has got from the hub so far."""

    def __init__(self, num_hosts: int) -> None:
        self.hub = Hub(Nodes(num_hosts, num_hosts, may_change=False), open_store=lambda: 1234)
        self.got: dict[int, list[tuple[Any, ...]]] = defaultdict(list)

    def send(self, outgoing: Outgoing) -> None:
        for to, message in outgoing:
            self.got[to].append(message)

    def meet(self, key: int, one: Host) -> None:
        self.send(self.hub.receive(key, ("meet", as_fields(one))))


@given(st.integers(2, 4), st.integers(0, 2**32), st.sets(st.integers(0, 3)))
def test_every_host_hears_all_of_the_others_in_order(num: int, seed: int, dying: set[int]) -> None:
    net, order = Net(num), random.Random(seed)
    for key in order.sample(range(num), num):
        net.meet(key, replace(host(f"host{key}"), planned=num))
    number = {key: next(m[1] for m in net.got[key] if m[0] == "met") for key in range(num)}
    assert sorted(number.values()) == list(range(num))
    todo = {k: [("broadcast", f"{k}.{i}") for i in range(3)] for k in range(num)}
    told: dict[int, list[Any]] = defaultdict(list)
    gone: set[int] = set()
    while todo:
        key = order.choice(sorted(todo))
        if key in dying and order.random() < 0.3:
            del todo[key]
            gone.add(key)
            net.send(net.hub.lose(key, "killed"))
        elif todo[key]:
            message = todo[key].pop(0)
            told[key].append(message[1])
            net.send(net.hub.receive(key, message))
        else:
            del todo[key]
            net.send(net.hub.receive(key, ("part",)))
    for key in set(range(num)) - gone:
        for other in set(range(num)) - {key}:
            heard = [m[2] for m in net.got[key] if m[:2] == ("event", number[other])]
            assert heard == told[other]
        lost = [m[1] for m in net.got[key] if m[0] == "gone"]
        assert sorted(lost) == sorted(number[k] for k in gone)
        assert [m[0] for m in net.got[key]].count("parted") == 1
        assert net.got[key][-1] == ("parted",)


class Launcher:
    """A host of a run whose hosts come and go, as hosts.py and its caller behave.

    state: away, meets, trains or ends (its ranks).  answered: messages that it has seen.  name: of
    its round.  holding: what it has of that, once it has lost another host.
    """

    def __init__(self, key: int, rounds: dict[str, RoundModel]) -> None:
        self.key, self.state, self.answered, self.rounds = key, "away", 0, rounds
        self.planned, self.start, self.round = 0, 0, ()
        self.name, self.holding, self.halts = "", NOTHING, False

    def describe(self) -> Host:
        told = {"planned": self.planned, "start": self.start, "folder": "/shared"}
        told |= {"holding": self.holding}
        return replace(host(f"host{self.key}"), nodes=f"{FEWEST}:{MOST}", **told)

    def been_in(self, net: Net) -> list[tuple[str, int]]:
        """The rounds that it was in, and its number there, whether it knows or not."""
        return [(message[5], message[1]) for message in net.got[self.key] if message[0] == "met"]

    def act(self, net: Net, steps: int) -> None:
        """Do what comes next: see the next message, or go on."""
        if self.state == "ends":  # its ranks have come to rest, and it has sent all
            net.send(net.hub.receive(self.key, ("part",)))
            if self.halts:
                self.start = steps
        if self.state in ("away", "ends"):
            self.state = "meets"
            net.meet(self.key, self.describe())
        elif self.answered < len(net.got[self.key]):
            message = net.got[self.key][self.answered]
            self.answered += 1
            self._see(message, net)

    def _see(self, message: tuple[Any, ...], net: Net) -> None:
        match message:
            case ("plan", num_hosts, step):
                assert self.state == "meets"
                self.planned, self.start = num_hosts, step
                net.meet(self.key, self.describe())
            case ("save", step, ranks):
                assert self.state == "meets"
                assert {rank for held, some in self.holding.steps if held == step for rank in some}
                written = self.holding.files if self.holding.saved == step else ()
                files = (*written, *((rank, 100, 7) for rank in ranks))
                self.holding = replace(self.holding, saved=step, files=files)
                net.meet(self.key, self.describe())
            case ("complete", step, files):
                assert [rank for rank, *_ in files] == list(range(self.holding.ranks))
                self.start = step
                net.meet(self.key, self.describe())
            case ("met", number, names, _, _, name, _):
                assert self.state == "meets"
                assert FEWEST <= len(names) == self.planned <= MOST
                self.state, self.round = "trains", (number, tuple(names), self.start)
                if self.name:  # the state is that which the hosts that are left have kept
                    assert self.start >= self.rounds[self.name].kept
                self.name, self.holding = name, NOTHING
                self.rounds[name].hosts, self.rounds[name].step = len(names), self.start + 1
            case ("joining", _) if self.state == "trains":
                assert self.round[0] == 0
                self.state, self.halts = "ends", True
                net.send(net.hub.receive(self.key, ("broadcast", "halt")))
            case ("event", _, "halt") if self.state == "trains":
                self.state, self.halts = "ends", True
            case ("gone", *_) if self.state == "trains":
                self.state, self.halts = "ends", False
                one, number = self.rounds[self.name], self.round[0]
                held = (one.step, (number, (number - 1) % one.hosts))
                self.holding = Holding(round=self.name, ranks=one.hosts, steps=(held,))


@dataclass
class RoundModel:
    """A round of hosts of one rank each, which all keep `step`; lost: those that were killed."""

    hosts: int = 0
    step: int = 0
    lost: set[int] = field(default_factory=set)

    @property
    def kept(self) -> int:
        """The step that they go on from at least: no two neighbours are lost, else any."""
        both = any((number + 1) % self.hosts in self.lost for number in self.lost)
        return 0 if both else self.step


FEWEST, MOST = 2, 4


@given(st.integers(0, 2**32))
def test_hosts_that_come_and_go_end_in_one_round_of_one_plan_and_one_state(seed: int) -> None:
    order = random.Random(seed)
    net = Net(MOST)
    net.hub.nodes = Nodes(FEWEST, MOST, may_change=True)
    rounds: dict[str, RoundModel] = defaultdict(RoundModel)
    launchers = [Launcher(k, rounds) for k in range(MOST)]
    keys, steps, now_s = MOST, 0, 0.0
    for turn in range(400):
        one = order.choice(launchers)
        if turn < 200 and order.random() < 0.05:  # it is killed, and another may come one day
            launchers.remove(one)
            if one.state != "away":
                net.send(net.hub.lose(one.key, "killed"))
            for name, number in one.been_in(net):
                rounds[name].lost.add(number)
            launchers.append(Launcher(keys, rounds))
            keys += 1
        elif turn >= 200 or order.random() < 0.8:
            steps += 1
            one.act(net, steps)
        now_s += 1.0
        net.send(net.hub.tick(now_s))
    while any(one.state == "ends" or one.answered < len(net.got[one.key]) for one in launchers):
        for one in launchers:
            one.act(net, steps)
    assert {one.state for one in launchers} == {"trains"}
    assert sorted(one.round[0] for one in launchers) == list(range(MOST))
    assert len({one.round[1:] for one in launchers}) == 1


def test_hosts_that_wait_learn_who_is_here() -> None:
    net = Net(2)
    net.meet(0, host("a"))
    net.meet(1, host("b", optim__lr="0.2"))
    problem = "optim.lr is 0.1 on a, and 0.2 on b."
    for key in (0, 1):
        assert net.got[key][-1][:3] == ("refused", "optim.lr", problem)
    assert net.got[0][0] == ("waiting", ["a"])


def test_a_host_that_leaves_before_all_are_here_is_awaited_again() -> None:
    net = Net(2)
    net.meet(0, host("a"))
    net.send(net.hub.lose(0, "left"))
    net.meet(1, host("b"))
    assert net.got[1] == [("waiting", ["b"])]
    net.meet(2, host("c"))
    assert [net.got[k][-1][:5] for k in (1, 2)] == [
        ("met", 0, ["b", "c"], 1234, "/b"),
        ("met", 1, ["b", "c"], 1234, "/b"),
    ]


def test_a_host_too_many_is_refused_alone() -> None:
    net = Net(2)
    for key, name in enumerate("abc"):
        net.meet(key, host(name))
    assert net.got[2][-1][2] == "the run of a, b is under way there."
    assert net.got[0][-1][0] == "met"


def test_a_second_round_has_a_store_of_its_own() -> None:
    net = Net(2)
    ports = iter((1, 2))
    net.hub.open_store = lambda: next(ports)
    for _ in range(2):
        net.meet(0, host("a"))
        net.meet(1, host("b"))
    assert [m[3] for m in net.got[0] if m[0] == "met"] == [1, 2]


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (host("b", rank=1, launch__node_rank="1"), None),
        (host("b", hardware__cores="4"), None),
        (host("b", hardware__cores="4", plan="q"), "hardware.cores"),
        (host("b", train__steps="9", optim__lr="1"), "optim.lr"),
        (host("b", optim__momentum="0.9"), "optim.momentum"),
        (host("b", plan="q"), "the plan"),
    ],
    ids=[
        "its number",
        "its hardware",
        "its plan by hardware",
        "two keys",
        "a key more",
        "its plan",
    ],
)
def test_what_differs_is_named_if_it_matters(other: Host, where: str | None) -> None:
    found = find_mismatch(host("a", rank=0), other)
    assert (found and found.where) == where


def test_hosts_are_numbered_by_rank_then_by_name() -> None:
    hosts = [host("c"), host("b"), host("x", rank=1), host("a")]
    assert number_hosts(hosts) == [0, 3, 1, 2]
    twice = number_hosts([host("a", rank=0), host("b", rank=0)])
    assert twice == Mismatch("launch.node_rank", "is 0 on a and b.", "Number them 0, 1, …")
