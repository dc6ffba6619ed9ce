"""The other updates of a step (recipe/updates.py): each is a plan that runs once the plan before it
has come to rest, over the variables that the first one holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.recipe.updates import StepUpdate


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """An update, and what runs one of them: by its number, from 0; gives its results, if this
    process has them.
    """

    update: StepUpdate
    run: Callable[[int], Sequence[Results]]


def run_updates(
    steps: range,
    first: Callable[[int], Sequence[Results] | None],
    others: Sequence[OtherRun],
    on_step: Callable[[int, Results, float], None],
) -> None:
    """Run steps one by one, each with the other updates that are due, until a halt.

    first: runs a step of the first plan, or of its bucket's; None: a halt refused it.  on_step:
    called with a step, all its results and seconds, where this process has them; those of another
    update are called "loss/NAME".
    """
    for step in steps:
        begin = time.perf_counter()
        if (found := first(step)) is None:
            return
        together = {key: value for results in found for key, value in results.items()}
        for each in others:
            if each.update.every and step % each.update.every == 0:
                for results in each.run(step // each.update.every):
                    together |= {f"{key}/{each.update.name}": x for key, x in results.items()}
        if together:
            on_step(step, together, time.perf_counter() - begin)
