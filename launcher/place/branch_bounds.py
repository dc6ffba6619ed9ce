"""branch_bounds: bounds of a branch of a model of equal blocks, before any plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from flowrun.engine.cost.stored import stored_bytes
from flowrun.launcher.place.bound import LaidOutBranch, fill_pipeline
from flowrun.launcher.place.extrapolate import most_in_flight
from flowrun.launcher.place.outcome import Bound
from flowrun.launcher.place.space import Branch, Candidate


@dataclass(frozen=True)
class DepthBound:
    """A branch with one choice of recomputation, whatever its ZeRO and schedule.

    one, two: layouts of the model with one block and with two, on one stage.  blocks: of the whole
        model.  Work, memory and bytes are linear in the blocks.
    """

    one: LaidOutBranch
    two: LaidOutBranch
    blocks: int
    branch: Branch

    def bound(self, candidate: Candidate) -> Bound:
        """Return the bound of a candidate; expected_s only orders candidates.

        A further stage makes the step longer by a micro-batch of it, whatever the schedule: weight
        gradients that run late fill the waits, but the way of the first activation and of the last
        gradient becomes no shorter, and nothing of their communication is hidden there.
        """
        stages, count = self.branch.stages, self.branch.micro_batches
        work = self._per_stage(lambda laid_out: laid_out.seconds)
        busy = self._per_stage(lambda laid_out: laid_out.expected_s)
        held = self._per_stage(lambda laid_out: laid_out.bytes(candidate.zero))
        forward_s = self._per_stage(lambda laid_out: laid_out.forward_s)
        in_flight = most_in_flight(candidate, stages, stages)
        core = self.one.strategy.hardware.core
        least = fill_pipeline(work * stages, forward_s / work if work else 0.0, stages, count)
        expected = busy * (1 + (stages - 1) / count) + self._reduction_s(candidate.zero)
        return Bound(max(core * least, work), round(held + in_flight * self._stored), expected)

    def _per_stage(self, of: Callable[[LaidOutBranch], float]) -> float:
        """Return a quantity of one stage of the whole model."""
        one, two = of(self.one), of(self.two)
        return (one + (self.blocks - 1) * (two - one)) / self.branch.stages

    def _reduction_s(self, zero: int) -> float:
        """Return seconds of reducing gradients on the axis of the batch, and of gathering weights
        under ZeRO 3.  Of the two passes of an all-reduce one overlaps the last micro-batch.
        """
        strategy = self.one.strategy
        if strategy.zero.axis not in strategy.axes:
            return 0.0
        links = strategy.hardware.links(strategy.placements[0])
        link = links[strategy.axes.index(strategy.zero.axis)]
        weights = self._per_stage(lambda laid_out: laid_out.bytes(0, ("parameter",)))
        often = 3 * self.branch.micro_batches if zero == 3 else 1
        return often * weights / link.bytes_per_s

    @cached_property
    def _stored(self) -> float:
        """Bytes that wait for the backward of one micro-batch."""
        return self._per_stage(lambda laid: stored_bytes(laid.graph, laid.strategy, 0))
