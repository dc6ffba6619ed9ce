"""compile: a task and a strategy -> the training plan and the evaluation plan, both rehearsed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache

from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.schedules import held_micro_batches
from flowrun.engine.capture.capture import (
    Batch,
    Task,
    Traced,
    capture_evaluation,
    rewrite_trace,
    trace,
)
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BOXED, LAID_OUT, STAGED, LogicalGraph
from flowrun.engine.passes.count_step import count_step, find_step_results
from flowrun.engine.passes.mirrored_view import rows_of_a_rank
from flowrun.engine.passes.stages.follow_training import follow_training
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.pipeline import EVALUATION, advance, log_pass, lower
from flowrun.engine.rehearsal.rehearsal import Rehearsal, rehearse
from flowrun.engine.strategy import Strategy
from flowrun.engine.verify.plan_rules import validate

STEP_TIME_TOLERANCE = 0.01  # plans within 1 % of the fastest count as equal


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A plan with the order of its collectives fixed, and what was foreseen of it."""

    plan: Plan
    rehearsal: Rehearsal


def compile_training(task: Task, batch: Batch, strategy: Strategy) -> Rehearsed:
    """Capture a task, plan it, and rehearse the plan.

    batch: one micro-batch of all ranks.  strategy: what the recipe asks of the compiler.  Raises
    RecipeError if a rank may need more than `hardware.memory_bytes`.
    """
    return plan_training(capture_rows(task, batch, strategy), strategy)


def plan_training(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """Plan a captured graph, and rehearse it.

    Raises RecipeError if a rank may need more than `hardware.memory_bytes`.
    """
    found = plan_laid_out(advance(graph, strategy, LAID_OUT), strategy)
    if missing_bytes(found, strategy):
        raise memory_error(found, strategy)
    validate(found.plan, made_by="rehearse")
    return found


def capture_rows(task: Task, batch: Batch, strategy: Strategy) -> LogicalGraph:
    """Capture a step on one micro-batch: of a rank in the mirrored view, else of all ranks.

    task, batch, strategy: as for compile_training.
    """
    return rewrite_trace(trace_rows(task, batch, strategy), task)


def trace_rows(task: Task, batch: Batch, strategy: Strategy) -> Traced:
    """Return what torch captured, not rewritten yet; task, batch, strategy: as for capture_rows."""
    return trace(task, rows_of_a_rank(batch, strategy))


def plan_laid_out(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """Plan a graph of level laid_out, and rehearse it, whether or not it fits in memory."""
    return plan_boxed(advance(graph, strategy, BOXED), strategy)


def plan_boxed(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """Plan a boxed graph, and rehearse it, whether or not it fits in memory.

    in_flight "auto" is the most micro-batches in flight, up to zero bubble, that memory allows; in
    a pipeline the fewest that are as good as these.
    """
    if strategy.in_flight != "auto":
        return lower_and_rehearse(graph, strategy)
    unlimited = held_micro_batches("auto", strategy.num_stages, 0, strategy.micro_batches, alone=2)
    most = unlimited

    @cache
    def holding(number: int) -> Rehearsed:
        in_flight = number if number < unlimited else "auto"
        return lower_and_rehearse(graph, replace(strategy, in_flight=in_flight))

    def is_large(number: int) -> bool:
        return missing_bytes(holding(number), strategy) > 0

    def is_fast(number: int) -> bool:
        limit = longest_equal_step(holding(most).rehearsal.step_s)
        return holding(number).rehearsal.step_s <= limit

    # the more in flight, the more bytes and the fewer seconds
    if is_large(most):
        most = max(1, bisect_left(range(1, most), True, key=is_large))
    staged = strategy.num_stages > 1
    return holding(1 + bisect_left(range(1, most), True, key=is_fast) if staged else most)


def longest_equal_step(step_s: float) -> float:
    """Seconds of the longest step that counts as equal to one of `step_s` seconds."""
    return step_s * (1 + STEP_TIME_TOLERANCE)


def missing_bytes(found: Rehearsed, strategy: Strategy) -> int:
    """Bytes that the fullest rank lacks; 0 if memory suffices or is not limited."""
    limit = strategy.hardware.tensor_bytes
    return max(0, max(found.rehearsal.bound_bytes) - limit) if limit else 0


def memory_error(found: Rehearsed, strategy: Strategy) -> RecipeError:
    """Return the error for a plan that lacks memory."""
    needed = found.rehearsal.bound_bytes
    stage = max(range(len(needed)), key=needed.__getitem__)
    limit = strategy.hardware.tensor_bytes
    return RecipeError(
        "hardware.memory_bytes",
        f"a rank of stage {stage} ({found.plan.placements[stage]}) needs {needed[stage]:,} bytes "
        f"and has {limit:,}: {needed[stage] - limit:,} are missing.",
        "Use more micro-batches, a lower placement.in_flight, recompute.modules, more stages or"
        " ranks, or ZeRO; auto.placement=true looks for what fits.",
    )


def compile_evaluation(task: Task, batch: Batch, strategy: Strategy, training: Plan) -> Rehearsed:
    """Compile forward alone, in eval mode, with every weight where training keeps it.

    training: the plan to follow.  task, batch and strategy as for compile_training.
    """
    return plan_evaluation(capture_evaluation_rows(task, batch, strategy), strategy, training)


def capture_evaluation_rows(task: Task, batch: Batch, strategy: Strategy) -> LogicalGraph:
    """Capture the evaluation of one micro-batch: of a rank in the mirrored view, else of all.

    task, batch, strategy: as for compile_training.
    """
    return capture_evaluation(task, rows_of_a_rank(batch, strategy))


def step_results(graph: LogicalGraph, strategy: Strategy) -> frozenset[str]:
    """Return the results of a captured evaluation that are those of the whole step, not means over
    micro-batches.
    """
    staged = advance(graph, strategy, STAGED, EVALUATION)
    return find_step_results(count_step(update_ops(staged, strategy), strategy))


def plan_evaluation(graph: LogicalGraph, strategy: Strategy, training: Plan) -> Rehearsed:
    """Plan a captured evaluation, `graph`, in the layout of the training plan.

    strategy: that of training.
    """
    follow = follow_training(strategy, training.graph)
    found = lower_and_rehearse(advance(graph, follow, BOXED, EVALUATION), follow)
    validate(found.plan, made_by="rehearse")
    return found


def lower_and_rehearse(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    plan = lower(graph, strategy)
    log_pass(rehearse.__name__)
    rehearsal = rehearse(plan)
    return Rehearsed(replace(plan, order=rehearsal.order), rehearsal)
