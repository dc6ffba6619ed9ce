"""What the machine of a run's life asks of the driver's hands (machine.py, driver.py).  Frozen
values; each is carried out in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import dataclass_transform

from flowrun.launcher.listeners.listener import COMPLETE, FAILED, PREEMPTED, STOPPED
from flowrun.launcher.ranks.rank_events import Evaluated, Reason, Remarked, StepDone
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.life.events import CheckpointKept, PlanWanted, StartPoint

__all__ = ["COMPLETE", "FAILED", "PREEMPTED", "STOPPED"]  # see End
THERE = "there"


@dataclass_transform(frozen_default=True)
class Instruction:
    """An instruction: each subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Meet(Instruction):
    """Meet the other hosts: Met, PlanWanted, LauncherFailed or AlreadyComplete follows."""


class ForkRanks(Instruction):
    """Make the folder ready and fork this host's ranks: RanksGone follows."""


class KillRanks(Instruction):
    """Kill this host's ranks."""


class Freeze(Instruction):
    """Let no rank begin a step, once all have passed the last halt: Frozen follows."""


class HaltAfter(Instruction):
    """Open the gate.  step: after which all ranks rest; None: none.  ends: see StepGate."""

    step: int | None = None
    ends: int = 0


class SendAll(Instruction):
    """Send an event to all other hosts."""

    event: Notice


class LeaveRound(Instruction):
    """Wait until the other hosts have sent all, for within_s at most: Parted follows."""

    within_s: float


class SetTimer(Instruction):
    """Let TimeIsUp follow.  seconds: from now; below 0: never, it was set and counts no more."""

    timer: str
    seconds: float


class Publish(Instruction):
    """Write down a step, an evaluation or a checkpoint of the first host, which listeners follow;
    say a remark to a person.
    """

    event: StepDone | Evaluated | CheckpointKept | Remarked


def say(text: str) -> Publish:
    """Return the instruction to say what a person should know."""
    return Publish(Remarked(text))


class CompleteCheckpoint(Instruction):
    """Make a checkpoint count.  files: of each its bytes and checksum."""

    step: int
    files: Mapping[str, tuple[int, int]]


class FindStart(Instruction):
    """Find the newest whole state, before the bad step if there was one: StartFound follows.

    rolls_back: to a checkpoint, with whose weights the run continues after the bad step.
    """

    rolls_back: bool = False


class Restart(Instruction):
    """Write down that ranks begin again.  fault: why."""

    fault: Reason
    place: StartPoint


class Save(Instruction):
    """Save what ranks left in memory as a checkpoint."""


class ReplanFewer(Instruction):
    """Plan for fewer ranks: NewPlan or LauncherFailed follows."""

    fault: Reason


class ReplanHosts(Instruction):
    """Plan for the hosts that are here: NewPlan or LauncherFailed follows."""

    wanted: PlanWanted


class End(Instruction):
    """The run is over.

    status: COMPLETE, PREEMPTED, STOPPED (by Ctrl-C), FAILED, or THERE where other hosts have ended
    it.  by: what asked for the end.  fault: of a run that failed.  refused: it is of the recipe.
    how: ranks ended that failed (rank_events.py).
    """

    status: str
    by: str = ""
    fault: Reason | None = None
    refused: bool = False
    how: str = ""
