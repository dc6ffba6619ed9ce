"""Ops timed where they are: a plan runs in this process for some steps, with a clock around every
call of its regions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.cost.op_cost import dtype_name, measured_shapes
from flowrun.engine.cost.seconds import local_seconds, local_shapes
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.measured_ops import text_of
from flowrun.engine.ir.graph import Op
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.kernels.kernels import Kernel, emit
from flowrun.engine.runtime.kernels.region_program import region_lines
from flowrun.engine.runtime.rank.readers import BatchSource

_UNCOUNTED = 2  # steps in which memory is touched for the first time
TimeRatios = dict[tuple[str, str], list[float]]  # (target, shapes) -> measured over foreseen


@dataclass(frozen=True, slots=True)
class _TimedCalls:
    """The op of a line of a program, and what each of its calls took."""

    op: Op
    stage: int
    seconds: list[float] = field(default_factory=list)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            made = function(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)
            return made

        return timed


def op_times(
    plan: Plan,
    batches: BatchSource,
    initial: Mapping[str, torch.Tensor],
    hardware: Hardware,
    steps: int,
) -> TimeRatios:
    """What ops take, of what `hardware` foresees; one value for each call in the plan, the mean
    of its acts on all ranks.

    Means, because ops add up to a step: what they take has a long tail, so that the sum of medians
    is 1 to 4 % less than a step.
    """
    timed: list[_TimedCalls] = []

    def kernels(
        plan: Plan, stage: int, coordinate: tuple[int, ...], device: torch.device
    ) -> Mapping[int, Kernel]:
        return {
            actor.id: _kernel(plan, actor.work, stage, coordinate, timed)
            for actor in plan.stage_actors(stage)
            if isinstance(actor.work, RegionWork)
        }

    cluster = VirtualCluster(plan, batches, initial, kernels=kernels)
    cluster.run(_UNCOUNTED)
    for one in timed:
        one.seconds.clear()
    cluster.run(_UNCOUNTED + steps, first=_UNCOUNTED)
    found: TimeRatios = defaultdict(list)
    for one in timed:
        grid = plan.placements[one.stage].shape
        foreseen = local_seconds(one.op, plan.tensors, grid, hardware)
        if not foreseen or not one.seconds:
            continue  # a view; another step's
        ins, outs = local_shapes(one.op, plan.tensors, grid)
        dtype = dtype_name(one.op, plan.tensors)
        key = one.op.target, text_of(dtype, measured_shapes(ins, outs))
        found[key].append(mean(one.seconds) / foreseen)
    return dict(found)


def _kernel(
    plan: Plan, work: RegionWork, stage: int, coordinate: tuple[int, ...], timed: list[_TimedCalls]
) -> Kernel:
    program, ops = region_lines(plan, work, stage, coordinate)
    clocks = [_TimedCalls(each, stage) for each in ops]
    timed += clocks
    return emit(program, lambda line, function: clocks[line].around(function))
