"""Pulse: what a rank has begun and done, in memory that its launcher reads at any moment.

It costs a few plain stores an act and no system call.  The memory is made before the ranks are
forked.  What the counts mean when no act ends, actors/standstill.py finds.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from time import monotonic_ns

from flowrun.engine.actors.plan import COMMUNICATION, Actor, Plan
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.actors.standstill import RankState
from flowrun.engine.ir.graph import UPDATE


class Activity(IntEnum):
    """What a rank does, in words; all ranks of a run go through the same ones in one order."""

    text: str

    def __new__(cls, number: int, text: str) -> Activity:
        activity = int.__new__(cls, number)
        activity._value_, activity.text = number, text
        return activity

    STARTING = 0, "has not started"
    MEETING = 1, "meets the other ranks"
    MAKING_WEIGHTS = 2, "makes its weights"
    RESTORING = 3, "reads a checkpoint"
    TRAINING = 4, "trains"
    RESTING = 5, "waits for the other ranks to end their steps"
    STEPS_ENDED = 6, "has ended its steps"
    PREPARING = 7, "prepares to evaluate"
    EVALUATING = 8, "evaluates"
    SAVING = 9, "saves a checkpoint"
    SAVING_WEIGHTS = 10, "saves the weights"
    WRITING = 11, "waits for its checkpoint to be on the disk"
    LEAVING = 12, "waits for the other ranks to end"
    ENDED = 13, "has ended"


STEPS = (Activity.TRAINING, Activity.EVALUATING)
# numbers at the head of a pulse: times are of the monotonic clock, in ns
_AT, _ACTED, _ACTIVITY, _ENTERED, _FIRST, _STEPS, _PID, _RANK, _WAITED, _READ = range(10)
_DEVICE, _PLAN, _HEAD = 10, 11, 12
_ASLEEP, _REPORTS = -1, -2
_UNHEARD = "waits for its launcher, which does not take what it reports"


class Pulse:
    """The counts of one rank.

    plans: whose acts it counts: of each update of a step, and of evaluation where there is one.
    """

    def __init__(self, words: memoryview, plans: Sequence[Plan]) -> None:
        """words: int64 numbers, as many as `count_words` says."""
        self.plans = plans
        self._words = words
        self._begun = self._done = _HEAD
        self._asleep_since = 0

    @staticmethod
    def private(plan: Plan) -> Pulse:
        """Return a pulse that nobody else reads."""
        return Pulse(memoryview(bytearray(8 * count_words([plan]))).cast("q"), [plan])

    # ------------------------------------------------------------------ the rank writes

    def start(self, rank: int) -> None:
        """Note the process of a rank, and that it meets the others."""
        self._words[_RANK], self._words[_PID] = rank, os.getpid()
        self.enter(Activity.MEETING)

    def enter(self, activity: Activity) -> None:
        """Begin an activity without steps."""
        self._words[_AT] = _ASLEEP
        self._words[_ACTIVITY] = activity
        self._words[_ENTERED] += 1
        self._words[_ACTED] = monotonic_ns()

    def enter_steps(self, scheduler: Scheduler, first: int) -> None:
        """Begin the steps from `first` on that a scheduler does, with the acts that it counts."""
        number = next(k for k, plan in enumerate(self.plans) if plan is scheduler.plan)
        self._begun, self._done = _places(self.plans, number)
        for actor, acts in scheduler.acts.items():
            self._words[self._begun + actor] = self._words[self._done + actor] = acts
        self._words[_FIRST] = first
        self._words[_PLAN] = number
        self.end_after(scheduler.last)
        trains = not number or any(actor.phase == UPDATE for actor in scheduler.plan.actors)
        self.enter(Activity.TRAINING if trains else Activity.EVALUATING)

    def end_after(self, steps: int) -> None:
        """Note how many steps are done when the rank comes to rest."""
        self._words[_STEPS] = steps

    def begin(self, actor: int, act: int) -> None:
        """Note that the loop begins an act."""
        words = self._words
        words[_AT] = actor
        words[self._begun + actor] = act + 1

    def begin_in_thread(self, actor: int, act: int) -> None:
        """Note that an act has begun that a thread does."""
        self._words[self._begun + actor] = act + 1

    def take(self, actor: int) -> None:
        """Note that the loop takes what an act under way has brought."""
        self._words[_AT] = actor

    def end(self, actor: int, act: int) -> None:
        words = self._words
        words[self._done + actor] = act + 1
        words[_ACTED] = monotonic_ns()

    def report(self) -> None:
        """Note that the rank sends to its launcher."""
        self._words[_AT] = _REPORTS

    def sleep(self) -> None:
        """Note that the loop sleeps until something comes."""
        self._words[_AT] = _ASLEEP
        self._asleep_since = monotonic_ns()

    def wake(self, ended: Actor) -> None:
        """Note that the loop wakes.  ended: the actor whose act it has waited for."""
        if self._words[_ACTIVITY] != Activity.TRAINING:
            return
        if ended.kind in COMMUNICATION:
            self._words[_WAITED] += monotonic_ns() - self._asleep_since
        elif ended.makes_batches:
            self._words[_READ] += monotonic_ns() - self._asleep_since

    def note_device(self, num_bytes: int) -> None:
        """Note the bytes that the allocator of this rank's device has taken."""
        self._words[_DEVICE] = num_bytes

    # ------------------------------------------------------------------ the launcher reads

    @property
    def activity(self) -> Activity:
        return list(Activity)[self._words[_ACTIVITY]]

    @property
    def rank(self) -> int:
        """The rank, among those of all hosts."""
        return self._words[_RANK]

    @property
    def process(self) -> int:
        """The number of its process; 0 before it has started."""
        return self._words[_PID]

    @property
    def quiet_s(self) -> float:
        """Seconds since the last act or activity."""
        return (monotonic_ns() - self._words[_ACTED]) / 1e9

    @property
    def waited_s(self) -> float:
        """Seconds of training for which the loop has slept until another rank sent something."""
        return self._words[_WAITED] / 1e9

    @property
    def read_s(self) -> float:
        """Seconds of training for which the loop has slept until samples were ready."""
        return self._words[_READ] / 1e9

    @property
    def device_bytes(self) -> int:
        """Bytes that the allocator of the rank's device has taken; 0 on the CPU."""
        return self._words[_DEVICE]

    @property
    def trained_steps(self) -> float:
        """Steps of training done, by the acts of all actors."""
        begun, done = _places(self.plans, 0)
        plan = self.plans[0]
        stage = plan.stage_of(self.rank)
        acts = sum(self._words[done : done + done - begun])
        return acts / sum(plan.acts_per_step(actor) for actor in plan.stage_actors(stage))

    @property
    def in_first_step(self) -> bool:
        """True in steps of which the rank has not done one whole: much may be made there once."""
        if self.activity not in STEPS:
            return False
        number = self._words[_PLAN]
        plan, (_, done) = self.plans[number], _places(self.plans, number)
        acts = self._words[done : done + len(plan.actors)].tolist()
        whole = sum(plan.acts_per_step(a) for a, n in zip(plan.actors, acts, strict=True) if n)
        return sum(acts) < (self._words[_FIRST] + 1) * whole or not whole

    def state(self, halted: str = "") -> RankState:
        """Return what the counts say.  halted: why the process cannot run."""
        activity, words = self.activity, self._words
        entered = words[_ENTERED]
        if activity not in STEPS:
            return RankState(activity=activity.text, entered=entered, halted=halted)
        number = words[_PLAN]
        plan, (begun, done) = self.plans[number], _places(self.plans, number)
        at, count = words[_AT], len(plan.actors)
        return RankState(
            activity=activity.text,
            entered=entered,
            plan=plan,
            steps=words[_STEPS],
            begun=words[begun : begun + count].tolist(),
            done=words[done : done + count].tolist(),
            at=at if at >= 0 else None,
            halted=halted or (_UNHEARD if at == _REPORTS else ""),
        )


class Pulses:
    """The pulses of the ranks of a host, in memory that processes forked later share."""

    def __init__(self, plans: Sequence[Plan], num_ranks: int) -> None:
        size = count_words(plans)
        words = memoryview(mmap.mmap(-1, 8 * size * num_ranks)).cast("q")
        self._words = words
        self.ranks = [Pulse(words[k * size : (k + 1) * size], plans) for k in range(num_ranks)]
        for k in range(num_ranks):
            words[k * size + _RANK] = k  # until it says which it is

    def copy(self) -> bytes:
        """Return all counts as they are now; they change with every act."""
        return self._words.tobytes()


def count_words(plans: Sequence[Plan]) -> int:
    return _HEAD + 2 * sum(len(plan.actors) for plan in plans)


def _places(plans: Sequence[Plan], number: int) -> tuple[int, int]:
    """Return where the begun and the done acts of a plan stand."""
    begun = count_words(plans[:number])
    return begun, begun + len(plans[number].actors)
