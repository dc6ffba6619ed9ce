"""The time of the loop itself: a recipe's plan whose actors compute nothing and send nothing.

    python -m flowrun.launcher.bench.loop recipe=gpt_hybrid

Actors, registers, order of collectives and the loop are those of a run; the programs of the regions
return at once, and every message is there when it is issued.  What is left is the engine's Python.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from flowrun.engine.actors.plan import RECEIVE, Actor, Plan, RegionWork
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.drivers.communication import Communication
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.kernels.kernels import Kernel
from flowrun.engine.runtime.rank.readers import Readers
from flowrun.engine.runtime.transport.links import Links
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

_STEPS, _TRIALS = 20, 5


@dataclass(frozen=True, slots=True)
class LoopTime:
    """The loop's time on one rank of a stage.

    acts: in a step.  act_s: thread CPU seconds of one, at best.
    """

    stage: int
    acts: int
    act_s: float


class _Nothing:
    """A stand-in for every tensor."""

    shape = ()
    is_cuda = False

    def add_(self, other: object) -> None:
        """A sum over micro-batches."""

    def clone(self) -> _Nothing:
        """The first of a sum."""
        return self

    def contiguous(self) -> _Nothing:
        """A whole sum."""
        return self

    def tolist(self) -> float:
        """A result."""
        return 0.0


class _Arrived:
    """A message that is there when it is issued."""

    sent_bytes = 0

    def __init__(self, made: list[object]) -> None:
        self.finish = lambda: made

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back at once."""
        callback()


class _EmptyReaders:
    """Batches of nothing."""

    def supply(self, actor: Actor, act: int, inputs: Sequence[object]) -> list[Any]:
        """Return as many stand-ins as the act has fields.  See Readers.supply."""
        return [_Nothing() for _ in actor.makes]


class _NoLinks(Links):
    """Links to nobody: there is one process."""

    def join(self, plan: Plan) -> None:
        """No groups are made."""


class _EmptyCommunication(Communication):
    """Every message is there when it is issued."""

    def start(self, actor: Actor, act: int) -> Any:
        """Read what the act reads, and no more."""
        if actor.kind != RECEIVE:
            self.body.inputs(actor, act)
        return _Arrived([_Nothing() for _ in actor.makes])


class EmptyRank(DistributedRank):
    """A rank that does all that its plan asks of the engine, and nothing else."""

    def __init__(self, job: Job, plan: Plan, rank: int) -> None:
        cpu = torch.device("cpu")
        super().__init__(
            plan, rank, job.materials.sampler, job.materials.initial, cpu, _NoLinks(rank, cpu)
        )
        self.body.readers = cast(Readers, _EmptyReaders())
        self.body.kernels = {k: self._kernel(plan.actors[k]) for k in self.body.kernels}
        self.communication = _EmptyCommunication(plan, self.body, self.links)

    def _kernel(self, actor: Actor) -> Kernel:
        assert isinstance(actor.work, RegionWork)
        made = tuple(_Nothing() for _ in actor.work.makes)
        updated = tuple(self.body.variables[tensor] for tensor, _ in actor.work.updates)
        return lambda _: cast(tuple[torch.Tensor, ...], (*made, *updated))


def loop_times(job: Job) -> Iterator[LoopTime]:
    """Yield the loop's time on the first rank of each stage."""
    plan = job.training.plan
    for stage, placement in enumerate(plan.placements):
        rank = EmptyRank(job, plan, placement.ranks[0])
        acts = sum(plan.acts_per_step(actor) for actor in plan.stage_actors(stage))
        trials = [_seconds(rank, k * _STEPS) for k in range(_TRIALS)]
        rank.links.close()
        yield LoopTime(stage, acts, min(trials) / (_STEPS * acts))


def _seconds(rank: EmptyRank, first: int) -> float:
    start = time.thread_time()
    rank.run(first + _STEPS, first=first)
    return time.thread_time() - start


def main() -> None:
    """The recipe of the command line."""
    job = Job(load(sys.argv[1:]))
    for found in loop_times(job):
        print(f"stage {found.stage}: {found.acts} acts a step, {found.act_s * 1e6:.1f} us each")
    start, plan = time.process_time(), job.training.plan
    rehearse(plan)
    acts = sum(map(plan.acts_per_step, plan.actors)) * 5  # a cold step and four more
    print(f"rehearsal: {(time.process_time() - start) / acts * 1e6:.1f} us for an act")


if __name__ == "__main__":
    main()
