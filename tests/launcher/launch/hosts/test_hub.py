"""The hub, fed without sockets."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.launch.hosts.hub import Hub, Outgoing, as_fields
from flowrun.launcher.launch.hosts.meeting import Host, Mismatch, find_mismatch, number_hosts

RECIPE = {"optim.lr": "0.1", "train.steps": "8", "hardware.cores": "2", "launch.node_rank": "0"}


def host(name: str = "a", rank: int | None = None, plan: str = "p", **keys: str) -> Host:
    """A host that runs RECIPE, but for some keys (optim__lr)."""
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return Host(
        name=name,
        nnodes=2,
        node_rank=rank,
        recipe=RECIPE | given,
        plan=plan,
        versions={"torch": "2.13"},
        folder=f"/{name}",
    )


class Net:
    """Hosts and what each has got from the hub so far."""

    def __init__(self, num_hosts: int) -> None:
        self.hub = Hub(num_hosts, open_store=lambda: 1234)
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
        net.meet(key, host(f"host{key}"))
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
    assert [net.got[k][-1] for k in (1, 2)] == [
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
