"""The hub: which hosts are here, and who gets which message.  Pure: hosts.py feeds it.

    a host to the hub                        the hub to a host
    meet HOST    it is ready for a round     waiting NAMES            those that have come so far
    broadcast EVENT   to all other hosts     met NUMBER NAMES PORT FOLDER    all are here
    part         it has no more to send      refused WHERE PROBLEM INSTEAD
                                             event NUMBER EVENT       from another host
                                             silent NUMBER NAME SECONDS
                                             gone NUMBER NAME WHY     without having parted
                                             parted                   all have parted, or have gone

A run is one round, or more if its ranks are started anew.  Messages of one host reach every other
one in the order sent, and all of them before `parted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from flowrun.launcher.launch.hosts.meeting import (
    Host,
    Mismatch,
    find_mismatch,
    number_hosts,
)

Outgoing = list[tuple[int, tuple[Any, ...]]]  # (to which connection, message)


@dataclass
class Hub:
    """The state of the hub.

    nnodes: hosts of a round.  open_store: makes the store of a round's ranks, and returns its port.
    waiting: the hosts that are ready for the next round, by connection, in the order in which they
    came.  numbers, names: of the hosts of the round under way.  parted: of those, who have.
    """

    nnodes: int
    open_store: Callable[[], int]
    waiting: dict[int, Host] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    parted: set[int] = field(default_factory=set)
    refusal: Mismatch | None = None

    def receive(self, sender: int, message: tuple[Any, ...]) -> Outgoing:
        """Take a message of a host; return what to send."""
        match message:
            case ("meet", host):
                return self._meet(sender, Host(**host))
            case ("broadcast", event) if sender in self.numbers:
                return self._to_others(sender, ("event", self.numbers[sender], event))
            case ("part",) if sender in self.numbers:
                self.parted.add(sender)
                return self._part()
        return []

    def lose(self, sender: int, why: str) -> Outgoing:
        """A host's connection has ended; return what to send."""
        waited = self.waiting.pop(sender, None)
        out = self._to_waiting(("waiting", self._names())) if waited else []
        number = self.numbers.pop(sender, None)
        if sender in self.parted:
            self.parted.remove(sender)
        elif number is not None:
            gone = ("gone", number, self.names[sender], why)
            out += [*((to, gone) for to in self.numbers), *self._part()]
        return out

    def notice(self, sender: int, silent_s: float) -> Outgoing:
        """Nothing came from a host for `silent_s` seconds; return what to send."""
        if sender not in self.numbers:
            return []
        message = ("silent", self.numbers[sender], self.names[sender], silent_s)
        return self._to_others(sender, message)

    def _meet(self, sender: int, host: Host) -> Outgoing:
        if self.numbers and sender not in self.numbers:
            names = ", ".join(self.names.values())
            full = Mismatch("launch.rdzv_endpoint", f"the run of {names} is under way there.")
            return [(sender, ("refused", *astuple(full)))]
        self.waiting[sender] = host
        first, *others = self._hosts().values()
        found = (find_mismatch(first, other) for other in others)
        self.refusal = self.refusal or next(filter(None, found), None)
        if self.refusal is None and len(self.waiting) == self.nnodes:
            return self._begin_round()
        if self.refusal is None:
            return self._to_waiting(("waiting", self._names()))
        return self._to_waiting(("refused", *astuple(self.refusal)))

    def _begin_round(self) -> Outgoing:
        here = self._hosts()
        hosts = list(here.values())
        numbers = number_hosts(hosts)
        if isinstance(numbers, Mismatch):
            self.refusal = numbers
            return self._to_waiting(("refused", *astuple(numbers)))
        self.numbers = dict(zip(here, numbers, strict=True))
        self.names = {key: host.name for key, host in here.items()}
        self.parted, self.waiting = set(), {}
        by_number = {n: host for n, host in zip(numbers, hosts, strict=True)}
        names = [by_number[n].name for n in range(self.nnodes)]
        rest = (names, self.open_store(), by_number[0].folder)
        return [(key, ("met", number, *rest)) for key, number in self.numbers.items()]

    def _part(self) -> Outgoing:
        if self.parted != set(self.numbers):
            return []
        return [(to, ("parted",)) for to in self.numbers]

    def _to_others(self, sender: int, message: tuple[Any, ...]) -> Outgoing:
        return [(to, message) for to in self.numbers if to != sender]

    def _to_waiting(self, message: tuple[Any, ...]) -> Outgoing:
        return [(to, message) for to in self.waiting]

    def _hosts(self) -> dict[int, Host]:
        """The hosts that wait, in the order of their connections: that of the hub is the first."""
        return dict(sorted(self.waiting.items()))

    def _names(self) -> list[str]:
        return [host.name for host in self.waiting.values()]


def as_fields(host: Host) -> Mapping[str, Any]:
    """Return a host as the JSON object that `meet` carries."""
    return {name: getattr(host, name) for name in host.__dataclass_fields__}
