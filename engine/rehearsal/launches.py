"""launches: what a device starts of what its host has launched, and why no run stops.

A GPU serves launches in order.  A receive or collective that it has started holds SMs until the
other ranks come (nccl issues 1025, 689).  Streams come from a pool of 32, again and again, and
share 8 hardware queues; what is launched behind such an act waits, whether or not it needs it.

The invariant: all communication of all ranks stands in one line.  Both ends of a message, and all
members of a collective, are one place in it; no act needs what comes later; each rank launches its
part in that order.  The clock makes the line: it plays a step in which each rank issues what it
may, and writes an act down when its last end has come (ClockState.record); what it needed had ended
by then.  Steps stand one behind the other, for nothing needs what a later step makes.

So no run stops, at any speed of compute and in any room.  Of all communication that has not ended
take the first in the line.  All before it has ended, so on each of its ranks it is next, and no
launch waits.  What it reads, and the slots that it fills, follow from compute that needs nothing
later.  So all its ranks launch it, and it ends.

A receive reads nothing: launched long before its message it would hold SMs until then.  So a place
of the line knows how many acts of compute had ended there (Plan.due): a receive is launched when as
many have begun, for on the device it waits for those that were launched before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrun.engine.actors.plan import Actor, Plan


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of a device.

    streams: of the pool from which each communicator has one.  queues: of the hardware, which all
    streams share.  kernels: of communication that may run at a time: no other, and no compute,
    fits then.
    """

    streams: int = 32
    queues: int = 8
    kernels: int = 8


ONE_KERNEL = Room(1, 1, 1)


class Device:
    """The launches of one rank that have not ended, in order.

    communicator: names that of an actor.
    """

    def __init__(
        self, plan: Plan, room: Room, communicator: Callable[[Plan, Actor], str], stage: int
    ) -> None:
        names = {a.id: communicator(plan, a) for a in plan.stage_actors(stage)}
        places = {name: k % room.streams for k, name in enumerate(dict.fromkeys(names.values()))}
        self.room = room
        self.stream = {actor: places[name] for actor, name in names.items()}
        self.launched: list[tuple[int, int]] = []  # actor and act
        self.started: set[int] = set()  # actors

    def launch(self, actor: int, act: int) -> None:
        self.launched.append((actor, act))

    def start(self) -> tuple[int, int] | None:
        """Start the next launch that may run, and return it."""
        streams: set[int] = set()  # with a launch before
        queues: set[int] = set()  # with one before that has not started
        for actor, act in self.launched if self.has_room else ():
            stream = self.stream[actor]
            queue = stream % self.room.queues
            if actor not in self.started:
                if stream not in streams and queue not in queues:
                    self.started.add(actor)
                    return actor, act
                queues.add(queue)
            streams.add(stream)
        return None

    @property
    def has_room(self) -> bool:
        return len(self.started) < self.room.kernels

    @property
    def may_compute(self) -> bool:
        """True if an act of compute, whose stream has the first queue, would run at once."""
        stuck = (self.stream[k] for k, _ in self.launched if k not in self.started)
        return self.has_room and all(stream % self.room.queues for stream in stuck)

    def end(self, actor: int) -> None:
        self.launched = [each for each in self.launched if each[0] != actor]
        self.started.remove(actor)

    def moment(self, since: Sequence[int]) -> tuple[object, ...]:
        """Return all that decides what follows, with acts counted from `since`, by actor."""
        return tuple((k, act - since[k], k in self.started) for k, act in self.launched)
