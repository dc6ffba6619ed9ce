"""outline: what to expect of a branch of a model of equal blocks, before any plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from flowrun.engine.cost.stored import stored_bytes
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.passes.recompute import recompute
from flowrun.engine.strategy import Recompute, Strategy
from flowrun.launcher.place.bound import LaidOut, filled
from flowrun.launcher.place.extrapolate import most_in_flight
from flowrun.launcher.place.outcome import Bound
from flowrun.launcher.place.space import Branch, Candidate


@dataclass(frozen=True)
class Outline:
    """What a branch takes with its recomputation, whatever its ZeRO and schedule: by the layouts of
    one block and of two on one stage.
    """

    one: LaidOut
    two: LaidOut
    blocks: int
    branch: Branch

    def bound(self, candidate: Candidate) -> Bound:
        """expected_s tells the order in which candidates are planned, and no more.  A further stage
        makes the step longer by a micro-batch of it, whatever the schedule: weight gradients that
        run late fill the waits, but the way of the first activation and of the last gradient
        becomes no shorter, and nothing of their communication is hidden there.
        """
        fill = 1 + (self.branch.stages - 1) / self.branch.micro_batches
        work = self._whole(self.one.seconds, self.two.seconds)
        busy = self._whole(self.one.expected_s, self.two.expected_s)
        expected = busy * fill + self._reduced_s(candidate.zero)
        held = self._whole(*(laid.bytes(candidate.zero) for laid in (self.one, self.two)))
        in_flight = most_in_flight(candidate, self.branch.stages, self.branch.stages)
        forward = self._whole(self.one.forward_s, self.two.forward_s) / work if work else 0.0
        stages, count = self.branch.stages, self.branch.micro_batches
        core = self.one.strategy.hardware.core
        least = max(core * filled(work * stages, forward, stages, count), work)
        return Bound(least, round(held + in_flight * self._stored), expected)

    def _whole(self, one: float, two: float) -> float:
        """Of a stage of the whole model."""
        return (one + (self.blocks - 1) * (two - one)) / self.branch.stages

    def _reduced_s(self, zero: int) -> float:
        """Of gradients on the axis of the batch, and of weights under ZeRO 3.  Of the two passes of
        an all-reduce about one is beside the last micro-batch's backward.
        """
        strategy = self.one.strategy
        if strategy.zero.axis not in strategy.axes:
            return 0.0
        links = strategy.hardware.links(strategy.placements[0])
        link = links[strategy.axes.index(strategy.zero.axis)]
        weights = self._whole(*(laid.bytes(0, ("parameter",)) for laid in (self.one, self.two)))
        often = 3 * self.branch.micro_batches if zero == 3 else 1
        return often * weights / link.bytes_per_s

    @cached_property
    def _stored(self) -> float:
        """Bytes that wait for the backward of one micro-batch."""
        return self._whole(
            *(stored_bytes(laid.graph, laid.strategy, 0) for laid in (self.one, self.two))
        )


class Outlines:
    """Of a branch, one for each choice of what to recompute."""

    def __init__(
        self,
        branch: Branch,
        blocks: int,
        strategy: Strategy,
        laid_out: Callable[[Strategy, int], LogicalGraph],
    ) -> None:
        """strategy: of one stage.  laid_out: the model with so many blocks."""
        self.branch = branch
        self.blocks = blocks
        self.strategy = strategy
        self.laid_out = laid_out
        self.known: dict[Recompute, Outline] = {}

    def bound(self, candidate: Candidate) -> Bound:
        """Of one of its candidates."""
        choice = Recompute(candidate.recompute, candidate.keep)
        if choice not in self.known:
            strategy = replace(self.strategy, recompute=choice)
            one, two = (
                LaidOut(recompute(self.laid_out(strategy, count), strategy), strategy)
                for count in (1, 2)
            )
            self.known[choice] = Outline(one, two, self.blocks, self.branch)
        return self.known[choice].bound(candidate)
