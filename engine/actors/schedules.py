"""Schedules: how many micro-batches a stage may hold for backward, and whether weight gradients
stay joined to backward; with several chunks, the order of their turns too.  add_registers.py makes
slots of the numbers, split_weight_grads.py a phase of the rest, and the protocol does what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flowrun.engine.errors import RecipeError

JOINED = ("1f1b", "gpipe")  # their weight gradients are part of backward


def micro_batches_in_flight(
    in_flight: int | str,
    stages: int,
    stage: int,
    micro_batches: int,
    alone: int = 1,
    *,
    chunk: int = 0,
    chunks: int = 1,
) -> int:
    """Return how many micro-batches a chunk of a stage holds; at most those of a step.

    in_flight: as Strategy's.  stages, micro_batches, chunks: how many there are.
    stage, chunk: which.  alone: what a single stage holds where the schedule is zero bubble,
    which has no bubble to fill there: 2 hide the communication of backward (add_registers.py).
    Raises RecipeError for an unknown schedule.
    """
    match in_flight:
        case int(number):
            held = number
        case "gpipe":
            held = micro_batches
        case "1f1b" if chunks == 1:
            held = stages - stage
        case "1f1b":
            this = [int(k == chunk) for k in range(chunks)]
            held = Turns(stages, stage, chunks, micro_batches).most_held(this, steps=1)
        case "zero_bubble" | "auto":
            held = 2 * stages if stages > 1 else alone
        case other:
            raise RecipeError(
                "placement.in_flight",
                f"{other!r} is not a schedule.",
                "Write a number, gpipe, 1f1b or zero_bubble.",
            )
    return min(held, micro_batches)


def keeps_turns(in_flight: int | str, stages: int, micro_batches: int, chunks: int) -> bool:
    """Return whether forwards wait for backwards of earlier turns: where a round is not full, that
    would keep the next step's from filling the gap.
    """
    return in_flight == "1f1b" and chunks > 1 and micro_batches % stages == 0


@dataclass(frozen=True, slots=True)
class Turns:
    """The order of acts on a stage of several chunks: as many micro-batches as there are stages go
    through one chunk, then through the next, and backward through the chunks in reverse; one
    forward, one backward (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Among what is ready, it is a priority.  Backward first, as with one chunk, would leave forwards
    to the end of the step: there is always a backward of another chunk that could run.  Where
    turns are kept, no forward goes before a backward of an earlier turn, either (Plan.in_turn).
    """

    stages: int
    stage: int
    chunks: int
    micro_batches: int

    def forward(self, act: int, chunk: int) -> int:
        """Return the place of a forward act, counted from the first backward of the first step."""
        ahead = 2 * (self.stages - 1 - self.stage) + (self.chunks - 1) * self.stages
        return 2 * (self._number(act, chunk) - ahead)

    def backward(self, act: int, chunk: int) -> int:
        """Return the place of a backward act."""
        return 2 * self._number(act, self.chunks - 1 - chunk) + 1

    def most_held(self, weights: Sequence[int], steps: int) -> int:
        """Return the most that waits for backward at once if no forward goes before its turn.

        weights: of what a micro-batch in each chunk leaves.  steps: how many may overlap.
        """
        acts = range(steps * self.micro_batches)
        turns = [
            (turn(act, chunk), held)
            for chunk, weight in enumerate(weights)
            for turn, held in ((self.forward, weight), (self.backward, -weight))
            for act in acts
        ]
        return max(accumulate(held for _, held in sorted(turns)))

    def _number(self, act: int, place: int) -> int:
        """Number an act among all forwards, or backwards, of a stage.

        place: of the chunk among those of a round.
        """
        step, micro_batch = divmod(act, self.micro_batches)
        before, within = divmod(micro_batch, self.stages)
        members = min(self.stages, self.micro_batches - before * self.stages)
        rounds = (step * self.micro_batches + before * self.stages) * self.chunks
        return rounds + place * members + within
