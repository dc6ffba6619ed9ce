"""Figures of ranks by the names that a report has."""

from __future__ import annotations

from flowrun.engine.compile import Rehearsed


def acts_by_name(rehearsed: Rehearsed, acts: dict[int, int]) -> dict[str, int]:
    """Actor name -> acts."""
    return {rehearsed.plan.actors[actor].name: count for actor, count in acts.items()}


def max_stashed(rehearsed: Rehearsed, most_live: dict[int, int]) -> int:
    """Return the most versions of any stash register that were live at once."""
    registers = rehearsed.plan.registers
    return max((count for r, count in most_live.items() if registers[r].stash), default=0)
