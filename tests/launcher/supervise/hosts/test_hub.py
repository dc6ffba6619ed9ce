import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import Nodes
from flowrun.launcher.supervise.hands.folder import describe_host
from flowrun.launcher.supervise.hands.lease import Lease
from flowrun.launcher.supervise.hosts.hub import Hub, Outgoing
from flowrun.launcher.supervise.hosts.meeting import find_mismatch, number_hosts
from flowrun.launcher.supervise.hosts.words import Host, HostsHere, Leaving, Ready
from flowrun.launcher.supervise.life import events as ev
from support.runs.plain_host import plain_host

RECIPE = {"optim.lr": "0.1", "train.steps": "8", "hardware.cores": "2", "launch.node_rank": "0"}


def host(name: str = "a", rank: int | None = None, plan: str = "p", **keys: str) -> Host:
    """A host that runs RECIPE, but for some keys (optim__lr)."""
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return plain_host(name, node_rank=rank, recipe=RECIPE | given, plan=plan, folder=f"/{name}")


class Net:
    """Hosts and what each has got from the hub so far."""

    def __init__(self, num_hosts: int) -> None:
        self.hub = Hub(Nodes(num_hosts, num_hosts, may_change=False), open_store=lambda: 1234)
        self.got: dict[int, list[Notice]] = defaultdict(list)

    def send(self, outgoing: Outgoing) -> None:
        for to, message in outgoing:
            self.got[to].append(message)

    def meet(self, key: int, one: Host) -> None:
        self.send(self.hub.receive(key, Ready(one)))


def kinds(messages: list[Notice], kind: type) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


@given(st.integers(2, 4), st.integers(0, 2**32), st.sets(st.integers(0, 3)))
def test_every_host_hears_all_of_the_others_in_order(num: int, seed: int, dying: set[int]) -> None:
    net, order = Net(num), random.Random(seed)
    for key in order.sample(range(num), num):
        net.meet(key, replace(host(f"host{key}"), planned=num))
    number = {key: kinds(net.got[key], ev.Met)[0].company.number for key in range(num)}
    assert sorted(number.values()) == list(range(num))
    todo = {k: [said.Remarked(f"{k}.{i}") for i in range(3)] for k in range(num)}
    sent: dict[int, list[Notice]] = defaultdict(list)
    gone: set[int] = set()
    while todo:
        key = order.choice(sorted(todo))
        if key in dying and order.random() < 0.3:
            del todo[key]
            gone.add(key)
            net.send(net.hub.lose(key, "killed"))
        elif todo[key]:
            event = todo[key].pop(0)
            sent[key].append(event)
            net.send(net.hub.receive(key, event))
        else:
            del todo[key]
            net.send(net.hub.receive(key, Leaving()))
    for key in set(range(num)) - gone:
        for other in set(range(num)) - {key}:
            of_other = [m for m in kinds(net.got[key], ev.FromHost) if m.host == number[other]]
            assert [m.event for m in of_other] == sent[other]
        lost = [m.host for m in kinds(net.got[key], ev.HostGone)]
        assert sorted(lost) == sorted(number[k] for k in gone)
        assert len(kinds(net.got[key], ev.Parted)) == 1
        assert net.got[key][-1] == ev.Parted()


def test_hosts_that_would_begin_unlike_plan_again_and_meet_when_all_have() -> None:
    net = Net(2)
    net.hub.nodes = Nodes(1, 2, may_change=True)
    first, second = (replace(host(n), folder="/s", planned=2) for n in "ab")
    net.meet(0, replace(first, start=(4, "")))
    net.meet(1, replace(second, start=(8, "")))
    assert net.got[0][-1] == net.got[1][-1] == ev.PlanWanted(2, 8)
    net.meet(0, replace(first, start=(8, "")))
    net.send(net.hub.tick(0.0) + net.hub.tick(99.0))
    assert net.got[0][-1] == HostsHere(("a",))
    net.meet(1, replace(second, start=(8, "")))
    assert [type(net.got[key][-1]) for key in (0, 1)] == [ev.Met, ev.Met]


def test_a_hub_that_meets_a_host_of_a_later_epoch_was_replaced() -> None:
    net = Net(2)
    for key, name in enumerate("ab"):
        net.meet(key, replace(host(name), epoch=3))
    assert [m.company.epoch for m in kinds(net.got[0], ev.Met)] == [4]
    net.meet(2, replace(host("c"), epoch=5))
    lost, others = (kinds(net.got[key], ev.LauncherFailed) for key in (0, 1))
    assert not others and lost[0].fault.problem.startswith("c has taken its place")
    assert not net.got[2]


