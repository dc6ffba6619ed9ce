"""What launchers say to each other, besides events (life/events.py).

who comes to a door                        the launcher that opens it
HubWanted  is the hub here?                HubHere
FileWanted a file of its run's folder      FileComing, and the bytes

a host to the hub                          the hub to a host
Ready      for a round                     HostsHere    those that have come so far
an event, for all other hosts              Met, PlanWanted, Asked, Remarked, FromHost, HostGone,
Leaving    it has no more to send          LauncherFailed, Parted: events
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrun.launcher.ranks.rank_events import Remarked
from flowrun.launcher.ranks.wire import Notice


@dataclass(frozen=True, kw_only=True)
class Host:
    """A launcher describes itself to the others.

    name: of its machine.  node_rank: as in the recipe.  recipe: dotted key -> value as text.
    plan: digest of the plan.  planned: hosts that it is for; 0: none yet.  start: steps done of the
    state that it would begin at, and a checksum of it.  quorum: how many hosts of its last round
    have to be here; 0: it has been in none.  epoch: of the hub of that round, or as its folder or
    store has it.  versions: package -> version.  folder: of its run, by a name that all who see it
    know.  door: where other launchers come to it.
    """

    name: str
    node_rank: int | None
    recipe: Mapping[str, str]
    plan: str
    planned: int
    start: tuple[int, str]
    quorum: int
    epoch: int
    versions: Mapping[str, str]
    folder: str
    door: str = ""


class Ready(Notice):
    """A host is ready for a round."""

    host: Host


class Leaving(Notice):
    """A host has sent all of a round."""


class HostsHere(Notice):
    """Hosts that have come so far."""

    names: tuple[str, ...]


def say_silent(host: str, seconds: float) -> Remarked:
    """Say that nothing came from a host for some seconds."""
    return Remarked(f"nothing came from {host} for {seconds:.0f} s", waits=True)


class HubWanted(Notice):
    """A launcher looks for the hub."""


class HubHere(Notice):
    """A launcher answers whether the hub is here."""

    here: bool


class FileWanted(Notice):
    """A host lacks a file of a run.  name: within its folder."""

    name: str


class FileComing(Notice):
    """The bytes of a file follow.  num_bytes: -1: it is not there."""

    num_bytes: int


class Alive(Notice):
    """A side is alive: it says so every BEAT_S (channel.py)."""
