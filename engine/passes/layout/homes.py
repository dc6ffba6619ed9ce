"""Homes of sources on one axis: the SBPs that a batch field or a variable may have there.

These conventions need no words in a recipe.  On an axis of the batch (BATCH_AXES, or the ZeRO axis)
a batch field enters split along dim 0, on any other axis whole.  A weight that no pin names is
free, and B on axes of the batch; a buffer that never changes is B.
"""

from __future__ import annotations

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import Feed, Variable
from flowrun.engine.ir.placement import BATCH_AXES, Shape
from flowrun.engine.ir.sbp import B, S, Sbp
from flowrun.engine.passes.layout.pin_activations import matches_variable, names_field
from flowrun.engine.strategy import Strategy


def feed_home(strategy: Strategy, axis: int, feed: Feed, shape: Shape) -> Sbp:
    """Return the SBP in which a batch field enters, on one axis.

    strategy: has the pins.  axis: its index.  feed: the field.  shape: what the axes before left of
    it.  Raises RecipeError if the samples do not divide over the ranks.
    """
    name, parts = strategy.axes[axis], strategy.parts(feed.stage, axis)
    for pin in reversed(strategy.pins):
        if pin.axis == name and names_field(pin, feed):
            return pin.sbp
    batched = name in BATCH_AXES or name == strategy.zero.axis
    if not batched or parts == 1 or not shape:
        return B
    if shape[0] % parts:
        raise RecipeError(
            f"placement.axes.{name}",
            f"a micro-batch of {shape[0]} samples cannot be divided over {parts} ranks.",
            "Choose train.batch_size and train.micro_batches so that "
            f"batch_size / micro_batches is a multiple of {parts}.",
        )
    return S(0)


def variable_homes(strategy: Strategy, axis: int, variable: Variable, shape: Shape) -> list[Sbp]:
    """Return the SBPs that the search may choose from as the home of a variable, on one axis.

    strategy: has the pins.  axis: its index.  variable: a parameter, buffer or state.  shape: what
    the axes before left of it.
    """
    name, parts = strategy.axes[axis], strategy.parts(variable.stage, axis)
    if parts == 1:
        return [B]
    for pin in reversed(strategy.pins):
        if pin.axis == name and matches_variable(pin, variable):
            return [pin.sbp]
    constant = variable.kind == "buffer" and variable.new is None
    if name in BATCH_AXES or constant:
        return [B]
    return [B, *(S(i) for i, size in enumerate(shape) if size >= parts)]
