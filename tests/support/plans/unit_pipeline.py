"""A pipeline of unit-time stages as a boxed logical graph: forward, backward and weight gradient of
one op each a stage.
"""

import torch

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.actors.schedules import Schedule, schedule_of
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ir.placement import Placement
from flowrun.engine.passes.split_weight_grads import split_weight_grads
from flowrun.engine.pipeline import lower
from flowrun.engine.strategy import OwnSchedule, Strategy


def unit_plan(
    stages: int, micro_batches: int, in_flight: int | str | OwnSchedule, chunks: int = 1
) -> Plan:
    """The plan of a pipeline of `stages` stages, one rank each; each chunk takes unit time."""
    strategy = Strategy(
        axes=(),
        placements=tuple(Placement((), (s,)) for s in range(stages)),
        chunks=chunks,
        micro_batches=micro_batches,
        in_flight=in_flight,
    )
    graph = split_weight_grads(_graph(schedule_of(strategy)), strategy)
    return lower(graph, strategy)


def unit_seconds(actor: Actor) -> float:
    """1 for each of forward, backward and weight gradient that a region does; communication and the
    rest are free.
    """
    if not isinstance(actor.work, RegionWork):
        return 0.0
    return float(sum(op.target == "flow.unit" for op in actor.work.ops))


def _graph(schedule: Schedule) -> LogicalGraph:
    tensors: dict[str, LogicalTensor] = {}
    ops: list[Op] = []

    def add(
        name: str, target: str, inputs: list[str], piece: int, phase: str, args: tuple = ()
    ) -> str:
        stage, chunk = schedule.stage_of(piece), piece // schedule.stages
        tensors[name] = LogicalTensor(name, (1,), torch.float32)
        ops.append(
            Op(
                name,
                target,
                (*map(Ref, inputs), *args),
                (),
                outputs=(name,),
                module=f"block{piece}",
                phase=phase,
                stage=stage,
                in_sbp=((),) * len(inputs),
                out_sbp=((),),
                chunk=chunk,
            )
        )
        return name

    def enter(name: str, read: str, source: int, piece: int, phase: str) -> list[str]:
        sender = schedule.stage_of(source)
        if sender == schedule.stage_of(piece):
            return [read]
        return [add(name, "flow.transfer", [read], piece, phase, (sender,))]

    previous: list[str] = []
    pieces = schedule.stages * schedule.chunks
    for s in range(pieces):
        if s:
            previous = enter(f"x{s}", f"f{s - 1}", s - 1, s, FORWARD)
        add(f"f{s}", "flow.unit", previous, s, FORWARD)
    gradient: list[str] = []
    for s in reversed(range(pieces)):
        if s < pieces - 1:
            gradient = enter(f"g{s}", f"b{s + 1}", s + 1, s, BACKWARD)
        add(f"b{s}", "flow.unit", [f"f{s}", *gradient], s, BACKWARD)
        add(f"w{s}", "flow.unit", [f"f{s}", *(gradient or [f"b{s}"])], s, BACKWARD)
        add(f"acc{s}", "flow.accumulate", [f"w{s}"], s, BACKWARD)
    return LogicalGraph(tuple(ops), tensors, results=(("acc", "acc0"),), level="boxed")
