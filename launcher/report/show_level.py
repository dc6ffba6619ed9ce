"""`flowrun plan --level NAME`: one level of the compiler as text, from the recipe to the order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from flowrun.engine.actors.plan import (
    ACTORS,
    BUFFERS,
    ORDER,
    REGIONS,
    REGISTERS,
    SEND,
    Actor,
    BoxWork,
    Plan,
    RegionWork,
)
from flowrun.engine.boxing.boxing import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    REDUCE_SCATTER,
    replace_axis,
)
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BOXED, CAPTURED, LAID_OUT, LEVELS, SIGNED, STAGED, TRAINED
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import B
from flowrun.engine.pipeline import PLAN_PASSES, TRAINING, advance, lower
from flowrun.launcher.job.job import Job
from flowrun.launcher.terminal.units import seconds

RECIPE = "recipe"
EXPLAINED: Mapping[str, str] = {
    RECIPE: "All keys of the run: defaults, then the recipe, then the command line.",
    CAPTURED: "Ops of one micro-batch, forward and backward, as if there were one device.",
    STAGED: "Every op has a stage, the group of ranks that runs it.",
    TRAINED: "Accumulation, clipping and the optimizer are ops too.",
    LAID_OUT: "Weights have homes; ops of forward and backward have signatures: inputs -> outputs.",
    SIGNED: "ZeRO and recomputation are in; ops of the update have signatures as well.",
    BOXED: "Boxing ops stand where layouts or stages meet: all communication there is.",
    REGIONS: "Ops that run with no communication between them are one actor, one program.",
    ACTORS: "Readers, communication and reports are actors too; each act has its cost.",
    REGISTERS: "Registers between actors: slots, bytes of one slot on a rank, readers.",
    BUFFERS: "Results that are written over tensors which nobody reads any more.",
    ORDER: "Collectives in the order in which every rank of their group issues them.",
}
# bytes over all ranks of a group of p, where T are the bytes that the group shares (table 2)
FORMULAS: Mapping[str, str] = {
    ALL_REDUCE: "2 (p - 1) T",
    EXCHANGE: "p (p - 1) T",
    REDUCE_SCATTER: "(p - 1) T",
    ALL_GATHER: "(p - 1) T",
    ALL_TO_ALL: "(p - 1) T / p",
}


def level_report(job: Job, level: str) -> str:
    """Print a level of a job's compiler: what it adds, the passes that lead to it, its text."""
    passes = [each.__name__ for each in TRAINING.get(level) or PLAN_PASSES.get(level, ())]
    lines = [f"{level}: {EXPLAINED[level]}"]
    lines += [f"passes: {', '.join(passes)}"] if passes else []
    return "\n".join((*lines, "", *(list(_lines(job, level)) or ["(none)"]))).rstrip()


def check_level(level: str) -> None:
    """Raise RecipeError for a name that is none of EXPLAINED."""
    if level not in EXPLAINED:
        *names, last = EXPLAINED
        instead = f"Choose {', '.join(names)} or {last}."
        raise RecipeError("--level", f"there is no level {level!r}.", instead)


def _lines(job: Job, level: str) -> Iterator[str]:
    if level == RECIPE:
        yield job.recipe.text
    elif level in LEVELS:
        yield str(advance(job.plans.captured, job.strategy, level))
    elif level in (REGIONS, ACTORS):
        plan = lower(advance(job.plans.captured, job.strategy, BOXED), job.strategy, level)
        yield from _actors(plan)
    else:
        yield from FINISHED[level](job.training.plan)


def _actors(plan: Plan) -> Iterator[str]:
    """Actors and their work, with costs where they are known."""
    costs = {actor.name: list(_costs(plan, actor)) for actor in plan.actors}
    for line in plan.lines():
        yield line
        words = line.split()
        if words[0] == "actor":
            yield from costs[plan.actors[int(words[1])].name]


def _costs(plan: Plan, actor: Actor) -> Iterator[str]:
    if not actor.seconds:
        return
    yield f"      takes {seconds(actor.seconds)}"
    if isinstance(actor.work, BoxWork) and actor.sent_bytes:
        yield f"      sends {_formula(plan, actor, actor.work)}"
    elif actor.kind == SEND:
        yield f"      sends {actor.sent_bytes:,.0f} bytes"


def _formula(plan: Plan, actor: Actor, work: BoxWork) -> str:
    """Bytes of a collective over all ranks of the stage: formula and number."""
    grid = plan.placements[actor.stage].shape
    parts = grid[work.step.axis]
    shared = 0
    for step, move in zip(work.steps, work.moves, strict=True):
        whole = replace_axis(move.source.nd_sbp, step.axis, B)
        shared += math.prod(largest_shape(move.shape, whole, grid)) * move.dtype.itemsize
    groups = len(plan.placements[actor.stage].ranks) // parts
    many = f" in each of {groups} groups" if groups > 1 else ""
    return (
        f"{FORMULAS[work.step.kind]} = {actor.sent_bytes:,.0f} bytes: "
        f"p = {parts} ranks{many}, T = {shared:,} bytes"
    )


def _buffers(plan: Plan) -> Iterator[str]:
    for actor in plan.actors:
        if isinstance(actor.work, RegionWork) and actor.work.overwrites:
            yield f"actor {actor.id} {actor.name} (stage {actor.stage})"
            for made, over in actor.work.overwrites:
                yield f"  %{made} is written over %{over}"


def _order(plan: Plan) -> Iterator[str]:
    for (stage, axis), acts in plan.order:
        yield f"stage {stage}, axis {plan.axes[axis]}"
        for actor, act in acts:
            yield f"  actor {actor} {plan.actors[actor].name}, act {act}"


FINISHED: Mapping[str, Callable[[Plan], Iterator[str]]] = {
    REGISTERS: Plan.lines,
    BUFFERS: _buffers,
    ORDER: _order,
}
