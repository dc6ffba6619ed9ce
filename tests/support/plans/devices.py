"""Devices with limits: what of its host's launches a GPU starts, played by the clock."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flowrun.engine.actors.communicators import communicator_of
from flowrun.engine.actors.plan import COMMUNICATION, Actor, Plan
from flowrun.engine.rehearsal.clock import Clock


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
Communicator = Callable[[Plan, Actor], str]


class Device:
    """The launches of one rank that have not ended, in order.

    communicator: names that of an actor.
    """

    def __init__(self, plan: Plan, room: Room, communicator: Communicator, stage: int) -> None:
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


def play(plan: Plan, room: Room = ONE_KERNEL, communicator: Communicator = communicator_of) -> None:
    """Raise PlanError if a plan stops on devices with so much room."""
    DeviceClock(plan, room, communicator).run()


class DeviceClock(Clock):
    """Communication begins when a device starts it, and compute where there is room."""

    def __init__(self, plan: Plan, room: Room, communicator: Communicator) -> None:
        super().__init__(plan, lambda _: 1.0, steps=2, skip_repeats=False)
        stages = range(len(plan.placements))
        self.devices = [Device(plan, room, communicator, stage) for stage in stages]

    def _communicate_all(self, stages: Iterable[int]) -> None:
        for stage in stages:
            rank, device = self.state.ranks[stage], self.devices[stage]
            while launched := rank.next_communication():
                device.launch(*launched)
            while started := device.start():
                self._communicate(stage, *started)
            while launched := rank.next_supply():
                self._begin(stage, *launched)

    def _compute(self, stages: Iterable[int]) -> None:
        super()._compute(stage for stage in stages if self.devices[stage].may_compute)

    def _end(self, actor: int) -> bool:
        described = self.plan.actors[actor]
        if described.kind in COMMUNICATION:
            self.devices[described.stage].end(actor)
        return super()._end(actor)
