"""apply_pins: every pin is checked, and becomes a part of the captured graph: what is fixed of the
home of a variable or a field, or, at `in` and `out` of a module, a flow.pin op (OneFlow's
to_global).

A pin on the output of a module holds for the tensors that leave it in forward, a pin on its input
for those that enter it.  Backward reads the pinned tensor too, and so shares forward's boxing.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import (
    FORWARD,
    Feed,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    Variable,
    rename_inputs,
)
from flowrun.engine.ir.sbp import Partial, Pinned, Sbp, Split
from flowrun.engine.ops.flow.ranges import CHECK
from flowrun.engine.ops.flow.structure import PIN
from flowrun.engine.ops.traits import is_engine_op
from flowrun.engine.strategy import Pin, Strategy


def apply_pins(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Check every pin, then write them into the graph.  Raises RecipeError."""
    for pin in strategy.pins:
        _check(graph, pin, strategy)
    return with_pins(graph, strategy)


def with_pins(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Write pins into a graph that were checked on another one of the same model: evaluation's may
    lack some of the modules.
    """
    fixed = dict(strategy.decided.pinned) if strategy.decided else {}
    found = ((v, fixed.get(v.name) or _find_pins(v, strategy)) for v in graph.variables)
    variables = (replace(v, pinned=pins) for v, pins in found)
    feeds = (replace(feed, pinned=_find_pins(feed, strategy)) for feed in graph.feeds)
    graph = replace(graph, variables=tuple(variables), feeds=tuple(feeds))
    pinned: dict[str, dict[str, Sbp]] = {}  # tensor -> axis -> its SBP
    for pin in strategy.pins:
        if pin.where != "variable" and pin.axis in strategy.axes:
            for tensor in _crossing(graph, pin):
                pinned.setdefault(tensor, {})[pin.axis] = pin.sbp
    if not pinned:
        return graph
    tensors = dict(graph.tensors)
    names = {name: f"{name}/pinned" for name in pinned}
    ops: list[Op] = []

    def pin_made(name: str, like: Op) -> None:
        if name in pinned:
            output = names[name]
            tensors[output] = replace(tensors[name], name=output)
            args = (Ref(name), tuple(pinned[name].items()))
            pin = replace(like, name=output, target=PIN, args=args, kwargs=(), outputs=(output,))
            ops.append(pin)

    for feed in graph.feeds:
        pin_made(feed.tensor, Op(feed.tensor, "", (), stage=feed.stage))
    for op in graph.ops:
        read = rename_inputs(op, names)
        ops.append(read)
        for name in op.makes:
            pin_made(name, read)
    return replace(graph, ops=tuple(ops), tensors=tensors)


def _find_pins(source: Variable | Feed, strategy: Strategy) -> Pinned:
    """Return the pins of a source; of several for an axis the last holds."""
    pins = [pin for pin in strategy.pins if pin.names(*_names(source))]
    return tuple({pin.axis: pin.sbp for pin in pins if pin.axis in strategy.axes}.items())


def _names(source: Variable | Feed) -> tuple[str, ...]:
    """Return the names by which pins know a source; a number of the engine's own has none."""
    if isinstance(source, Variable):
        return (source.name, *source.aliases)
    return () if source.is_own else (f"batch.{source.field}",)


def _crossing(graph: LogicalGraph, pin: Pin) -> list[str]:
    """Return the tensors that leave (out) or enter (in) one of the modules that the pin names,
    in forward.
    """
    forward = [op for op in graph.ops if op.phase == FORWARD and not is_engine_op(op.target)]
    made_in: dict[str, str | None] = {feed.tensor: None for feed in graph.feeds}
    made_in.update({name: pin.around(op.module) for op in forward for name in op.makes})
    for op in graph.ops:  # ids that were checked are the ids
        if op.target == CHECK:
            made_in[op.makes[0]] = made_in.get(op.inputs[0])
    crossing: dict[str, None] = {}
    for op in forward:
        reads_in = pin.around(op.module)
        for name in op.inputs:
            inner = made_in.get(name) if pin.where == "out" else reads_in
            if name in made_in and inner is not None and made_in[name] != reads_in:
                crossing[name] = None
    return list(crossing)


def _check(graph: LogicalGraph, pin: Pin, strategy: Strategy) -> None:
    """Raise RecipeError for a pin that names nothing, or an SBP that its tensors cannot have."""
    sources = [source.tensor for source in graph.sources if pin.names(*_names(source))]
    crossing = [] if sources else _check_crossing(graph, pin)
    if sources and isinstance(pin.sbp, Partial):
        raise RecipeError(
            pin.key,
            "P means that the values on the ranks add up to the tensor; a weight or a field of the"
            " batch is whole on each rank, or split.",
            "Write B or S(i).",
        )
    if isinstance(pin.sbp, Split):
        for name in (*sources, *crossing):
            _check_split(pin, pin.sbp.dim, graph.tensors[name], strategy)


def _check_crossing(graph: LogicalGraph, pin: Pin) -> list[str]:
    """Return the tensors of an `in` or `out` pin.  Raise RecipeError if there are none."""
    modules = sorted({op.module for op in graph.ops} - {"", "loss"})
    if pin.where == "variable" or not any(map(pin.around, modules)):
        raise _explain_no_match(graph, pin, modules)
    if not (crossing := _crossing(graph, pin)):
        verb, wanted = "leaves", "output another module reads."
        if pin.where == "in":
            verb, wanted = "enters", "input is not a weight."
        raise RecipeError(
            pin.key, f"no tensor {verb} {pin.pattern!r} in forward.", f"Pin a module whose {wanted}"
        )
    return crossing


def _check_split(pin: Pin, dim: int, tensor: LogicalTensor, strategy: Strategy) -> None:
    name, shape = tensor.name, tensor.shape
    if dim >= len(shape):
        dims = " and ".join(f"S({i})" for i in range(len(shape))) or "no split"
        raise RecipeError(
            pin.key,
            f"Split dim {dim} does not exist: {name} has shape {shape}, so {dims} are possible.",
        )
    axis = strategy.axes.index(pin.axis) if pin.axis in strategy.axes else None
    parts = 1 if axis is None else max(p.shape[axis] for p in strategy.placements)
    if parts > 1 and shape[dim] < parts:
        raise RecipeError(
            pin.key,
            f"dim {dim} of {name} {shape} is shorter than the {parts} ranks of {pin.axis!r}.",
            "Split another dim, or use fewer ranks on this axis.",
        )


def _explain_no_match(graph: LogicalGraph, pin: Pin, modules: list[str]) -> RecipeError:
    from difflib import get_close_matches

    kind, used, known = (
        ("parameter", "reads", [v.name for v in graph.variables if v.kind == "parameter"])
        if pin.where == "variable"
        else ("module", "calls", modules)
    )
    near = get_close_matches(pin.pattern.replace("*", "0"), known, n=3, cutoff=0.3) or known[:6]
    return RecipeError(
        f"sbp.{pin.pattern}",
        f"{pin.pattern!r} matches no {kind} of this model that forward {used}.",
        "Names look like: " + ", ".join(near),
    )
