"""Hosts that copy each other's state, and die in any order: what is left holds a whole step."""

from __future__ import annotations

import random
from collections import deque
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.launch.restart.aims import Aims, find_due
from flowrun.launcher.launch.restart.stamps import NONE, Stamps

Message = tuple[int, str, int, int]  # from which host, and what it says
PIECES = 2  # that a buffer is written in: whoever looks in between sees a torn one


class Buffers:
    """Two buffers of each of some ranks, and what lies in them."""

    def __init__(self, ranks: list[int]) -> None:
        self.stamps = Stamps(ranks, ranks, aimed=True)
        self.held = {rank: [[NONE] * PIECES, [NONE] * PIECES] for rank in ranks}

    def whole(self, rank: int) -> set[int]:
        """The steps that a rank's stamps vouch for; they must be what lies there."""
        stamps = self.stamps.of(rank)
        for buffer, stamp in enumerate(stamps):
            assert stamp == NONE or self.held[rank][buffer] == [stamp] * PIECES
        return set(stamps) - {NONE}


class HostModel:
    """A host: its ranks, its launcher, and the memory of both.

    writing: of each rank, the buffer and the pieces that are left.  sending: the aim, and pieces of
    ranks that have not left yet.  coming: of the neighbour's, what has been opened.
    """

    def __init__(self, number: int, hosts: int, ranks: int, aims: Aims) -> None:
        self.number, self.aims = number, aims
        before = (number - 1) % hosts
        self.own = Buffers(list(range(number * ranks, (number + 1) * ranks)))
        self.copy = Buffers(list(range(before * ranks, (before + 1) * ranks)))
        self.done = dict.fromkeys(self.own.held, aims.kept)
        self.writing: dict[int, tuple[int, int]] = {}
        self.sent = self.told = NONE
        self.sending: deque[tuple[int, int]] | None = None
        self.aim(aims.kept, aims.target)

    def aim(self, kept: int, target: int) -> None:
        self.own.stamps.aim(kept, target)

    @property
    def reached(self) -> int:
        return min(self.done.values())

    def held(self) -> set[tuple[int, int]]:
        """(step, rank) of all that is here."""
        return {
            (step, rank)
            for part in (self.own, self.copy)
            for rank in part.held
            for step in part.whole(rank)
        }


class Net:
    """All hosts, and the messages between them; each pair has an order of its own."""

    def __init__(
        self, hosts: int, ranks: int, every: int, seed: int, in_step: bool = False
    ) -> None:
        """in_step: a rank begins a step when all have copied what they hold of the step before."""
        self.in_step = in_step
        self.order, self.every, self.first = random.Random(seed), every, 0
        aims = Aims.begin(hosts, every, self.first)
        self.hosts = {k: HostModel(k, hosts, ranks, aims) for k in range(hosts)}
        self.mail: dict[tuple[int, int], deque[Message]] = {
            (a, b): deque() for a in range(hosts) for b in range(hosts)
        }
        self.links: dict[int, deque[tuple[str, int, int, int, int]]] = {
            k: deque() for k in range(hosts)
        }
        self.num_ranks = hosts * ranks
        self.kept = self.first  # by the aims of any host, ever

    def tell(self, sender: int, word: str, step: int, other: int = 0) -> None:
        for to in self.hosts:
            self.mail[sender, to].append((sender, word, step, other))

    # ---- what may happen next --------------------------------------------------------------------

    def train(self, host: HostModel) -> None:
        """A rank goes on: it writes a piece, or comes to the next step."""
        rank = self.order.choice(list(host.done))
        step = host.done[rank]
        if rank in host.writing:
            buffer, left = host.writing[rank]
            if left:
                host.own.held[rank][buffer][left - 1] = step
                host.writing[rank] = buffer, left - 1
            else:
                host.own.stamps.close(rank, buffer, step)
                del host.writing[rank]
        elif step <= min(one.reached for one in self.hosts.values()) and not (
            self.in_step and any(one.writing for one in self.hosts.values())
        ):
            host.done[rank] = step = step + 1  # no rank updates before all have ended a step
            if step % self.every == 0 and (buffer := host.own.stamps.open(rank, step)) is not None:
                host.writing[rank] = buffer, PIECES

    def launch(self, host: HostModel) -> None:
        """The launcher looks at what its ranks have done, and sends it on piece by piece."""
        kept, target = host.own.stamps.aims
        link = self.links[(host.number + 1) % len(self.links)]
        if host.sending is None:
            whole = all(target in host.own.stamps.of(rank) for rank in host.done)
            if whole and host.sent != target and host.reached >= target:
                host.sent, host.sending = target, deque()
                for rank in host.done:
                    buffer = host.own.stamps.of(rank).index(target)
                    host.sending += [(rank, buffer)] * PIECES
                link.append(("begin", kept, target, 0, 0))
            elif host.own.stamps.is_missed and host.told != target:
                host.told = target
                self.tell(host.number, "missed", target)
        elif host.sending:
            rank, buffer = host.sending.popleft()
            piece = len([1 for left, _ in host.sending if left == rank])
            link.append(("piece", rank, piece, host.own.held[rank][buffer][piece], 0))
        else:
            whole = all(host.sent in host.own.stamps.of(rank) for rank in host.done)
            link.append(("whole" if whole else "torn", host.sent, 0, 0, 0))
            host.sending = None

    def receive(self, host: HostModel) -> None:
        """The launcher takes what comes from the host before it."""
        if not (link := self.links[host.number]):
            return
        word, a, b, c, _ = link.popleft()
        stamps = host.copy.stamps
        if word == "begin":
            stamps.aim(max(a, host.own.stamps.aims[0]), b)
            host.coming = {rank: stamps.open(rank, b) for rank in host.copy.held}
        elif word == "piece":
            host.copy.held[a][host.coming[a]][b] = c
        elif word == "whole":
            for rank, buffer in host.coming.items():
                stamps.close(rank, buffer, a)
            self.tell(host.number, "copied", a)

    def read(self, host: HostModel) -> None:
        """The launcher reads a message of some host."""
        there = [k for k in self.mail if k[1] == host.number and self.mail[k]]
        if not there:
            return
        sender, word, step, other = self.mail[self.order.choice(there)].popleft()
        if word == "aim":
            host.aim(step, other)
            self.kept = max(self.kept, step)
        elif host.number == 0:
            before = host.aims
            host.aims = before.take(sender, word, step, host.reached)
            if (host.aims.kept, host.aims.target) != (before.kept, before.target):
                self.tell(0, "aim", host.aims.kept, host.aims.target)

    # ---- what is left ----------------------------------------------------------------------------

    def newest(self, lost: set[int]) -> int:
        """The newest step that the hosts which are left hold whole."""
        held = set().union(*(h.held() for k, h in self.hosts.items() if k not in lost))
        steps = {step for step, _ in held}
        return max(
            (s for s in steps if all((s, r) in held for r in range(self.num_ranks))), default=NONE
        )


