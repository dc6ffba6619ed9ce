"""The hub: which hosts are here, and who gets which message.  Pure: a door (door.py) feeds it.

A run is one round, or more: its ranks are started anew, or hosts join and leave.  Messages of one
host reach every other one in the order sent, and all of them before `Parted`.

**A round begins when nobody more is to come**: the hosts of the round before have met again or have
gone, and either as many hosts wait as there may be, or enough do, and no other has come for a
while.  **All of a round have one plan and one state**: where those that wait have planned for
another number of hosts, or would begin at another state than the newest of any, `PlanWanted` says
which, and all meet again.  **Of hosts that a broken link parts some continue**: those that may
(`Host.quorum`).  **A later hub counts**: each has an epoch of its own, later than those
that its hosts know; a hub that meets a host of a later one has been replaced, and its host ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.schema import Nodes
from flowrun.launcher.supervise.hosts.meeting import SAME_COMMAND, find_mismatch, number_hosts
from flowrun.launcher.supervise.hosts.words import Host, HostsHere, Leaving, Ready, say_silent
from flowrun.launcher.supervise.life import events

Outgoing = list[tuple[int, Notice]]  # (to which connection, message)

_LAST_CALL_S = 10.0  # for more hosts than the fewest, before the first round
_LAST_CALL_AGAIN_S = 2.0  # where those that wait have been in a round of another hub


@dataclass
class Hub:
    """The state of the hub.

    nodes: how many hosts a round may have.  open_store: makes the store of a round's ranks, and
    returns its port.  waiting: the hosts that are ready for the next round, by connection, in the
    order in which they came.  numbers, company: of the hosts of the round under way, or of the
    last.  parted: of those, who have.  planning: hosts that were asked to plan, and meet again.
    first: describes host 0 of the last round.  enough_since_s: when enough hosts were seen to wait.
    refusal: why those that wait cannot train together.
    """

    nodes: Nodes
    open_store: Callable[[], int]
    waiting: dict[int, Host] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    company: events.Company = field(default_factory=events.Company)
    parted: set[int] = field(default_factory=set)
    planning: set[int] = field(default_factory=set)
    first: Host | None = None
    enough_since_s: float | None = None
    refusal: events.LauncherFailed | None = None

    def receive(self, sender: int, message: Notice) -> Outgoing:
        """Take a message of a host; return what to send."""
        if isinstance(message, Ready):
            return self._meet(sender, message.host)
        if sender not in self.numbers:
            return []
        if isinstance(message, Leaving):
            self.parted.add(sender)
            return self._part()
        return self._to_others(sender, events.FromHost(self.numbers[sender], message))

    def lose(self, sender: int, why: str) -> Outgoing:
        """A host's connection has ended; return what to send."""
        waited = self.waiting.pop(sender, None)
        self.planning.discard(sender)
        out = self._name_waiting() if waited else []
        number = self.numbers.pop(sender, None)
        if sender in self.parted:
            self.parted.remove(sender)
        elif number is not None and not waited:
            gone = events.HostGone(number, why)
            out += [*((to, gone) for to in self.numbers), *self._part()]
        return out + self._begin_if_complete()

    def notice(self, sender: int, silent_s: float) -> Outgoing:
        """Nothing came from a host for `silent_s` seconds; return what to send."""
        if sender not in self.numbers:
            return []
        host = self.company.name(self.numbers[sender])
        return self._to_others(sender, say_silent(host, silent_s))

    def tick(self, now_s: float) -> Outgoing:
        """Begin a round if enough hosts have waited for others; return what to send.

        now_s: seconds of any clock.  It is called about once a second.
        """
        if not self._is_enough:
            self.enough_since_s = None
            return []
        self.enough_since_s = now_s if self.enough_since_s is None else self.enough_since_s
        again = any(host.quorum for host in self.waiting.values())
        last_call_s = _LAST_CALL_AGAIN_S if again else _LAST_CALL_S
        return self._begin() if now_s - self.enough_since_s >= last_call_s else []

    def _meet(self, sender: int, host: Host) -> Outgoing:
        known = self.numbers.keys() | self.planning
        if 0 < self.company.epoch < host.epoch:
            silent = f"{host.name} has taken its place: it was silent for long."
            return self._to_first(events.LauncherFailed(Reason("host 0", silent)))
        if self.first and sender not in known and (refused := self._refuse(self.first, host)):
            return [(sender, events.LauncherFailed(refused, refused=True))]
        self.waiting[sender], self.enough_since_s = host, None
        first, *others = self._hosts().values()
        found = (find_mismatch(first, other) for other in others)
        if fault := next(filter(None, found), None):
            self.refusal = self.refusal or events.LauncherFailed(fault, refused=True)
        if self.refusal is not None:
            return self._to_waiting(self.refusal)
        if begun := self._begin_if_complete():
            return begun
        out = self._name_waiting()
        if sender not in known:
            joins = events.Asked(f"a host joins ({host.name})", regroups=True)
            out += self._to_first(joins)
        return out

    def _refuse(self, first: Host, host: Host) -> Reason | None:
        """Say why a host cannot join a run of the host `first`; None if it can."""
        if len(self._awaited | self.waiting.keys()) < self.nodes.most:
            return find_mismatch(first, host)
        names = ", ".join(self.company.names)
        problem = f"the run of {names} is under way there."
        return Reason("launch.rdzv_endpoint", problem, SAME_COMMAND)

    @property
    def _awaited(self) -> set[int]:
        """Hosts of the last round that have not come to this meeting, and have not gone."""
        return (self.numbers.keys() | self.planning) - self.waiting.keys()

    @property
    def _is_enough(self) -> bool:
        """Enough hosts wait for a round, and those of the last round are among them."""
        here = [host.quorum for host in self.waiting.values() if host.quorum]
        enough = len(self.waiting) >= self.nodes.fewest and len(here) >= max(here, default=0)
        return not self._awaited and self.refusal is None and enough

    def _begin_if_complete(self) -> Outgoing:
        """Begin a round if nobody more is to come: later ones wait for no others, once they are
        the hosts of the round before and those that wanted to join.
        """
        complete = len(self.waiting) == self.nodes.most or self.first is not None
        return self._begin() if self._is_enough and complete else []

    def _begin(self) -> Outgoing:
        here = self._hosts()
        hosts = list(here.values())
        numbers = number_hosts(hosts)
        if isinstance(numbers, Reason):
            self.refusal = events.LauncherFailed(numbers, refused=True)
            return self._to_waiting(self.refusal)
        first = hosts[numbers.index(0)]
        newest = max((first, *hosts), key=lambda host: host.start[0])
        self.waiting, self.numbers, self.parted, self.first = {}, {}, set(), first
        if any((h.planned, h.start) != (len(hosts), newest.start) for h in hosts):
            self.planning = set(here)
            count, start, door = len(hosts), newest.start[0], newest.door
            lacks = {to: start > 0 and host.folder != newest.folder for to, host in here.items()}
            return [(to, events.PlanWanted(count, start, door * lacks[to])) for to in here]
        self.planning = set()
        self.numbers = dict(zip(here, numbers, strict=True))
        ordered = [hosts[numbers.index(k)] for k in range(len(hosts))]
        self.company = events.Company(
            names=tuple(host.name for host in ordered),
            doors=tuple(host.door for host in ordered),
            sees=tuple(host.folder == first.folder for host in ordered),
            epoch=self.company.epoch or 1 + max(host.epoch for host in hosts),
        )
        port = self.open_store()
        return [
            (key, events.Met(replace(self.company, number=number), port))
            for key, number in self.numbers.items()
        ]

    def _part(self) -> Outgoing:
        if self.parted != set(self.numbers):
            return []
        return [(to, events.Parted()) for to in self.numbers]

    def _to_others(self, sender: int, message: Notice) -> Outgoing:
        return [(to, message) for to in self.numbers if to != sender]

    def _to_first(self, message: Notice) -> Outgoing:
        return [(to, message) for to, number in self.numbers.items() if number == 0]

    def _to_waiting(self, message: Notice) -> Outgoing:
        return [(to, message) for to in self.waiting]

    def _hosts(self) -> dict[int, Host]:
        """The hosts that wait, in the order of their connections: that of the hub is the first."""
        return dict(sorted(self.waiting.items()))

    def _name_waiting(self) -> Outgoing:
        return self._to_waiting(HostsHere(tuple(host.name for host in self.waiting.values())))
