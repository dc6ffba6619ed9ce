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
    rewritten,
    trace,
)
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph, Variable
from flowrun.engine.ir.sbp import B, Broadcast
from flowrun.engine.lowering.lower import lower
from flowrun.engine.lowering.overwrite import overwrite
from flowrun.engine.passes.count_step import count_step
from flowrun.engine.passes.find_rows import find_rows
from flowrun.engine.passes.hoist_weights import hoist_weights
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.passes.layout.infer_sbp import infer_update
from flowrun.engine.passes.layout.pin_activations import matches_variable, names_field, with_pins
from flowrun.engine.passes.mirrored_view import mirror, rows_of_a_rank
from flowrun.engine.passes.search.search_sbp import assign_sbp
from flowrun.engine.passes.stages.chosen_stages import decided
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.pipeline import finish, lay_out
from flowrun.engine.rehearsal.rehearsal import Rehearsal, rehearse
from flowrun.engine.strategy import Optimizer, Pin, Strategy, Zero

EVALUATION = (
    find_rows,
    mirror,
    split_stages,
    update_ops,
    count_step,
    with_pins,
    assign_sbp,
    infer_update,
)  # passes of forward alone, up to the layout
NEARLY = 0.01  # so much slower is as good, of what is foreseen


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A plan with the order of its collectives fixed, and what was foreseen of it."""

    plan: Plan
    rehearsal: Rehearsal


def compile_training(task: Task, batch: Batch, strategy: Strategy) -> Rehearsed:
    """capture -> passes -> plan -> rehearsal.  batch: one micro-batch, whole.

    Raises RecipeError if a rank may need more than `hardware.memory_bytes`.
    """
    return planned_training(captured(task, batch, strategy), strategy)


def planned_training(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """captured -> passes -> plan -> rehearsal.

    Raises RecipeError if a rank may need more than `hardware.memory_bytes`.
    """
    found = finished(lay_out(graph, strategy), strategy)
    if missing_bytes(found, strategy):
        raise too_large(found, strategy)
    return found


def captured(task: Task, batch: Batch, strategy: Strategy) -> LogicalGraph:
    """What a rank, or all ranks together in the consistent view, compute of a micro-batch."""
    return rewritten(traced(task, batch, strategy), task)


def traced(task: Task, batch: Batch, strategy: Strategy) -> Traced:
    """The same, as torch captured it."""
    return trace(task, rows_of_a_rank(batch, strategy))


def finished(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """laid out -> plan -> rehearsal, whether or not it fits."""
    return rehearsed(finish(graph, strategy), strategy)


def rehearsed(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    """boxed -> plan -> rehearsal, whether or not it fits.

    in_flight "auto" is the most micro-batches in flight, up to zero bubble, that memory allows; in
    a pipeline the fewest that are as good as these.
    """
    if strategy.in_flight != "auto":
        return _rehearsed(graph, strategy)
    unlimited = held_micro_batches("auto", strategy.num_stages, 0, strategy.micro_batches, alone=2)
    most = unlimited

    @cache
    def holding(number: int) -> Rehearsed:
        in_flight = number if number < unlimited else "auto"
        return _rehearsed(graph, replace(strategy, in_flight=in_flight))

    def is_large(number: int) -> bool:
        return missing_bytes(holding(number), strategy) > 0

    def is_fast(number: int) -> bool:
        return holding(number).rehearsal.step_s <= as_good_as(holding(most).rehearsal.step_s)

    # the more in flight, the more bytes and the fewer seconds
    if is_large(most):
        most = max(1, bisect_left(range(1, most), True, key=is_large))
    pipeline = strategy.num_stages > 1
    return holding(1 + bisect_left(range(1, most), True, key=is_fast) if pipeline else most)


def as_good_as(step_s: float) -> float:
    """The longest step that is as good as this one."""
    return step_s * (1 + NEARLY)


def missing_bytes(found: Rehearsed, strategy: Strategy) -> int:
    """Of the rank that may need most; 0 where memory suffices, or is not limited."""
    limit = strategy.hardware.tensor_bytes
    return max(0, max(found.rehearsal.bound_bytes) - limit) if limit else 0


def too_large(found: Rehearsed, strategy: Strategy) -> RecipeError:
    """The error of a plan that lacks memory."""
    needed = found.rehearsal.bound_bytes
    stage = max(range(len(needed)), key=needed.__getitem__)
    limit = strategy.hardware.tensor_bytes
    return RecipeError(
        "hardware.memory_bytes",
        f"a rank of stage {stage} ({found.plan.placements[stage]}) needs {needed[stage]:,} bytes; "
        f"{limit:,} are there: {needed[stage] - limit:,} are missing.",
        "Use more micro-batches, a lower placement.in_flight, recompute.modules, more stages or"
        " ranks, or ZeRO; auto.placement=true looks for what fits.",
    )


def compile_evaluation(task: Task, batch: Batch, strategy: Strategy, training: Plan) -> Rehearsed:
    """Forward alone, in eval mode, with every weight where training keeps it."""
    return planned_evaluation(captured_evaluation(task, batch, strategy), strategy, training)


def captured_evaluation(task: Task, batch: Batch, strategy: Strategy) -> LogicalGraph:
    """What a rank, or all ranks together in the consistent view, evaluate of a micro-batch."""
    return capture_evaluation(task, rows_of_a_rank(batch, strategy))


def planned_evaluation(graph: LogicalGraph, strategy: Strategy, training: Plan) -> Rehearsed:
    """captured -> passes -> plan -> rehearsal, by the layout that training has."""
    follow = _following(strategy, training)
    for rewrite in EVALUATION:
        graph = rewrite(graph, follow)
    homes = {v.name: v.nd_sbp for v in training.graph.variables}
    variables = tuple(replace(v, nd_sbp=homes.get(v.name, v.nd_sbp)) for v in graph.variables)
    graph = replace(graph, variables=variables)
    return _rehearsed(insert_boxing(hoist_weights(graph, follow), follow), follow)


def _rehearsed(graph: LogicalGraph, strategy: Strategy) -> Rehearsed:
    plan = lower(graph, strategy)
    if strategy.overwrites:
        plan = overwrite(plan)
    rehearsal = rehearse(plan)
    return Rehearsed(replace(plan, order=rehearsal.order), rehearsal)


def _following(strategy: Strategy, training: Plan) -> Strategy:
    """The strategy with stages and homes as training decided them, as they were before ZeRO."""
    graph = training.graph
    pins = [
        pin
        for pin in strategy.pins
        if pin.where != "variable" or any(names_field(pin, feed) for feed in graph.feeds)
    ]
    for v in graph.variables:
        if v.kind == "state":
            continue
        for axis, sbp in zip(strategy.axes, v.nd_sbp, strict=True):
            sharded = axis == strategy.zero.axis and not isinstance(sbp, Broadcast)
            pins.append(
                Pin(
                    _literal(v.name),
                    "variable",
                    axis,
                    B if sharded and not _pinned(strategy, v, axis) else sbp,
                )
            )
    return replace(
        strategy,
        decided=decided(graph),
        stage_modules=(),
        chunks=1,
        pins=tuple(pins),
        zero=Zero(),
        optimizer=Optimizer(),
        overwrites=True,
        fusion="",
    )


def _pinned(strategy: Strategy, variable: Variable, axis: str) -> bool:
    return any(pin.axis == axis and matches_variable(pin, variable) for pin in strategy.pins)


def _literal(name: str) -> str:
    """A pattern that matches the name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
