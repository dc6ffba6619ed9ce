from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.ranks.step_gate import RankGate, StepGate
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.schema import Nodes
from flowrun.launcher.supervise.hosts.hub import Hub, Outgoing
from flowrun.launcher.supervise.hosts.words import Host, HostsHere, Leaving, Ready
from flowrun.launcher.supervise.life import events as ev
from flowrun.launcher.supervise.life import instructions as do
from flowrun.launcher.supervise.life.events import StartPoint
from flowrun.launcher.supervise.life.instructions import COMPLETE, FAILED, PREEMPTED, STOPPED, End
from flowrun.launcher.supervise.life.machine import begin, step
from flowrun.launcher.supervise.life.run_state import Life, violations
from flowrun.launcher.supervise.life.verdicts import Terms
from support.runs.plain_host import plain_host

STEPS, EVERY = 12, 4


@dataclass
class Rank:
    """A rank: it trains when its peers do, rests where its gate says, and may die."""

    gate: RankGate
    saved: int
    done: int
    alive: bool = True
    leaves: bool = False
    lingers: bool = False


@dataclass
class Disk:
    """What all hosts see: whole checkpoints, by their steps; who writes there, by epoch and key;
    whether all of the run is there.
    """

    kept: set[int] = field(default_factory=set)
    writer: tuple[int, int] = (0, -1)
    whole: bool = False

    @property
    def start(self) -> StartPoint:
        return place_at(max(self.kept, default=0))


def place_at(step: int) -> StartPoint:
    return StartPoint(step, "checkpoint" if step else "beginning", step)


