"""Evaluation follows training: the same stages, and every weight where training keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.sbp import B, Broadcast
from flowrun.engine.passes.stages.chosen_stages import read_stages
from flowrun.engine.strategy import Optimizer, Pin, Strategy, Zero


def follow_training(strategy: Strategy, training: LogicalGraph) -> Strategy:
    """The strategy of evaluation: stages and homes as in training's boxed graph.

    Ops read every weight as they did before ZeRO sharded it; `follow_homes` has where it lies.
    """
    homes = tuple((v.name, v.nd_sbp) for v in training.variables)
    return replace(
        strategy,
        decided=replace(read_stages(training), homes=homes),
        stage_modules=(),
        chunks=1,
        pins=(*strategy.pins, *_pins_of_weights(strategy, training)),  # the last pin holds
        zero=Zero(),
        optimizer=Optimizer(),
        overwrites=True,
        fusion="",
    )


def follow_homes(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """A pass: every variable lives where training keeps it."""
    homes = dict(strategy.decided.homes) if strategy.decided else {}
    variables = tuple(replace(v, nd_sbp=homes.get(v.name, v.nd_sbp)) for v in graph.variables)
    return replace(graph, variables=variables)


def _pins_of_weights(strategy: Strategy, training: LogicalGraph) -> Iterator[Pin]:
    """A pin for each axis of each weight."""
    for v in (v for v in training.variables if v.kind != "state"):
        for k, (axis, sbp) in enumerate(zip(strategy.axes, v.nd_sbp, strict=True)):
            sharded = axis == strategy.zero.axis and not isinstance(sbp, Broadcast)
            whole = sharded and strategy.find_pin(v, k) is None
            yield Pin(_literal(v.name), "variable", axis, B if whole else sbp)


def _literal(name: str) -> str:
    """A pattern that matches the name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
