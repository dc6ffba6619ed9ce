"""Schedules: how many micro-batches a stage may hold for backward, and whether weight gradients
stay joined to backward; with several chunks, the order of their turns too.  add_registers.py makes
slots of the numbers, split_weight_grads.py a phase of the rest, and the protocol does what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        case "1f1b":
            held = _one_f_one_b(stages, stage, chunk, chunks)
        case "zero_bubble" | "auto":
            held = 2 * stages if stages > 1 else alone
        case other:
            raise RecipeError(
                "placement.in_flight",
                f"{other!r} is not a schedule.",
                "Write a number, gpipe, 1f1b or zero_bubble.",
            )
    return min(held, micro_batches)


def _one_f_one_b(stages: int, stage: int, chunk: int, chunks: int) -> int:
    """Return the most micro-batches that a chunk holds where a stage does one forward, one
    backward.

    With one chunk, one for itself and one for each later stage.  With more, a stage takes as many
    micro-batches as there are stages through one chunk, then through the next, and backward through
    the chunks in reverse (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    if chunks == 1:
        return stages - stage
    period = chunks * stages
    ahead = _ahead(stages, stage, chunks)

    def done(acts: int, place: int) -> int:
        """Count those of the first `acts` acts whose chunk has this place in a period."""
        whole, rest = divmod(acts, period)
        return whole * stages + min(max(rest - place * stages, 0), stages)

    return max(
        done(ahead + acts + 1, chunk) - done(acts, chunks - 1 - chunk) for acts in range(period)
    )


def _ahead(stages: int, stage: int, chunks: int) -> int:
    """Return how many forwards a stage of several chunks does before it does one a backward."""
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages


@dataclass(frozen=True, slots=True)
class Turns:
    """The order of acts on a stage of several chunks: as many micro-batches as there are stages go
    through one chunk, then through the next; one forward, one backward.

    Among what is ready, it is a priority.  Backward first, as with one chunk, would leave forwards
    to the end of the step: there is always a backward of another chunk that could run.
    """

    stages: int
    stage: int
    chunks: int
    micro_batches: int

    def forward(self, act: int, chunk: int) -> int:
        """Return the place of a forward act, counted from the first backward of the first step."""
        return 2 * (self._number(act, chunk) - _ahead(self.stages, self.stage, self.chunks))

    def backward(self, act: int, chunk: int) -> int:
        """Return the place of a backward act."""
        return 2 * self._number(act, self.chunks - 1 - chunk) + 1

    def _number(self, act: int, place: int) -> int:
        """Number an act among all forwards, or backwards, of a stage.

        place: of the chunk among those of a round.
        """
        step, micro_batch = divmod(act, self.micro_batches)
        before, within = divmod(micro_batch, self.stages)
        members = min(self.stages, self.micro_batches - before * self.stages)
        rounds = (step * self.micro_batches + before * self.stages) * self.chunks
        return rounds + place * members + within