def test_the_smaller_part_of_hosts_that_a_link_parts_waits() -> None:
    net = Net(1)
    net.hub.nodes = Nodes(1, 3, may_change=True)
    net.meet(0, replace(host("a"), quorum=2))
    net.send(net.hub.tick(0.0) + net.hub.tick(99.0))
    net.meet(1, host("new"))
    net.send(net.hub.tick(100.0) + net.hub.tick(199.0))
    assert not kinds(net.got[0], ev.PlanWanted)
    net.meet(2, replace(host("b"), quorum=2))
    assert kinds(net.got[0], ev.PlanWanted) == [ev.PlanWanted(3, 0)]


def test_hosts_that_wait_learn_who_is_here() -> None:
    net = Net(2)
    net.meet(0, host("a"))
    net.meet(1, host("b", optim__lr="0.2"))
    for key in (0, 1):
        (refused,) = kinds(net.got[key], ev.LauncherFailed)
        assert refused.fault.where == "optim.lr" and refused.refused
        assert refused.fault.problem == "optim.lr is 0.1 on a, and 0.2 on b."
    assert net.got[0][0] == HostsHere(("a",))


def test_a_host_that_leaves_before_all_are_here_is_awaited_again() -> None:
    net = Net(2)
    net.meet(0, host("a"))
    net.send(net.hub.lose(0, "left"))
    net.meet(1, host("b"))
    assert net.got[1] == [HostsHere(("b",))]
    net.meet(2, host("c"))
    both = ev.Company(names=("b", "c"), doors=("", ""), sees=(True, False), epoch=1)
    met = [ev.Met(replace(both, number=k), 1234) for k in (0, 1)]
    assert [net.got[k][-1] for k in (1, 2)] == met


def test_a_host_too_many_is_refused_alone() -> None:
    net = Net(2)
    for key, name in enumerate("abc"):
        net.meet(key, host(name))
    (refused,) = kinds(net.got[2], ev.LauncherFailed)
    assert refused.fault.problem == "the run of a, b is under way there."
    assert isinstance(net.got[0][-1], ev.Met)


def test_a_second_round_has_a_store_of_its_own() -> None:
    net = Net(2)
    ports = iter((1, 2))
    net.hub.open_store = lambda: next(ports)
    for _ in range(2):
        net.meet(0, host("a"))
        net.meet(1, host("b"))
    assert [m.port for m in kinds(net.got[0], ev.Met)] == [1, 2]


MISMATCHES = {
    "its number": (host("b", rank=1, launch__node_rank="1"), None),
    "its hardware": (host("b", hardware__cores="4"), None),
    "its plan by hardware": (host("b", hardware__cores="4", plan="q"), "hardware.cores"),
    "two keys": (host("b", train__steps="9", optim__lr="1"), "optim.lr"),
    "a key more": (host("b", optim__momentum="0.9"), "optim.momentum"),
    "its plan": (host("b", plan="q"), "the plan"),
    "its number of hosts": (host("b", optim__lr="1", launch__nnodes="4"), "launch.nnodes"),
}


@pytest.mark.parametrize(("other", "where"), MISMATCHES.values(), ids=MISMATCHES)
def test_what_differs_is_named_if_it_matters(other: Host, where: str | None) -> None:
    found = find_mismatch(host("a", rank=0), other)
    assert (found and found.where) == where


def test_the_number_of_hosts_that_a_platform_gives_is_compared(tmp_path: Path) -> None:
    recipe = load(["recipe=mlp_hybrid"])
    given = replace(recipe, launch=replace(recipe.launch, nnodes=2))  # its text has none
    job = SimpleNamespace(start=None, device_type="cpu", recipe=given)
    record: Any = SimpleNamespace(asked=given, kept=None, agreed=False, run_folder=tmp_path)
    compiled: Any = SimpleNamespace(job=job, training=SimpleNamespace(plan=""))
    assert describe_host(record, compiled, Lease(tmp_path)).recipe["launch.nnodes"] == "2"


def test_hosts_are_numbered_by_rank_then_by_name() -> None:
    hosts = [host("c"), host("b"), host("x", rank=1), host("a")]
    assert number_hosts(hosts) == [0, 3, 1, 2]
    twice = number_hosts([host("a", rank=0), host("b", rank=0)])
    assert twice == said.Reason("launch.node_rank", "is 0 on a and b.", "Number them 0, 1, …")
