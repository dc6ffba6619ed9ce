"""Schedules: how many micro-batches a stage may hold for backward, and whether weight gradients
stay joined to backward.  There is nothing else to them: registers.py makes slots of the numbers,
split_weight_grads.py a phase of the rest, and the protocol does what follows.
"""

from __future__ import annotations

from flowrun.engine.errors import PlanError

JOINED = ("1f1b", "gpipe")  # their weight gradients are part of backward


def held_micro_batches(
    in_flight: int | str, stages: int, stage: int, micro_batches: int, alone: int = 1
) -> int:
    """At most those of a step.

    in_flight: as Strategy's.  alone: what a single stage holds where the schedule is zero bubble,
    which has no bubble to fill there: 2 hide the communication of backward (registers.py).
    Raises PlanError for an unknown schedule.
    """
    match in_flight:
        case int(number):
            held = number
        case "gpipe":
            held = micro_batches
        case "1f1b":
            held = stages - stage
        case "zero_bubble" | "auto":
            held = 2 * stages if stages > 1 else alone
        case other:
            raise PlanError(
                "placement.in_flight",
                f"{other!r} is no schedule.",
                "Write a number, gpipe, 1f1b or zero_bubble.",
            )
    return min(held, micro_batches)
