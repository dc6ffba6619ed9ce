"""Evaluation follows training: the same stages, and every weight where training keeps it.  So do
the updates of a step follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph, Variable
from flowrun.engine.ir.sbp import B, NdSbp, Pinned
from flowrun.engine.passes.stages.chosen_stages import read_stages
from flowrun.engine.strategy import Optimizer, Strategy, Zero


def follow_training(strategy: Strategy, training: LogicalGraph) -> Strategy:
    """The strategy of evaluation: stages and homes as in training's boxed graph.

    Ops read every weight as they did before ZeRO sharded it; `follow_homes` has where it lies.
    """
    homes = tuple((v.name, v.nd_sbp) for v in training.variables)
    read = tuple((v.name, _as_read(v, strategy)) for v in training.variables)
    return replace(
        strategy,
        decided=replace(read_stages(training), homes=homes, pinned=read),
        stage_modules=(),
        chunks=1,
        zero=Zero(),
        optimizer=Optimizer(),
        overwrites=True,
        fusion="",
    )


def follow_update(strategy: Strategy, other: LogicalGraph, homes: Mapping[str, NdSbp]) -> Strategy:
    """The strategy of an update that shares a model with another one.

    strategy: of the update alone.  other: boxed graph of the other.  homes: of variables, by name;
    ZeRO finds those of the others.
    """
    axis = strategy.zero.axis
    read = ((v.name, [p for p in _as_read(v, strategy) if p[0] != axis]) for v in other.variables)
    pinned = tuple((name, tuple(pins)) for name, pins in read)
    decided = replace(read_stages(other), homes=tuple(homes.items()), pinned=pinned)
    return replace(strategy, decided=decided, stage_modules=())


def follow_homes(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """A pass: every variable lives where training keeps it."""
    homes = dict(strategy.decided.homes) if strategy.decided else {}
    variables = tuple(replace(v, nd_sbp=homes.get(v.name, v.nd_sbp)) for v in graph.variables)
    return replace(graph, variables=variables)


def _as_read(variable: Variable, strategy: Strategy) -> Pinned:
    """Return the SBP in which ops read a variable on each axis: ZeRO shards what no pin splits."""
    pins, axis = dict(variable.pinned), strategy.zero.axis
    read = dict(zip(strategy.axes, variable.nd_sbp, strict=True))
    if axis in read and axis not in pins:
        read[axis] = B
    return tuple(read.items())
