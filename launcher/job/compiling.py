"""What ranks do: plans, and the kernels that a recipe asks for, built before ranks are forked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Rehearsed
from flowrun.engine.runtime.inductor.built import BuiltRegions
from flowrun.engine.runtime.kernels.kernels import Kernels, eager_kernels
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.schema import EAGER
from flowrun.launcher.recipe.updates import StepUpdate


@dataclass(frozen=True, kw_only=True)
class OtherUpdate:
    """Another update of each step.  kernels: of the regions of its plan."""

    update: StepUpdate
    job: Job
    training: Rehearsed
    kernels: Kernels


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The work of ranks.

    job: their recipe, made concrete.  kernels: of training's regions.  others: of the other updates
    of each step, which have no evaluation.
    """

    job: Job
    training: Rehearsed
    evaluation: Rehearsed | None
    kernels: Kernels
    others: tuple[OtherUpdate, ...] = ()

    @property
    def plans(self) -> list[Plan]:
        """All plans of a rank: of training first."""
        others = (each.training for each in self.others)
        return [p.plan for p in (self.training, *others, self.evaluation) if p]


def compile_job(job: Job, say: Callable[[str], None]) -> Compiled:
    """Return what ranks of a job do.  say: shows one line to the person who waits."""
    training, evaluation = job.plans.compiled
    kernels = kernels_of(job, training, say)
    others = tuple(
        OtherUpdate(
            update=update,
            job=other,
            training=other.training,
            kernels=kernels_of(other, other.training, say),
        )
        for update, other in job.others
    )
    return Compiled(
        job=job, training=training, evaluation=evaluation, kernels=kernels, others=others
    )


def kernels_of(job: Job, training: Rehearsed, say: Callable[[str], None]) -> Kernels:
    """Return the kernels of training's regions, as engine.compiler asks.

    job, training: the job and its training plan.  say: shows one line to the person who waits.  On
    CUDA every rank builds for itself: this process must not touch the device.  Raises RecipeError
    if there is no compiler, RunError if it refuses a region.
    """
    if job.recipe.engine.compiler == EAGER:
        return eager_kernels
    regions = built_regions(job, training)
    if job.device_type == "cpu":
        _build(regions, say)
    return regions


def _build(regions: BuiltRegions, say: Callable[[str], None]) -> None:
    """Here, for all ranks of this host."""
    from flowrun.engine.runtime.inductor.build_ahead import build_ahead, list_new_pieces
    from flowrun.engine.runtime.inductor.inductor import require_compiler

    require_compiler()
    start = time.perf_counter()
    new = len(list_new_pieces(regions))
    if new:
        say(f"building {summary(regions)}, {new} of them new to this host")
    build_ahead(regions)
    say(f"built in {time.perf_counter() - start:.1f} s")


def built_regions(job: Job, training: Rehearsed) -> BuiltRegions:
    """Collect the regions to build, without building them."""
    threads = job.recipe.launch.threads
    return BuiltRegions(training.plan, job.device_type, threads, job.inductor_options)


def summary(regions: BuiltRegions) -> str:
    """Count regions for a person: "20 regions, 11 different"."""
    return f"{regions.count} regions, {len(regions.different)} different"
