"""A pipeline of unit-time stages as a boxed logical graph: forward, backward and weight gradient of
one op each a stage.
"""

import torch

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph, LogicalTensor, Op, Ref
from flowrun.engine.ir.placement import Placement
from flowrun.engine.passes.split_weight_grads import split_weight_grads
from flowrun.engine.pipeline import lower
from flowrun.engine.strategy import Strategy


def unit_plan(stages: int, micro_batches: int, in_flight: int | str, chunks: int = 1) -> Plan:
    """The plan of a pipeline of `stages` stages, one rank each; each chunk takes unit time."""
    strategy = Strategy(
        axes=(),
        placements=tuple(Placement((), (s,)) for s in range(stages)),
        chunks=chunks,
        micro_batches=micro_batches,
        in_flight=in_flight,
    )
    graph = split_weight_grads(_graph(stages, chunks), strategy)
    return lower(graph, strategy)


def unit_seconds(actor: Actor) -> float:
    """1 for each of forward, backward and weight gradient that a region does; communication and the
    rest are free.
    """
    if not isinstance(actor.work, RegionWork):
        return 0.0
    return float(sum(op.target == "flow.unit" for op in actor.work.ops))


def _graph(stages: int, chunks: int) -> LogicalGraph:
    tensors: dict[str, LogicalTensor] = {}
    ops: list[Op] = []

    def add(
        name: str, target: str, inputs: list[str], piece: int, phase: str, args: tuple = ()
    ) -> str:
        chunk, stage = divmod(piece, stages)
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

    previous: list[str] = []
    pieces = stages * chunks
    for s in range(pieces):
        if s:
            sender = ((s - 1) % stages,)
            previous = [add(f"x{s}", "flow.transfer", [f"f{s - 1}"], s, FORWARD, sender)]
        add(f"f{s}", "flow.unit", previous, s, FORWARD)
    gradient: list[str] = []
    for s in reversed(range(pieces)):
        if s < pieces - 1:
            sender = ((s + 1) % stages,)
            gradient = [add(f"g{s}", "flow.transfer", [f"b{s + 1}"], s, BACKWARD, sender)]
        add(f"b{s}", "flow.unit", [f"f{s}", *gradient], s, BACKWARD)
        add(f"w{s}", "flow.unit", [f"f{s}", *gradient] if gradient else [f"b{s}"], s, BACKWARD)
        add(f"acc{s}", "flow.accumulate", [f"w{s}"], s, BACKWARD)
    return LogicalGraph(tuple(ops), tensors, results=(("acc", "acc0"),), level="boxed")
