"""compile: a task and a strategy -> the training plan and the evaluation plan, both rehearsed.

`Compilation` is the story that a run goes through; launcher/job/job_plans.py says which process
makes which part.  The functions after it are its parts, for those who have a graph already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from flowrun.engine.actors.communicators import communicators_of
from flowrun.engine.actors.plan import Plan
from flowrun.engine.actors.schedules import schedule_of
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
from flowrun.engine.passes.layout.long_attention import LONG_ATTENTION, open_ways
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


# (kind, strategy, captured graphs that it is made of, plans them) -> the plan, maybe made before
Keep = Callable[[str, Strategy, tuple[LogicalGraph, ...], Callable[[], Rehearsed]], Rehearsed]


@dataclass(frozen=True)
class Compilation:
    """One task compiled under one strategy; each part is made when it is first asked for.

    batch: one micro-batch of all ranks.  strategy: what the recipe asks of the compiler.  keep:
    where plans may come from; None makes each.
    """

    task: Task
    batch: Batch
    strategy: Strategy
    keep: Keep | None = None

    @cached_property
    def traced(self) -> Traced:
        """A step as torch captured it: of a rank's samples in the mirrored view, else of all."""
        return trace(self.task, rows_of_a_rank(self.batch, self.strategy))

    @cached_property
    def captured(self) -> LogicalGraph:
        """The step in the engine's own ops."""
        return rewrite_trace(self.traced, self.task)

    @cached_property
    def training(self) -> Rehearsed:
        """The plan of a training step.  Raises RecipeError if a rank may need more than
        `hardware.memory_bytes`.
        """
        graph = self.captured
        return self._keep("training", (graph,), lambda: plan_training(graph, self.strategy))

    def capture_evaluation(self) -> LogicalGraph:
        """Capture forward alone, in eval mode."""
        return capture_evaluation(self.task, rows_of_a_rank(self.batch, self.strategy))

    def evaluation(self, graph: LogicalGraph, training: Rehearsed | None = None) -> Rehearsed:
        """Plan a captured evaluation, `graph`, with every weight where training keeps it.

        training: a plan that was not made here, such as that of a search; it is not kept.
        """
        if training:
            return plan_evaluation(graph, self.strategy, training.plan)
        plan = self.training.plan
        made_of = (self.captured, graph)  # the layout to follow is made of training's graph
        return self._keep(
            "evaluation", made_of, lambda: plan_evaluation(graph, self.strategy, plan)
        )

    def under(self, strategy: Strategy) -> Compilation:
        """The same task, as it was captured, under another strategy."""
        _ = self.captured
        other = replace(self, strategy=strategy)
        vars(other).update(traced=self.traced, captured=self.captured)
        return other

    def _keep(
        self, kind: str, graphs: tuple[LogicalGraph, ...], make: Callable[[], Rehearsed]
    ) -> Rehearsed:
        return self.keep(kind, self.strategy, graphs, make) if self.keep else make()


def plan_training(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """Plan a captured graph, and rehearse it.

    Raises RecipeError if a rank may need more than `hardware.memory_bytes`.
    """
    planned = _plan_fastest(
        graph, strategy, lambda each: plan_laid_out(advance(graph, each, LAID_OUT), each)
    )
    if missing_bytes(planned, strategy):
        raise memory_error(planned, strategy)
    validate(planned.plan, made_by="rehearse")
    return planned


def _plan_fastest(
    graph: LogicalGraph, strategy: Strategy, make: Callable[[Strategy], Rehearsed]
) -> Rehearsed:
    """Plan each way of attention that the strategy leaves open; return the fastest that fits.

    make: plans the graph under a strategy.
    """
    planned: dict[str, Rehearsed] = {}
    for way in open_ways(graph, strategy):
        try:
            planned[way] = make(replace(strategy, long_attention=way))
        except RecipeError as error:
            if error.where != LONG_ATTENTION:
                raise
    if not planned:
        return make(strategy)
    seconds = {way: each.rehearsal.step_s for way, each in planned.items()}
    best = min(planned, key=lambda way: (missing_bytes(planned[way], strategy) > 0, seconds[way]))
    foreseen = ", ".join(f"{way} {each:.3g} s" for way, each in seconds.items())
    note = f"attention where lengths are divided: {best}; a step is foreseen as {foreseen}"
    plan = planned[best].plan
    return replace(planned[best], plan=replace(plan, notes=(*plan.notes, note)))


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
    most = unlimited = schedule_of(strategy).slots(0, alone=2)

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


def missing_bytes(planned: Rehearsed, strategy: Strategy) -> int:
    """Bytes that the fullest rank lacks; 0 if memory suffices or is not limited."""
    limit = strategy.hardware.tensor_bytes
    return max(0, max(_needed_bytes(planned, strategy)) - limit) if limit else 0


def _needed_bytes(planned: Rehearsed, strategy: Strategy) -> list[int]:
    """Return the most bytes that a rank of each stage may need, with its communicators."""
    each = int(strategy.hardware.communicator_bytes)
    bounds = enumerate(planned.rehearsal.bound_bytes)
    return [bound + each * len(communicators_of(planned.plan, stage)) for stage, bound in bounds]


def memory_error(planned: Rehearsed, strategy: Strategy) -> RecipeError:
    """Return the error for a plan that lacks memory."""
    needed = _needed_bytes(planned, strategy)
    stage = max(range(len(needed)), key=needed.__getitem__)
    limit = strategy.hardware.tensor_bytes
    more = needed[stage] - planned.rehearsal.bound_bytes[stage]
    names = ", ".join(communicators_of(planned.plan, stage))
    for_groups = f"({more:,} of them for the communicators {names}) " if more else ""
    return RecipeError(
        "hardware.memory_bytes",
        f"a rank of stage {stage} ({planned.plan.placements[stage]}) needs {needed[stage]:,} bytes "
        f"{for_groups}and has {limit:,}: {needed[stage] - limit:,} are missing.",
        "Use more micro-batches, a lower placement.in_flight, recompute.modules, more stages or"
        " ranks, or ZeRO; auto.placement=true looks for what fits.",
    )


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
    planned = _plan_fastest(
        graph,
        follow,
        lambda each: lower_and_rehearse(advance(graph, each, BOXED, EVALUATION), each),
    )
    validate(planned.plan, made_by="rehearse")
    return planned


def lower_and_rehearse(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    plan = lower(graph, strategy)
    log_pass(rehearse.__name__)
    rehearsal = rehearse(plan)
    return Rehearsed(rehearsal.fix(plan), rehearsal)
