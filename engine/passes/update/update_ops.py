"""update_ops: staged -> trained.  Accumulation, clipping and the optimizer join the graph as ops.

For every parameter: accumulate its gradient over the micro-batches (flow.accumulate; the rows of
an embedding table are collected, update/sparse_ops.py), clip it by value and all together by their
global norm (update/clip_ops.py), then update (update/optimizer_ops.py), unless the norm says that a
gradient is not finite: then nothing changes, on any rank (or on its stage and those after it, where
the run ends there).  Their layout follows by the same rules as any other op's; ZeRO, and clipping
under tensor parallelism and stages, need nothing else.  The loss of a step is the mean over its
micro-batches: each micro-batch's tangent is 1 / micro_batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph, Ref, Variable
from flowrun.engine.ir.names import ROWS
from flowrun.engine.ops.flow.sparse import COLLECT
from flowrun.engine.ops.flow.update import ACCUMULATE, ADD_N
from flowrun.engine.ops.shapes.create import FULL
from flowrun.engine.passes.update.clip_ops import Scalars, check_gradients
from flowrun.engine.passes.update.frozen_steps import count_own_steps, either, freeze_first
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.passes.update.optimizer_ops import UpdateInputs, average, is_kept_narrow, update
from flowrun.engine.passes.update.scale_loss import check_scaled_gradients, scale_tangent
from flowrun.engine.passes.update.sparse_ops import (
    choose_row_updates,
    collect_rows,
    densify_rows,
    is_made_of_rows,
    lookups_of,
)
from flowrun.engine.strategy import Optimizer, Strategy


def update_ops(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Add accumulators, clipping, updates, optimizer states, and the step's mean loss."""
    builder = GraphBuilder(graph)
    gradients: dict[str, list[str]] = {}  # parameter -> its gradient, in parts if tied over stages
    for name, tensor in graph.results:
        if name.startswith("grad/"):
            gradients.setdefault(name.removeprefix("grad/"), []).append(tensor)
    trained = [v for v in graph.variables if v.name in gradients]
    _check_patterns(strategy, [v for v in graph.variables if v.kind == "parameter"])
    is_scaled = _make_tangent(builder, strategy) and trained
    summed: dict[str, str] = {}
    ids: dict[str, str] = {}  # table that is updated by rows -> its ids
    for v in trained:
        rows, summed[v.name] = _sum_gradient(builder, v, gradients[v.name], strategy)
        if rows is not None:
            ids[v.name] = rows
    frozen = freeze_first(builder, trained, summed, strategy)
    check = check_scaled_gradients if is_scaled else check_gradients
    scalars = check(builder, trained, summed, strategy)
    for v in trained:
        coefficient, skip = scalars.coefficients.get(v.stage), scalars.skips.get(v.stage)
        skip = either(builder, v, frozen.get(v.name), skip)
        step = count_own_steps(builder, v, strategy, scalars.step)
        reads = UpdateInputs(summed[v.name], ids.get(v.name), coefficient, skip, step)
        update(builder, strategy.optimizer, strategy.kept, v, reads)
        if strategy.optimizer.ema:
            average(builder, v, strategy.optimizer.ema, skip)
    builder.notes += _describe(strategy.optimizer, trained)
    means = [
        (name, _mean(builder, name, tensor, strategy))
        for name, tensor in graph.results
        if not name.startswith("grad/")
    ]
    return builder.graph((*means, *_gradient_norm(builder, scalars), *scalars.results))


def _sum_gradient(
    builder: GraphBuilder, v: Variable, parts: list[str], strategy: Strategy
) -> tuple[str | None, str]:
    """Return (ids of the rows of a table that is updated by rows, else None; the summed
    gradient).
    """
    graph = builder.base
    lookups = lookups_of(graph, v, parts)
    by_rows, note = choose_row_updates(graph, v, lookups, strategy)
    if is_kept_narrow(builder, v, strategy.kept):
        return None, _accumulate(builder, parts, v, strategy)
    builder.notes += [note] if note else []
    if by_rows:
        return collect_rows(builder, v, lookups, strategy.micro_batches)
    if is_made_of_rows(graph, v, lookups, strategy):
        return None, densify_rows(builder, v, lookups[0], strategy.micro_batches)
    return None, _accumulate(builder, parts, v, strategy)


def _gradient_norm(builder: GraphBuilder, scalars: Scalars) -> list[tuple[str, str]]:
    """Return the result `grad_norm`, on the stage of the loss, if a sum of squares exists."""
    if not scalars.squares:
        return []
    graph = builder.base
    stage = graph.producer[dict(graph.results)["loss"]].stage
    norm = builder.one("grad_norm", "aten.sqrt.default", (Ref(scalars.squares),), at=OpPlace(stage))
    return [("grad_norm", norm)]