@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(0, 2**32))
def test_hosts_that_are_left_hold_what_was_ever_kept(
    hosts: int, ranks: int, every: int, seed: int
) -> None:
    net = Net(hosts, ranks, every, seed)
    acts = [
        partial(act, host)
        for act in (net.train, net.launch, net.receive, net.read)
        for host in net.hosts.values()
    ]
    weights = [net.order.choice((1, 8, 64)) for _ in acts]
    for turn, act in enumerate(net.order.choices(acts, weights, k=6000)):
        act()
        if turn % 20 == 0:
            for lost in (set(), {net.order.randrange(hosts)} if hosts > 1 else set()):
                newest = net.newest(lost)
                assert newest >= net.kept or net.kept == net.first  # which a disk holds


@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_where_copies_take_less_than_a_step_what_is_kept_is_one_interval_back(
    hosts: int, every: int, seed: int
) -> None:
    net = Net(hosts, 1, every, seed, in_step=True)
    for _ in range(60):
        net.train(net.order.choice(list(net.hosts.values())))
        for _ in range(6):
            for host in net.hosts.values():
                for act in (net.launch, net.receive, *[net.read] * hosts):
                    act(host)
        most = max(host.reached for host in net.hosts.values())
        left = net.newest({net.order.randrange(hosts)})
        assert most - max(left, net.first) <= every


def test_a_target_that_was_missed_is_followed_by_one_further_on() -> None:
    aims = Aims.begin(hosts=2, every=1, first=4)
    assert (aims.kept, aims.target) == (4, 5)
    missed = aims.take(1, "missed", 5, reached=5)
    assert (missed.kept, missed.target, missed.margin) == (4, 7, 1)
    assert missed.take(0, "copied", 5, reached=6) == missed  # too late
    half = missed.take(0, "copied", 7, reached=7)
    assert half.take(0, "copied", 7, reached=7) == half
    whole = half.take(1, "copied", 7, reached=7)
    assert (whole.kept, whole.target, whole.margin) == (7, 8, 0)
    late = whole.take(0, "missed", 8, reached=20)
    assert (late.kept, late.target, late.margin) == (7, 34, 13)


def test_steps_that_are_due_are_multiples() -> None:
    assert [find_due(after, 3) for after in (0, 2, 3, 4)] == [3, 3, 6, 6]