class OneHost:
    """A launcher and its rank, as the driver and its hands are."""

    def __init__(self, key: int, world: World) -> None:
        self.key, self.world, self.number = key, world, 0
        self.came: deque[Notice] = deque()
        self.gate: StepGate | None = None
        self.rank: Rank | None = None
        self.gone_is_known = True
        self.timers: set[str] = set()
        self.end: End | None = None
        self.planned, self.met = world.hosts, 0
        self.start = world.disk.start.step
        self.completed: set[int] = set()
        self.round = 0
        self.hub: HubOf | None = None  # that it meets at; None: it has to look for one
        self.state, out = begin(world.terms, world.disk.start)
        self.carry_out(out)

    def take(self, event: Notice) -> None:
        self.state, out = step(self.state, event)
        assert violations(self.state) == ()
        self.carry_out(out)

    def carry_out(self, out: tuple[do.Instruction, ...]) -> None:
        for each in out:
            assert self.end is None, "nothing follows the end"
            self._do(each)

    def send(self, message: Notice) -> None:
        if self.hub:
            self.world.send(self.hub, self.hub.receive(self.hub.number(self.key), message))

    def may_write(self) -> bool:
        """Look at the lease before anything is written, as the first host does."""
        mine = (self.state.company.epoch, self.key)
        if self.world.disk.writer != mine:
            self.came.append(ev.LauncherFailed(Reason("the folder", "taken")))
        return self.world.disk.writer == mine

    def _do(self, each: do.Instruction) -> None:
        match each:
            case do.Meet():
                self.hub = self.hub or self.world.find_hub(self.key)
                self.send(Ready(self.describe()))
            case do.ForkRanks():
                if self.number == 0:
                    self._take_lease()
                assert self.gone_is_known, "ranks of two rounds run"
                assert self.state.place.step == self.start
                self.gate = StepGate.of_threads(1, self.start)
                self.rank = Rank(self.gate.of_rank(0), self.start, self.start)
                self.gone_is_known = False
            case do.KillRanks():
                assert self.rank
                self.rank.alive = False  # or it has ended already
            case do.Freeze():
                self.came.append(_FREEZE)
            case do.HaltAfter(halt, ends):
                assert self.gate
                self.gate.open(halt, ends)
            case do.SendAll(event):
                self.send(event)
            case do.LeaveRound(within_s):
                if within_s == 1.0 or self.hub is None:
                    self.timers.add("part")
                self.send(Leaving())
            case do.Publish() if not self.number:
                self.may_write()
            case do.SetTimer(timer, seconds):
                self.timers.discard(timer)
                if seconds >= 0:
                    self.timers.add(timer)
            case do.CompleteCheckpoint(at, files):
                assert len(files) == self.state.terms.num_ranks
                assert at not in self.completed, "a checkpoint is completed once"
                if self.may_write():
                    self.completed.add(at)
                    self.world.disk.kept.add(at)
            case do.FindStart():
                self.start = self.world.disk.start.step
                self.came.append(ev.StartFound(self.world.disk.start))
            case do.ReplanHosts(ev.PlanWanted(hosts, at)):
                self.planned, self.start = hosts, at
                self.came.append(ev.NewPlan(hosts, place_at(at)))
            case End():
                self.end = each
                if each.status == COMPLETE and self.number == 0:
                    self.world.disk.whole = True
                    self.send(ev.Finished())
                assert each.status != COMPLETE or self.world.disk.whole, "files are missing"
                self.world.leave(self.key, "it has ended")

    def _take_lease(self) -> None:
        disk, mine = self.world.disk, (self.state.company.epoch, self.key)
        follows = self.met > 1
        if follows and disk.writer[0] >= mine[0] and disk.writer != mine:
            self.came.append(ev.LauncherFailed(Reason("the folder", "taken")))
            return
        assert disk.writer[0] <= mine[0], "an older hub's host takes the lease"
        disk.writer = mine

    def describe(self) -> Host:
        world = self.world
        known = {"quorum": min(1, self.met), "planned": self.planned, "start": (self.start, "")}
        epoch = self.state.company.epoch or world.disk.writer[0]
        return plain_host(f"host{self.key}", epoch=epoch, **known)

    def hear(self, message: Notice) -> None:
        match message:
            case ev.Met(company, port):
                names, self.number = company.names, company.number
                assert len(names) == self.planned and names[self.number] == f"host{self.key}"
                self.met, self.round, self.rank = self.met + 1, port, None
                self.came.append(message)
            case HostsHere():
                pass
            case _:
                self.came.append(message)

    # ---- its rank --------------------------------------------------------------------------------

    def act(self) -> None:
        rank = self.rank
        if rank is None or self.gone_is_known or self.state.phase is not Life.TRAINING:
            return
        if not rank.alive:
            self.gone_is_known = True
            if not rank.leaves:
                self.came.append(ev.RankDied(self.number, "the process was killed."))
            self.came.append(ev.RanksGone())
            return
        peers = self.world.peers_of(self)
        if peers is None:
            return  # some are still to be forked
        if any(peer is None or (not peer.alive and not peer.leaves) for peer in peers):
            if not rank.lingers:
                fault = Reason(f"rank {self.number}", "lost a rank")
                self.came.append(said.Failure(fault, lost_peer=True))
            rank.alive, rank.lingers = not self.world.is_quiet, True
            return
        assert self.gate
        if rank.gate.begun > rank.done:  # a step ends when all have begun it
            if all(peer and peer.gate.begun >= rank.gate.begun for peer in peers):
                rank.done = rank.gate.begun
                if self.number == 0:
                    self.came.append(said.StepDone(rank.done - 1, {}, 0.1, {}))
                if rank.done % EVERY == 0 and rank.done > rank.saved:
                    self._save(rank.done)
        elif rank.done == STEPS:
            self._leave()
        elif self.gate.lock.locked():
            return  # frozen
        elif not rank.gate.may_begin(rank.done + 1):
            if rank.done > rank.saved:
                self._save(rank.done)
            if not rank.gate.go_on():
                self._leave()

    def _save(self, at: int) -> None:
        assert self.rank
        self.rank.saved = at
        self.came.append(said.FileWritten(at, f"rank{self.number}", (1, 1)))

    def _leave(self) -> None:
        assert self.rank
        self.came.append(said.RankEnded(self.number, {}))
        self.rank.leaves, self.rank.alive = True, False

    def turn(self, order: random.Random, late: bool) -> None:
        """Do one thing: take an event, let the rank act, or a timer be over."""
        if self.end:
            return
        kind = order.random()
        if self.came and kind < 0.6:
            event = self.came.popleft()
            if event is _FREEZE:
                if self.rank is None or not self.rank.alive:
                    return
                assert self.gate
                if self.gate.is_clear and self.gate.freeze(0):
                    self.take(ev.Frozen(self.gate.begun))
                else:
                    self.came.append(_FREEZE)
                return
            self.take(event)
        elif self.timers and kind < 0.7 and (late or self.world.is_quiet):
            timer = order.choice(sorted(self.timers))
            if timer == "part":
                self.timers.discard(timer)
                if self.state.phase is Life.PARTING:
                    self.take(ev.Parted())
            elif timer in (ev.LINGER, ev.BACK_OFF) or late:
                self.timers.discard(timer)
                self.take(ev.TimeIsUp(timer))
        else:
            self.act()


_FREEZE = said.Remarked("freeze")


class HubOf(Hub):
    """The hub of a host, whose own connection is the first."""

    host = -1

    def number(self, key: int) -> int:
        return -1 if key == self.host else key


