"""op_times: ops timed in a run, in which a clock wraps every call of a plan's regions.

The plan runs for some steps in this process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.measured_ops import text_of
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.signature import Function
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.kernels.kernels import Kernel, emit
from flowrun.engine.runtime.kernels.region_program import region_lines, regions_of
from flowrun.engine.runtime.rank.readers import BatchSource

_WARM_STEPS = 2  # not counted: memory is touched for the first time
TimeRatios = dict[tuple[str, str], list[float]]  # (target, shapes) -> measured over foreseen


@dataclass(frozen=True, slots=True)
class _TimedCalls:
    """The op of a line of a program, and the seconds of each of its calls."""

    op: Op
    seconds: list[float] = field(default_factory=list)

    def wrap(self, function: Function) -> Function:
        def timed(*args: object, **kwargs: object) -> object:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)
            return result

        return timed


def measure_op_times(
    plan: Plan,
    batches: BatchSource,
    initial: Mapping[str, torch.Tensor],
    hardware: Hardware,
    steps: int,
) -> TimeRatios:
    """Return measured over foreseen seconds of ops of a plan, one value a call in the plan.

    All its ranks run in this process.  hardware: foresees seconds.  steps: number of steps that
    count.  Each value is the mean over acts and ranks: seconds of ops have a long tail, so that the
    sum of medians is 1 to 4 % less than a step, which the sum of means is not.
    """
    timed: list[_TimedCalls] = []

    def kernels(plan: Plan, rank: int, device: torch.device) -> Mapping[int, Kernel]:
        return {actor: kernel(work, rank) for actor, work in regions_of(plan, rank)}

    def kernel(work: RegionWork, rank: int) -> Kernel:
        program, ops = region_lines(plan, work, rank)
        clocks = list(map(_TimedCalls, ops))
        timed.extend(clocks)
        return emit(program, lambda line, function: clocks[line].wrap(function))

    cluster = VirtualCluster(plan, batches, initial, kernels=kernels)
    cluster.run(_WARM_STEPS)
    for one in timed:
        one.seconds.clear()
    cluster.run(_WARM_STEPS + steps, first=_WARM_STEPS)
    ratios: TimeRatios = defaultdict(list)
    for one in timed:
        sized = SizedOp.local(one.op, plan.tensors, plan.placements[one.op.stage].shape)
        if (foreseen := sized.seconds(hardware)) and one.seconds:  # no view, and in a counted step
            key = one.op.target, text_of(sized.dtype, sized.measured_shapes)
            ratios[key].append(mean(one.seconds) / foreseen)
    return dict(ratios)
