"""The other updates of a step (recipe/updates.py): each is a plan that runs once the plan before it
has come to rest, over the variables that the first one holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from flowrun.engine.runtime.rank.rank import Rank, Results
from flowrun.launcher.job.job import Job
from flowrun.launcher.ranks.segment_loop import Gate

_Asked = TypeVar("_Asked", contravariant=True)


class Runner(Protocol[_Asked]):
    """A rank of a plan, or all of its ranks."""

    def run(
        self, steps: int, on_step: None = None, first: int = 0, may_begin: _Asked | None = None
    ) -> Sequence[Results]:
        """Run steps `first` to `steps` - 1; return their results, if this process has them."""


def follow_plateau(job: Job, bodies: Iterable[Rank]) -> None:
    """Let the ranks of a job read the rates that its evaluations leave."""
    if plateau := job.plateau:
        for body in bodies:
            body.adjust_numbers(plateau.adjust)


def run_updates(
    steps: range,
    runners: Sequence[Runner[_Asked]],
    job: Job,
    gate: Gate,
    may_begin: _Asked,
    on_step: Callable[[int, Results, float], None],
) -> None:
    """Run steps one by one, each with the other updates that are due, until a halt.

    runners: of the plans of the job, and of its others.  gate: is past a step that began; may_begin
    asks it.  on_step: called with a step, all its results and seconds, where this process has them;
    those of another update are called "loss/NAME".
    """
    for step in steps:
        begin = time.perf_counter()
        found = runners[job.materials.sampler.turn(step)].run(step + 1, None, step, may_begin)
        if gate.begun <= step:  # a halt refused it
            return
        together = {key: value for results in found for key, value in results.items()}
        for (update, _), runner in zip(job.others, runners[1:], strict=True):
            if update.every and step % update.every == 0:
                number = step // update.every
                for results in runner.run(number + 1, None, number):
                    together |= {f"{key}/{update.name}": x for key, x in results.items()}
        if together:
            on_step(step, together, time.perf_counter() - begin)
