"""What a launcher and the hub say to each other, besides events (life/events.py).

a host to the hub                          the hub to a host
Ready      for a round                     HostsHere    those that have come so far
an event, for all other hosts              Numbered     all are here
Leaving    it has no more to send          Refused      they cannot train together
                                           PlanWanted, HostJoined, FromHost, HostSilent,
                                           HostGone, Parted: events
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrun.launcher.ranks.wire import Notice


@dataclass(frozen=True, kw_only=True)
class Host:
    """A launcher describes itself to the others.

    name: of its machine.  nodes: hosts that there may be.  node_rank: as in the recipe.
    recipe: dotted key -> value as text.  plan: digest of the plan.  planned: hosts that it is for;
    0: none yet.
    start: steps done of the state that it would begin at.  rounds: in which it has been.
    versions: package -> version.  folder: of its run.
    """

    name: str
    nodes: str
    node_rank: int | None
    recipe: Mapping[str, str]
    plan: str
    planned: int
    start: int
    rounds: int
    versions: Mapping[str, str]
    folder: str

    @property
    def may_change(self) -> bool:
        """True if hosts may join and leave its run."""
        return ":" in self.nodes


class Ready(Notice):
    """A host is ready for a round."""

    host: Host


class Leaving(Notice):
    """A host has sent all of a round."""


class HostsHere(Notice):
    """Hosts that have come so far."""

    names: tuple[str, ...]


class Numbered(Notice):
    """A round begins.

    number: of this host.  names: of all.  port: of the ranks' store, on the hub's host.  folder: of
    the first host's run.
    """

    number: int
    names: tuple[str, ...]
    port: int
    folder: str


class Refused(Notice):
    """Hosts cannot train together.  The fields are those of a RecipeError."""

    where: str
    problem: str
    instead: str


class Alive(Notice):
    """A side has nothing to say."""
