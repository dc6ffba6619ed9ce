"""lower: a boxed graph -> a plan without actors yet, and the passes that end the actors' list.

PLAN_PASSES (pipeline.py) has all passes in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flowrun.engine.actors.plan import REPORT, Actor, Plan, ReportWork
from flowrun.engine.actors.schedules import schedule_of
from flowrun.engine.cost.actor_cost import ActorCost
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.ir.location import Location
from flowrun.engine.strategy import Strategy


def start_plan(graph: LogicalGraph, strategy: Strategy) -> Plan:
    """Return the plan of a boxed graph before any pass."""
    hardware = strategy.hardware
    return Plan(
        placements=strategy.placements,
        axes=strategy.axes,
        graph=graph,
        actors=(),
        registers=(),
        micro_batches=strategy.micro_batches,
        schedule=schedule_of(strategy),
        notes=graph.notes,
        shared_memory=strategy.shared_memory,
        core=hardware.core,
        cores=hardware.cores,
        own_messages=hardware.own_messages,
        workspace=hardware.workspace,
        blocking=tuple(map(strategy.axes.index, strategy.blocking)),
        one_order=hardware.device != CPU,
        host_apart=hardware.device != CPU,
        tensors=graph.tensors,
        variables=graph.variable_of,
        locations=_locations(graph),
    )


def _locations(graph: LogicalGraph) -> dict[str, Location]:
    locations = {source.tensor: Location(source.stage, source.nd_sbp) for source in graph.sources}
    for op in graph.ops:
        placed = zip(op.outputs, op.out_sbp, strict=True)
        locations |= {
            name: Location(op.stage, nd_sbp) for name, nd_sbp in placed if name is not None
        }
    return locations


def set_actors(plan: Plan, actors: Iterable[Actor]) -> Plan:
    """Return the plan with these actors, numbered in order.  It must not have registers yet."""
    return replace(plan, actors=tuple(replace(actor, id=k) for k, actor in enumerate(actors)))


def add_reports(plan: Plan, strategy: Strategy) -> Plan:
    """Add an actor a stage that reports the scalars which are made there (a pass)."""
    by_stage: dict[int, list[tuple[str, str]]] = {}
    for name, tensor in plan.graph.results:
        by_stage.setdefault(plan.locations[tensor].stage, []).append((name, tensor))
    reports = (
        Actor(
            0, "report", REPORT, stage, phase=UPDATE, per_step=True, work=ReportWork(tuple(results))
        )
        for stage, results in by_stage.items()
    )
    return set_actors(plan, (*plan.actors, *reports))


def add_costs(plan: Plan, strategy: Strategy) -> Plan:
    """Fill in what one act of each actor costs: seconds, bytes, the network level (a pass)."""
    cost = ActorCost(plan, strategy)

    def costed(actor: Actor) -> Actor:
        level, taken, crowding_s = cost.carrier(actor)
        return replace(
            actor,
            seconds=cost.seconds(actor),
            sent_bytes=cost.sent_bytes(actor),
            level=level,
            taken=taken,
            crowding_s=crowding_s,
        )

    return replace(plan, actors=tuple(map(costed, plan.actors)))
