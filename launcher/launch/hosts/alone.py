"""A run of one host, which meets nobody; and the words that it shares with several (hosts.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowrun.launcher.launch.hosts.endpoint import LOOPBACK, find_interface
from flowrun.launcher.launch.hosts.meeting import Host
from flowrun.launcher.launch.hosts.rendezvous import MeetingPlace, open_store

Receive = Callable[[int, tuple[Any, ...]], None]  # the number of a host, and an event there
Save = Callable[[str, int, Sequence[Any]], None]  # save STEP RANKS, or complete STEP FILES


def hold_nothing(word: str, step: int, what: Sequence[Any]) -> None:
    """Save nothing: this host has said that it holds nothing.

    word, step, what: see Save.
    """


class HostsChanged(Exception):
    """Other hosts are here than this one has planned for, or they go on from another state.

    num_hosts: that are here.  step: steps done of the state that all go on from.
    """

    def __init__(self, num_hosts: int, step: int) -> None:
        super().__init__(num_hosts, step)
        self.num_hosts, self.step = num_hosts, step


class Alone:
    """The only host of a run: there is nobody else to meet.  See Hosts."""

    number = 0
    names: tuple[str, ...] = ()
    shared = False
    may_change = False
    listener = None
    token = ""

    def __init__(self) -> None:
        self._store: Any = None

    def meet(
        self, describe: Callable[[], Host], receive: Receive, save: Save = hold_nothing
    ) -> MeetingPlace:
        """Return where the ranks meet: a new store on loopback.

        describe, receive, save: of no use.
        """
        self._store = open_store(LOOPBACK)
        return MeetingPlace(
            number=0,
            num_hosts=1,
            address=LOOPBACK,
            port=self._store.port,
            interface=find_interface(LOOPBACK),
        )

    def name(self, number: int) -> str:
        """Name this host for a person."""
        return "this host"

    def broadcast(self, *event: Any) -> None:
        """Do nothing."""

    def part(self, within_s: float | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close the store."""
        self._store = None
