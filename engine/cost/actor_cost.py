"""The cost of one act of an actor: seconds, and bytes that it sends to other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrun.engine.actors.plan import (
    SEND,
    Actor,
    BoxWork,
    CopyWork,
    FeedWork,
    Plan,
    PrepareWork,
    RegionWork,
    TensorMove,
    TransferWork,
)
from flowrun.engine.boxing.boxing import start_seconds, step_bytes, step_seconds
from flowrun.engine.boxing.crossing import crossing_tensors
from flowrun.engine.cost.fusion import FUSIONS, FusedKernel, kernels
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import CPU, Hardware
from flowrun.engine.ir.graph import Feed, Op
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import NdSbp, is_elsewhere
from flowrun.engine.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ActorCost:
    """The cost of acts of a plan's actors, on the rank with the largest shards."""

    plan: Plan
    strategy: Strategy

    def _samples(self, name: str, nd_sbp: NdSbp, stage: int) -> int:
        grid = self.strategy.placements[stage].shape
        return largest_shape(self.plan.tensors[name].shape, nd_sbp, grid)[0]

    def _most_samples(self, feeds: Sequence[Feed]) -> int:
        fields = (f for f in feeds if not f.is_own)
        return max((self._samples(f.tensor, f.nd_sbp, f.stage) for f in fields), default=0)

    def _size(self, op: Op) -> SizedOp:
        return SizedOp.local(op, self.plan.tensors, self.strategy.placements[op.stage].shape)

    def _region_seconds(self, work: RegionWork) -> float:
        """Return the sum over ops, or over kernels if Inductor builds the region."""
        hardware = self.strategy.hardware
        first = (0,) * len(self.strategy.axes)  # of owners, it has the most to do
        ops = [op for op in work.ops if not any(is_elsewhere(nd, first) for nd in op.out_sbp)]
        if not self.strategy.fusion:
            return sum(self._size(op).seconds(hardware) for op in ops)
        hardware = replace(hardware, bias_apart=False)  # fused into the op after the product
        kept = (*work.makes, *(new for _, new in work.updates))
        fused = kernels(ops, kept, self._elements, FUSIONS[self.strategy.fusion])
        return sum(self._kernel_seconds(kernel, hardware) for kernel in fused)

    def _elements(self, op: Op) -> int:
        sized = self._size(op)
        shapes = (*sized.ins, *(shape for shape in sized.outs if shape is not None))
        return max(map(math.prod, shapes), default=0)

    def _kernel_seconds(self, kernel: FusedKernel, hardware: Hardware) -> float:
        ops = list(map(self._size, kernel.ops))
        if len(ops) == 1:
            return ops[0].seconds(hardware)
        moved = sum(map(self.plan.tensor_bytes, (*kernel.reads, *kernel.writes)))
        busy_s = sum(op.element_seconds(hardware) for op in ops)
        return max(busy_s, moved / hardware.memory_bytes_per_s) + hardware.op_s

    def seconds(self, actor: Actor) -> float:
        """Return the foreseen seconds of one act."""
        hardware = self.strategy.hardware
        match actor.work:
            case RegionWork() as work:
                return hardware.act_s + self._region_seconds(work)
            case BoxWork(steps, moves, one_copy):
                placement = self.strategy.placements[actor.stage]
                links = hardware.links(placement)
                one_start = start_seconds(steps[0], links[steps[0].axis])  # one message for all
                total = self._loop_s + one_start
                if one_copy:
                    return total
                for step, move in zip(steps, moves, strict=True):
                    layout, grid, link = move.source.nd_sbp, placement.shape, links[step.axis]
                    total += step_seconds(step, layout, grid, move.shape, move.num_bytes, link)
                return total
            case CopyWork():
                num_bytes = sum(map(self.plan.tensor_bytes, actor.makes))
                return hardware.act_s + num_bytes / hardware.host_bytes_per_s
            case PrepareWork(step=name, made=made):
                samples = self._samples(made, self.plan.locations[made].nd_sbp, actor.stage)
                each = next(p.seconds for p in self.strategy.preparation if p.name == name)
                return hardware.act_s + samples * each
            case FeedWork(feeds, None, False):
                return hardware.act_s + self._most_samples(feeds) * self.strategy.sample_s
            case TransferWork(_, source, target, moves):
                placements = self.strategy.placements
                link = hardware.crossing(placements[source], placements[target])
                num_bytes = sum(self.plan.tensor_bytes(move.made) for move in moves)
                return self._loop_s + link.message_seconds(num_bytes)
        return hardware.act_s

    @property
    def _loop_s(self) -> float:
        """Seconds in which the loop issues communication and takes up its outputs.

        On a CPU the loop runs on the core that computes; a GPU computes on while the loop runs.
        """
        hardware = self.strategy.hardware
        return hardware.act_s if hardware.device == CPU else 0.0

    def carrier(self, actor: Actor) -> tuple[int, float, float]:
        """Return (level, taken, crowding_s) of an actor that communicates; zeros of any other.

        level: index of the network level that carries it.  taken: share of simultaneous compute
        that stands still.  crowding_s: seconds of waiting that pass only while other ranks have the
        cores.
        """
        hardware, placements = self.strategy.hardware, self.strategy.placements
        match actor.work:
            case BoxWork(steps):
                link = hardware.links(placements[actor.stage])[steps[0].axis]
            case TransferWork(_, source, target):
                link = hardware.crossing(placements[source], placements[target])
            case _:
                return 0, 0.0, 0.0
        level = max(0, link.level)
        idle_s = link.latency_s - link.busy_s
        seconds = self.seconds(actor)
        moving = 1 - min(1.0, idle_s / max(seconds, 1e-12))
        return level, hardware.levels[level].taken * moving, min(seconds, link.crowding_s)

    def sent_bytes(self, actor: Actor) -> float:
        """Return the bytes that all ranks of the stage send in one act: table 2 of the paper."""
        match actor.work:
            case BoxWork(steps, moves, False):
                grid = self.strategy.placements[actor.stage].shape
                return sum(
                    step_bytes(step, move.source.nd_sbp, grid, move.num_bytes)
                    for step, move in zip(steps, moves, strict=True)
                )
            case TransferWork(moves=moves) as work if actor.kind == SEND:
                return sum(move.num_bytes * self._crosses(work, move) for move in moves)
        return 0.0

    def _crosses(self, work: TransferWork, move: TensorMove) -> float:
        """Return how often a tensor crosses between its stages."""
        (_, source), (_, target) = move.source, move.target
        here, there = (self.plan.placements[k] for k in (work.source_stage, work.target_stage))
        return float(crossing_tensors(here, source, there, target, move.shape))
