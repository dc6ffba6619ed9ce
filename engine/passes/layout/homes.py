"""The choices on one axis: the rows of an op, and the homes of a batch field or variable.

These conventions need no words in a recipe.  On an axis of the batch (BATCH_AXES, or the ZeRO axis)
a batch field enters split along dim 0, on an axis of the length (LENGTH_AXES) along dim 1, on any
other axis whole.  A weight that no pin names is free, and B on axes of the batch and the length; a
buffer that never changes is B.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrun.engine.ir.graph import Feed, Op, Variable
from flowrun.engine.ir.placement import BATCH_AXES, LENGTH_AXES, Shape, divide_samples
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import Signature, owned_rows
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow.structure import PIN
from flowrun.engine.passes.layout.long_attention import rows_of_attention
from flowrun.engine.strategy import Strategy


def feed_home(strategy: Strategy, axis: int, feed: Feed, shape: Shape) -> Sbp:
    """Return the SBP in which a batch field enters, on one axis.

    shape: what the axes before left of it.  Raises RecipeError if the samples do not divide over
    the ranks.
    """
    name, parts = strategy.axes[axis], strategy.parts(feed.stage, axis)
    if pinned := dict(feed.pinned).get(name):
        return pinned
    if name in LENGTH_AXES:
        return S(1) if len(shape) > 1 and shape[1] >= parts > 1 else B
    batched = name in BATCH_AXES or name == strategy.zero.axis
    if not batched or parts == 1 or not shape:
        return B
    divide_samples(name, shape[0], parts)
    return S(0)


def variable_homes(
    strategy: Strategy, axis: int, variable: Variable, shape: Shape, *, on_batch_axes: bool = False
) -> list[Sbp]:
    """Return the SBPs that may be chosen as the home of a variable, on one axis.

    shape: what the axes before left of it.  on_batch_axes: a weight may be split there, too.
    """
    name, parts = strategy.axes[axis], strategy.parts(variable.stage, axis)
    if parts == 1:
        return [B]
    if pinned := dict(variable.pinned).get(name):
        return [pinned]
    constant = variable.kind == "buffer" and variable.new is None
    if constant or (name in BATCH_AXES + LENGTH_AXES and not on_batch_axes):
        return [B]
    return [B, *(S(i) for i, size in enumerate(shape) if size >= parts)]


def rows_on_axis(
    strategy: Strategy,
    op: Op,
    axis: int,
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape | None],
) -> Sequence[Signature]:
    """Return the legal rows of an op on one axis.

    in_shapes, out_shapes: what the axes before left of the op's inputs and outputs.
    """
    parts = strategy.parts(op.stage, axis)
    if op.target == PIN and parts > 1:
        wanted = dict(op.args[1]).get(strategy.axes[axis])
        splits = (S(i) for i, size in enumerate(in_shapes[0]) if size >= parts)
        options: list[Sbp] = [wanted] if wanted else [B, P, *splits]
        return [Signature((sbp,), (sbp,)) for sbp in options]
    if relabels := registry.info(op.target).relabels:
        return (relabels,)
    legal = registry.signatures(op, in_shapes, out_shapes, parts)
    if op.owner is not None and parts > 1:
        placement = strategy.placements[op.stage]
        alone = owned_rows(op, placement.coordinate(placement.ranks[op.owner])[axis], in_shapes)
        return alone if registry.needs_whole(op) else (*legal, *alone)
    if strategy.axes[axis] in LENGTH_AXES and parts > 1:
        return rows_of_attention(op, legal, strategy.long_attention, in_shapes, parts)
    return legal
