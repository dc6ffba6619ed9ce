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

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph, LogicalTensor, Ref, Variable
from flowrun.engine.ops.flow.scaling import NOT_FINITE
from flowrun.engine.ops.flow.update import ACCUMULATE, ADD_N, SUMSQ
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.shapes.create import FULL
from flowrun.engine.passes.update.clip_ops import (
    add_up_stages,
    clip_by_value,
    clip_scale,
    sum_over_gradients,
    sum_over_stages,
)
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.passes.update.optimizer_ops import UpdateInputs, average, is_kept_narrow, update
from flowrun.engine.passes.update.scale_loss import (
    check_gradients,
    multiply,
    scale_tangent,
    unscale,
    unscale_squares,
)
from flowrun.engine.passes.update.sparse_ops import (
    choose_row_updates,
    collect_rows,
    densify_rows,
    is_made_of_rows,
    lookups_of,
)
from flowrun.engine.strategy import Strategy


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
    check = _check_scaled_gradients if is_scaled else _check_gradients
    scalars = check(builder, trained, summed, strategy)
    for v in trained:
        reads = scalars.with_gradient(summed[v.name], ids.get(v.name), v.stage)
        update(builder, strategy.optimizer, strategy.kept, v, reads)
        if strategy.optimizer.ema:
            average(builder, v, strategy.optimizer.ema, reads.skip)
    means = [
        (name, _mean(builder, name, tensor, strategy.micro_batches))
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


def _gradient_norm(builder: GraphBuilder, scalars: _Scalars) -> list[tuple[str, str]]:
    """Return the result `grad_norm`, on the stage of the loss, if a sum of squares exists."""
    if not scalars.squares:
        return []
    graph = builder.base
    stage = graph.producer[dict(graph.results)["loss"]].stage
    norm = builder.one("grad_norm", "aten.sqrt.default", (Ref(scalars.squares),), at=OpPlace(stage))
    return [("grad_norm", norm)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scalars:
    """Scalars of a step that its updates read.

    squares: sum of the squares of all gradients; None: nothing asks for it.  coefficients: stage ->
    what multiplies gradients first.  skips: stage -> whether its updates are left out.  step:
    number of the update; None: of the step.  results: numbers that the step reports, name ->
    tensor.
    """

    squares: str | None = None
    coefficients: Mapping[int, str] = field(default_factory=dict)
    skips: Mapping[int, str] = field(default_factory=dict)
    step: str | None = None
    results: tuple[tuple[str, str], ...] = ()

    def with_gradient(self, gradient: str, ids: str | None, stage: int) -> UpdateInputs:
        """Return what an update on a stage reads."""
        coefficient, skip = self.coefficients.get(stage), self.skips.get(stage)
        return UpdateInputs(gradient, ids, coefficient, skip, self.step)


def _check_gradients(
    builder: GraphBuilder, trained: list[Variable], gradients: dict[str, str], strategy: Strategy
) -> _Scalars:
    """Clip gradients, and see whether all are finite.

    One sum serves both.  It goes to every stage, which makes its own scalars of it: no stage waits
    for a second message.  Where the run ends at a step that is not finite, and nothing is clipped
    by the sum, a stage has the sum over itself and earlier stages, and does not wait for later
    ones: the first begins the next step while the last still makes gradients.
    """
    optimizer = strategy.optimizer
    if optimizer.clip_value:
        clip_by_value(builder, trained, gradients, optimizer.clip_value)
    if not trained or not (optimizer.clip_norm or strategy.skips_nonfinite):
        return _Scalars()
    stages = sorted({v.stage for v in trained})
    if optimizer.clip_norm or strategy.skips_alike:
        squares = sum_over_gradients(builder, SUMSQ, "sumsq", trained, gradients)
        seen = dict.fromkeys(stages, squares)
    else:
        totals = sum_over_stages(builder, SUMSQ, "sumsq", trained, gradients)
        seen = add_up_stages(builder, "sumsq", totals)
        squares = seen[stages[-1]]
    coefficients, skips = {}, {}
    for stage in stages:
        if optimizer.clip_norm:
            coefficients[stage] = clip_scale(builder, squares, optimizer.clip_norm, stage)
        if strategy.skips_nonfinite:
            name = f"skip@{stage}"
            bad = builder.tensor(name, LogicalTensor(name, (), torch.bool))
            builder.op(name, NOT_FINITE, (Ref(seen[stage]),), (), (bad,), OpPlace(stage))
            skips[stage] = bad
    return _Scalars(squares=squares, coefficients=coefficients, skips=skips)


def _check_scaled_gradients(
    builder: GraphBuilder, trained: list[Variable], gradients: dict[str, str], strategy: Strategy
) -> _Scalars:
    """Do the same to gradients that are multiples of the loss scale."""
    optimizer, stages = strategy.optimizer, {v.stage for v in trained}
    assert strategy.loss_scale is not None
    scaled = check_gradients(builder, trained, gradients, strategy.loss_scale)
    coefficient: str | None = scaled.inverse
    squares = unscale_squares(builder, scaled)
    if optimizer.clip_value:
        unscale(builder, trained, gradients, scaled.inverse)
        clip_by_value(builder, trained, gradients, optimizer.clip_value)
        coefficient = None
        if optimizer.clip_norm:
            squares = sum_over_gradients(builder, SUMSQ, "sumsq", trained, gradients, scaled.stage)
    if optimizer.clip_norm:
        clip, factor = clip_scale(builder, squares, optimizer.clip_norm, scaled.stage), coefficient
        coefficient = (
            multiply(builder, "coefficient", clip, factor, scaled.stage) if factor else clip
        )
    return _Scalars(
        squares=squares,
        coefficients=dict.fromkeys(stages, coefficient) if coefficient else {},
        skips=dict.fromkeys(stages, scaled.skip),
        step=scaled.step,
        results=scaled.results,
    )


def _check_patterns(strategy: Strategy, parameters: list[Variable]) -> None:
    """Raise RecipeError for a pattern that names no parameter; evaluation has no optimizer."""
    for group in strategy.optimizer.groups:
        if not any(group.matches(v.name) for v in parameters):
            names = ", ".join(v.name for v in parameters[:6])
            raise RecipeError(
                f"optim.groups.{group.pattern}",
                "no parameter matches this pattern.",
                f"Patterns match the names of the model's parameters, such as {names}.",
            )
    for pattern in strategy.kept.wide:
        if not any(fnmatchcase(v.name, pattern) for v in parameters):
            names = ", ".join(v.name for v in parameters[:6])
            raise RecipeError(
                "precision.keep_fp32",
                f"no parameter matches {pattern!r}.",
                f"Patterns match the names of the model's parameters, such as {names}.",
            )


def _make_tangent(builder: GraphBuilder, strategy: Strategy) -> bool:
    """Make the tangent of the loss, which the graph has as a feed, a constant on every stage that
    reads it.

    With loss scaling it becomes the loss scale, and the result is True.
    """
    value = 1.0 / strategy.micro_batches
    feeds = iter(lambda: builder.drop_feed("@tangent"), None)
    if strategy.loss_scale is not None:
        return scale_tangent(builder, list(feeds), strategy.loss_scale.start, value)
    for feed in feeds:
        builder.op(
            feed.tensor,
            FULL,
            ((), value),
            (("dtype", builder.tensors[feed.tensor].dtype),),
            (feed.tensor,),
            at=OpPlace(feed.stage, "loss", BACKWARD),
        )
    return False


def _accumulate(
    builder: GraphBuilder, parts: list[str], variable: Variable, strategy: Strategy
) -> str:
    """Sum a gradient over the micro-batches of a step, and its parts once a step, in the
    weight's dtype; of a weight that is kept narrow, in the gradient's.
    """
    total = _sum_parts(builder, parts, variable)
    own = builder.tensors[variable.tensor]
    narrow = is_kept_narrow(builder, variable, strategy.kept)
    if narrow or builder.tensors[total].dtype == own.dtype:
        return total
    return builder.one(
        f"wide/{variable.tensor}",
        CAST,
        (Ref(total),),
        (("dtype", own.dtype),),
        like=own,
        at=OpPlace.of(variable),
    )


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


def _mean(builder: GraphBuilder, name: str, tensor: str, micro_batches: int) -> str:
    """Return the mean of a scalar result over the micro-batches of the step."""
    source, like = builder.base.producer[tensor], builder.tensors[tensor]
    total = builder.one(
        f"{name}/sum", ACCUMULATE, (Ref(tensor),), (), like, OpPlace(source.stage, "loss", FORWARD)
    )
    args = (Ref(total), 1.0 / micro_batches)
    return builder.one(f"{name}/mean", "aten.mul.Tensor", args, (), like, OpPlace(source.stage))