def _check_patterns(strategy: Strategy, parameters: list[Variable]) -> None:
    """Raise RecipeError for a pattern that names no parameter; evaluation has no optimizer."""
    names = [v.name for v in parameters]
    asked = [
        (f"optim.groups.{group.pattern}", group.pattern) for group in strategy.optimizer.groups
    ]
    asked += [("precision.keep_fp32", pattern) for pattern in strategy.kept.wide]
    for key, pattern in asked:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                key,
                f"no parameter matches {pattern!r}.",
                "Patterns match the names of the model's parameters, such as"
                f" {', '.join(names[:6])}.",
            )


def _describe(optimizer: Optimizer, trained: Sequence[Variable]) -> list[str]:
    """Return a note that says which parameters have which update, if there are several."""
    updates: dict[str, list[str]] = {}
    for v in trained:
        updates.setdefault(optimizer.update_of(v.name).name, []).append(v.name)
    if len(updates) < 2:
        return []
    each = (
        f"{name} of {len(of)} parameters ({', '.join(of[:2])}{', …' if len(of) > 2 else ''})"
        for name, of in updates.items()
    )
    return [f"updates: {', '.join(each)}"]


def _make_tangent(builder: GraphBuilder, strategy: Strategy) -> bool:
    """Make the tangent of the loss, which the graph has as a feed, a constant on every stage that
    reads it.

    With loss scaling it becomes the loss scale, and the result is True.
    """
    value = 1.0 / strategy.micro_batches
    feeds = [feed for feed in builder.feeds.values() if feed.field == "@tangent"]
    for feed in feeds:
        del builder.feeds[feed.tensor]
    if strategy.loss_scale is not None:
        return scale_tangent(builder, feeds, strategy.loss_scale.start, value)
    for feed in feeds:
        dtype, at = builder.tensors[feed.tensor].dtype, OpPlace(feed.stage, "loss", BACKWARD)
        builder.op(feed.tensor, FULL, ((), value), (("dtype", dtype),), (feed.tensor,), at=at)
    return False


def _accumulate(
    builder: GraphBuilder, parts: list[str], variable: Variable, strategy: Strategy
) -> str:
    """Sum a gradient over the micro-batches of a step, and its parts once a step, in the
    weight's dtype; of a weight that is kept narrow, in the gradient's.
    """
    total = _sum_parts(builder, parts, variable)
    if is_kept_narrow(builder, variable, strategy.kept):
        return total
    dtype = builder.tensors[variable.tensor].dtype
    return builder.cast(f"wide/{variable.tensor}", total, dtype, OpPlace.of(variable))


def _sum_parts(builder: GraphBuilder, parts: list[str], variable: Variable) -> str:
    name = f"grad/{variable.tensor}"
    if len(parts) == 1:
        return _sum(builder, parts[0], name)
    sums = [
        _sum(builder, part, f"grad@{builder.base.producer[part].stage}/{variable.tensor}")
        for part in parts
    ]
    return builder.one(
        name, ADD_N, tuple(map(Ref, sums)), like=builder.tensors[parts[0]], at=OpPlace.of(variable)
    )


def _sum(builder: GraphBuilder, tensor: str, name: str) -> str:
    """Sum a tensor over the micro-batches of a step, on the stage where the tensor is made."""
    source = builder.base.producer[tensor]
    return builder.one(
        name,
        ACCUMULATE,
        (Ref(tensor),),
        like=builder.tensors[tensor],
        at=OpPlace(source.stage, source.module, BACKWARD),
    )


def _mean(builder: GraphBuilder, name: str, tensor: str, strategy: Strategy) -> str:
    """Return the mean of a scalar result over the micro-batches of the step, or all its rows."""
    if name.startswith(ROWS):
        return _gather(builder, name, tensor, strategy)
    source, like = builder.base.producer[tensor], builder.tensors[tensor]
    total = builder.one(
        f"{name}/sum", ACCUMULATE, (Ref(tensor),), (), like, OpPlace(source.stage, "loss", FORWARD)
    )
    args = (Ref(total), 1.0 / strategy.micro_batches)
    return builder.one(f"{name}/mean", "aten.mul.Tensor", args, (), like, OpPlace(source.stage))


def _gather(builder: GraphBuilder, name: str, tensor: str, strategy: Strategy) -> str:
    """Return the rows of a result of all micro-batches of the step, in any order."""
    like, stage = builder.tensors[tensor], builder.base.producer[tensor].stage
    at, (count, width) = OpPlace(stage, "loss", FORWARD), like.shape
    each = replace(like, shape=(count,), dtype=torch.int64)
    some = builder.one(f"{name}/some", "aten.argmax.default", (Ref(tensor), 1), (), each, at)
    total = count * strategy.micro_batches
    ids = builder.tensor(f"{name}/ids", replace(each, shape=(total,)))  # which nobody reads
    rows = builder.tensor(f"{name}/all", replace(like, shape=(total, width)))
    builder.op(f"{name}/collect", COLLECT, (Ref(tensor), Ref(some)), (), (ids, rows), at=at)
    return rows