class World:
    """Hosts, the hub between them, and a disk."""

    def __init__(self, hosts: int, restarts: int, may_change: bool) -> None:
        self.hosts, self.disk, self.rounds = hosts, Disk(), 0
        self.terms = Terms(steps=STEPS, num_ranks=hosts, restarts=restarts, may_change=may_change)
        fewest = 1 if may_change else hosts
        self.nodes = Nodes(fewest, hosts, may_change=may_change)
        self.hubs: dict[int, HubOf] = {}  # by the key of the host that holds it
        self.parted = set[int]()  # hosts that no other can reach
        self.all: dict[int, OneHost] = {}
        self._early: list[tuple[int, Notice]] = []
        for key in range(hosts):
            self.add(key)

    def _open(self) -> int:
        self.rounds += 1
        return self.rounds

    def add(self, key: int) -> None:
        self._coming = key
        made = OneHost(key, self)
        self.all[key] = made
        early, self._early = self._early, []
        for to, message in early:
            self.all[to].hear(message)

    def find_hub(self, key: int) -> HubOf:
        """Return the hub that is there, or a new one at this host: the lowest that is left."""
        if not (there := next((hub for k, hub in self.hubs.items() if k not in self.parted), None)):
            there = self.hubs[key] = HubOf(self.nodes, open_store=self._open)
            there.host = key
        return there

    def send(self, hub: HubOf, outgoing: Outgoing) -> None:
        for number, message in outgoing:
            to = hub.host if number < 0 else number
            if to not in self.all:
                self._early.append((to, message))
            elif self.all[to].hub is hub:
                self.all[to].hear(message)

    def tick(self, now_s: float) -> None:
        for hub in list(self.hubs.values()):
            self.send(hub, hub.tick(now_s))

    def leave(self, key: int, why: str) -> None:
        """A launcher has gone; where it held the hub, that has gone with it."""
        hub = self.hubs.pop(key, None)
        for each in self.all.values():
            if each.key == key:
                if each.hub and each.hub is not hub:
                    self.send(each.hub, each.hub.lose(each.hub.number(key), why))
            elif hub and each.hub is hub:
                self._lose_hub(each, why)

    def _lose_hub(self, host: OneHost, why: str) -> None:
        host.hub, met = None, bool(host.met)
        if met:
            host.came.append(ev.HostGone(0, why))
        answered = any(isinstance(event, (ev.Met, ev.PlanWanted)) for event in host.came)
        if host.state.phase is Life.MEETING and not answered and not host.end:
            host.hub = self.find_hub(host.key)
            host.send(Ready(host.describe()))
        elif host.state.phase is Life.PARTING:
            host.timers.add("part")

    def kill(self, key: int) -> None:
        """A machine fails, with its launcher and its rank."""
        if (lost := self.all[key]).rank:
            lost.rank.alive = False
        self.leave(key, "killed")
        del self.all[key]

    def part_first(self, key: int) -> None:
        """The link between the host of the hub and all others is down, or it is stopped: each side
        takes the other for lost.
        """
        hub = self.hubs[key]
        self.parted.add(key)
        for each in [e for e in self.all.values() if e.hub is hub and e.key != key]:
            self._lose_hub(each, "silent")
            self.send(hub, hub.lose(each.key, "silent"))

    @property
    def is_quiet(self) -> bool:
        """True if nothing is under way that takes less than the second of a timer."""
        running = [each for each in self.all.values() if not each.end]
        unseen = [each.rank and not each.rank.alive and not each.gone_is_known for each in running]
        return not any(unseen) and not any(e for each in running for e in each.came if e != _FREEZE)

    def peers_of(self, host: OneHost) -> list[Rank | None] | None:
        """The ranks of the other hosts of its round, None for one that is lost; None: they are not
        all there yet.
        """
        others = [name for name in host.state.company.names if name != f"host{host.key}"]
        by_name = {f"host{key}": each for key, each in self.all.items()}
        found = [by_name.get(name) for name in others]
        apart = host.key in self.parted
        found = [each if each and (each.key in self.parted) == apart else None for each in found]
        if any(each and (each.round != host.round or each.rank is None) for each in found):
            gone = any(each and each.round > host.round for each in found)
            return [None] if gone else None
        return [each.rank if each else None for each in found]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    hosts=st.integers(1, 3),
    restarts=st.integers(0, 2),
    blow=st.sampled_from(["", "signal", "again", "rank", "usr1", "struck", "numbers", "disk"]),
)
def test_a_run_ends_with_one_verdict_and_loses_nothing(
    seed: int, hosts: int, restarts: int, blow: str
) -> None:
    order, world = random.Random(seed), World(hosts, restarts, may_change=False)
    strikes_at, struck = order.randrange(5, 120), False
    for turn in range(20_000):
        host = world.all[order.randrange(hosts)]
        host.turn(order, late=False)
        if turn >= strikes_at and not struck and host.state.phase is Life.TRAINING and host.rank:
            struck = True
            strike(host, blow)
        world.tick(turn / 10)
        if all(each.end for each in world.all.values()):
            break
    ends = [each.end for each in world.all.values()]
    assert all(ends), [each.state.phase for each in world.all.values()]
    statuses = {end.status for end in ends if end}
    if not struck or blow in ("", "usr1") or (blow == "rank" and restarts):
        assert statuses == {COMPLETE}
    elif blow == "signal":  # the last step may have begun
        assert statuses in ({PREEMPTED}, {COMPLETE})
        if statuses == {PREEMPTED}:
            halts = {each.state.round.halts.halt for each in world.all.values()}
            assert len(halts) == 1 and (halts == {0} or halts <= world.disk.kept)
    elif blow in ("rank", "struck", "disk"):
        assert COMPLETE not in statuses or statuses == {COMPLETE}
        assert statuses <= {FAILED, COMPLETE}
    faults = {end.fault.problem for end in ends if end and end.fault}
    assert len(faults) <= 1 or blow in ("again", "struck", "numbers"), faults


