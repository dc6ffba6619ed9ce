"""`flowrun plan --level NAME`: one level of the compiler as text, from the recipe to the order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from flowrun.engine.actors import plan as plans
from flowrun.engine.actors.plan import Actor, BoxWork, Plan, RegionWork
from flowrun.engine.boxing import boxing
from flowrun.engine.ir import graph
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import B
from flowrun.engine.pipeline import PLAN_PASSES, TRAINING, advance, lower
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.recipe_errors import one_of, require
from flowrun.launcher.terminal.units import seconds

RECIPE = "recipe"
EXPLAINED: Mapping[str, str] = {
    RECIPE: "All keys of the run: defaults, then the recipe, then the command line.",
    graph.CAPTURED: "Ops of one micro-batch, forward and backward, as if there were one device.",
    graph.STAGED: "Every op has a stage, the group of ranks that runs it.",
    graph.TRAINED: "Accumulation, clipping and the optimizer are ops too.",
    graph.LAID_OUT: "Weights have homes; forward and backward have signatures: inputs -> outputs.",
    graph.SIGNED: "ZeRO and recomputation are in; ops of the update have signatures as well.",
    graph.BOXED: "Boxing ops stand where layouts or stages meet: all communication there is.",
    plans.REGIONS: "Ops that run with no communication between them are one actor, one program.",
    plans.ACTORS: "Readers, communication and reports are actors too; each act has its cost.",
    plans.REGISTERS: "Registers between actors: slots, bytes of one slot on a rank, readers.",
    plans.BUFFERS: "Results that are written over tensors which nobody reads any more.",
    plans.ORDER: "Collectives in the order in which every rank of their group issues them.",
}
# bytes over all ranks of a group of p, where T are the bytes that the group shares (table 2)
FORMULAS: Mapping[str, str] = {
    boxing.ALL_REDUCE: "2 (p - 1) T",
    boxing.EXCHANGE: "p (p - 1) T",
    boxing.REDUCE_SCATTER: "(p - 1) T",
    boxing.ALL_GATHER: "(p - 1) T",
    boxing.ALL_TO_ALL: "(p - 1) T / p",
    boxing.TURN: "T",
    boxing.SWAP: "T / 2",
}


def level_report(job: Job, level: str) -> str:
    """Print a level of a job's compiler: what it adds, the passes that lead to it, its text."""
    passes = [each.__name__ for each in TRAINING.get(level) or PLAN_PASSES.get(level, ())]
    lines = [f"{level}: {EXPLAINED[level]}"]
    lines += [f"passes: {', '.join(passes)}"] if passes else []
    return "\n".join((*lines, "", *(list(_lines(job, level)) or ["(none)"]))).rstrip()


def check_level(level: str) -> None:
    instead = f"Choose {one_of(EXPLAINED)}."
    require(level in EXPLAINED, "--level", f"there is no level {level!r}.", instead)


def _lines(job: Job, level: str) -> Iterator[str]:
    if level == RECIPE:
        yield job.recipe.text
    elif level in graph.LEVELS:
        yield str(advance(job.plans.captured, job.strategy, level))
    elif level in (plans.REGIONS, plans.ACTORS):
        plan = lower(advance(job.plans.captured, job.strategy, graph.BOXED), job.strategy, level)
        yield from _actors(plan)
    else:
        yield from FINISHED[level](job.training.plan)


def _actors(plan: Plan) -> Iterator[str]:
    """Actors and their work, with costs where they are known."""
    for line in plan.lines():
        yield line
        words = line.split()
        if words[0] == "actor" and (actor := plan.actors[int(words[1])]).seconds:
            yield f"      takes {seconds(actor.seconds)}"
            if isinstance(actor.work, BoxWork) and actor.sent_bytes:
                yield f"      sends {_formula(plan, actor, actor.work)}"
            elif actor.kind == plans.SEND:
                yield f"      sends {actor.sent_bytes:,.0f} bytes"


def _formula(plan: Plan, actor: Actor, work: BoxWork) -> str:
    """Bytes of a collective over all ranks of the stage: formula and number."""
    grid = plan.placements[actor.stage].shape
    parts = grid[work.step.axis]
    shared = 0
    for step, move in zip(work.steps, work.moves, strict=True):
        whole = boxing.replace_axis(move.source.nd_sbp, step.axis, B)
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
        yield f"stage {stage}, {plan.queues[axis]}"
        for actor, act in acts:
            yield f"  actor {actor} {plan.actors[actor].name}, act {act}"


FINISHED: Mapping[str, Callable[[Plan], Iterator[str]]] = {
    plans.REGISTERS: Plan.lines,
    plans.BUFFERS: _buffers,
    plans.ORDER: _order,
}