def strike(host: OneHost, blow: str) -> None:
    match blow:
        case "signal":
            host.take(ev.Asked("SIGTERM"))
        case "again":
            host.take(ev.Asked("Ctrl-C"))
            host.take(ev.Asked("Ctrl-C", again=True))
        case "usr1":
            host.take(ev.Asked("SIGUSR1", ends=0))
        case "rank" if host.rank:
            host.rank.alive = False
        case "struck":
            host.take(ev.Asked("SIGQUIT", again=True))
        case "numbers":
            host.take(said.NumbersSeen())
        case "disk":
            host.take(ev.LauncherFailed(Reason("metrics.jsonl", "no space")))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), late=st.booleans())
def test_hosts_that_come_and_go_end_a_run_together(seed: int, late: bool) -> None:
    order, world = random.Random(seed), World(3, 3, may_change=True)
    keys = 3
    for turn in range(60_000):
        here = [each for each in world.all.values() if not each.end]
        if not here:
            break
        order.choice(here).turn(order, late and turn < 2000)
        if turn < 2000 and order.random() < 0.004 and len(here) > 1:
            world.kill(order.choice(here).key)
        if turn < 2000 and order.random() < 0.004 and len(here) < 3:
            world.add(keys)
            keys += 1
        world.tick(turn / 10)
    statuses = [each.end.status for each in world.all.values() if each.end]
    assert len(statuses) == len(world.all), [each.state.phase for each in world.all.values()]
    assert set(statuses) <= {COMPLETE, FAILED}
    if set(statuses) == {COMPLETE}:  # a first host that is lost at the end may leave out the last
        assert max(world.disk.kept) >= STEPS - EVERY


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), is_silent=st.booleans(), times=st.integers(1, 2))
def test_another_host_takes_the_place_of_the_first(seed: int, is_silent: bool, times: int) -> None:
    """Killed, or only silent for the others, at any moment: the run is complete, and where two took
    themselves for the first, one has ended.
    """
    order, world = random.Random(seed), World(3, 3, may_change=True)
    strikes = [order.randrange(300) for _ in range(times)]
    for turn in range(60_000):
        here = [each for each in world.all.values() if not each.end]
        if not here:
            break
        order.choice(here).turn(order, late=False)
        first = min((k for k in world.hubs if k not in world.parted), default=None)
        if strikes and turn > strikes[0] and first is not None and world.all[first].met:
            strikes.pop()
            (world.part_first if is_silent else world.kill)(first)
        world.tick(turn / 10)
    ends = {each.key: each.end for each in world.all.values()}
    assert all(ends.values()), [each.state.phase for each in world.all.values()]
    failed = {end.fault.problem for end in ends.values() if end and end.fault}
    assert failed <= ({"taken"} if is_silent else set()) and world.disk.whole, ends


@pytest.mark.parametrize("event", [ev.TimeIsUp(ev.GRACE), ev.Parted(), ev.RanksGone()])
def test_what_comes_too_late_changes_nothing(event: Notice) -> None:
    state, _ = begin(Terms(steps=4, num_ranks=1), StartPoint())
    assert step(state, event) == (state, ())
    over, (end,) = step(state, ev.Asked("Ctrl-C"))
    assert isinstance(end, End) and end.status == STOPPED
    assert step(over, ev.Asked("SIGTERM")) == (over, ())


def test_a_signal_that_ends_a_run_at_once_is_no_reason_to_begin_it_again() -> None:
    state, _ = begin(Terms(steps=4, num_ranks=1, restarts=2, may_change=True), StartPoint())
    asked = (ev.Asked("a host joins (b)", regroups=True), ev.Asked("SIGQUIT", again=True))
    for event in (ev.Met(ev.Company(), 0), *asked, ev.RanksGone()):
        state, _ = step(state, event)
    _, (end,) = step(state, ev.Parted())
    assert isinstance(end, End) and end.status == FAILED
    assert end.fault == Reason("the launcher", "stopped by SIGQUIT.")
