"""Schedules: how many micro-batches a stage may hold for backward, which of its acts goes first,
and which stage runs each piece of the model.  add_registers.py makes slots of the numbers,
split_weight_grads.py a phase of weight gradients that may run late, split_stages.py stages of the
pieces, and the protocol does what follows: no schedule is a list of actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, FORWARD, WEIGHT_GRAD
from flowrun.engine.strategy import OwnSchedule, Strategy

FIRST, NEXT, LATE = 0, 1, 2  # priorities of compute


@dataclass(frozen=True)
class Schedule:
    """The schedule of a pipeline: of a step of `micro_batches`, on `stages` of `chunks` each.

    Where a stage has several chunks, as many micro-batches as there are stages go through one, then
    through the next, and backward through the chunks in reverse; one forward, one backward
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).  A subclass may change each method.

    joined: weight gradients are part of backward; else they fill gaps.
    turns_back: the model goes down the stages and up again, by two chunks (a V): the last stage has
        the middle, the first one both ends.
    """

    stages: int
    chunks: int
    micro_batches: int

    joined = False
    turns_back = False

    @property
    def keeps_turns(self) -> bool:
        """Whether no forward goes before a backward of an earlier turn."""
        return False

    @property
    def orders(self) -> bool:
        """Whether priority and turn count; else backward goes first, then the oldest."""
        return self.chunks > 1

    @property
    def round(self) -> int:
        """Micro-batches after which the turns repeat: each then comes a constant later."""
        return self.stages if self.chunks > 1 else 1

    def held(self, stage: int, chunk: int, alone: int) -> int:
        """Return how many micro-batches a chunk of a stage may hold: all of a step.

        alone: what a single stage, which has no gaps, holds by a schedule that fills gaps.
        """
        return self.micro_batches

    def priority(self, phase: str, chunk: int) -> int:
        """Return which of what is ready goes first: the least, then the least turn.

        Backward first, as with one chunk, would leave forwards to the end of the step: there is
        always a backward of another chunk that could run.
        """
        return LATE if phase == WEIGHT_GRAD else NEXT

    def turn(self, phase: str, stage: int, chunk: int, act: int) -> int:
        """Return the place of an act among those of its stage and priority.

        act: counted from the first step, through all of them.
        """
        if phase == FORWARD:  # counted from the first backward
            ahead = 2 * (self.stages - 1 - stage) + (self.chunks - 1) * self.stages
            return 2 * (self._number(act, chunk) - ahead)
        if phase == BACKWARD:
            return 2 * self._number(act, self.chunks - 1 - chunk) + 1
        return act

    def slots(self, stage: int, chunk: int = 0, alone: int = 1) -> int:
        """Return `held`, at most the micro-batches of a step."""
        return min(self.held(stage, chunk, alone), self.micro_batches)

    def table(self) -> Mapping[str, int]:
        """Return all that the schedule says: equal tables make equal plans."""
        acts, phases = range(2 * self.micro_batches), (FORWARD, BACKWARD, WEIGHT_GRAD)
        said: dict[str, int] = {
            "joined": self.joined,
            "turns_back": self.turns_back,
            "orders": self.orders,
        }
        said |= {"keeps_turns": self.keeps_turns, "round": self.round}
        for stage, chunk in product(range(self.stages), range(self.chunks)):
            where = f"stage {stage}, chunk {chunk}"
            said[f"held({where})"] = self.held(stage, chunk, 1)
            for phase in phases:
                said[f"priority({phase}, chunk {chunk})"] = self.priority(phase, chunk)
                turns = {f"turn({phase}, {where}, act {k})": k for k in acts}
                said |= {name: self.turn(phase, stage, chunk, k) for name, k in turns.items()}
        return said

    def most_held(self, stage: int, weights: Sequence[int], steps: int) -> int:
        """Return the most that waits for backward at once if no forward goes before its turn.

        weights: of what a micro-batch in each chunk leaves.  steps: how many may overlap.
        """
        turns = [
            (self.turn(phase, stage, chunk, act), held)
            for chunk, weight in enumerate(weights)
            for phase, held in ((FORWARD, weight), (BACKWARD, -weight))
            for act in range(steps * self.micro_batches)
        ]
        return max(accumulate(held for _, held in sorted(turns)))

    def stage_of(self, piece: int) -> int:
        """Return the stage that runs a piece of the model; it is chunk piece // stages there."""
        around, stage = divmod(piece, self.stages)
        return self.stages - 1 - stage if self.turns_back and around % 2 else stage

    @property
    def last_stage(self) -> int:
        """The stage that runs the end of the model, and the loss."""
        return 0 if self.turns_back else self.stages - 1

    def _number(self, act: int, place: int) -> int:
        """Number an act among all forwards, or backwards, of a stage.

        place: of the chunk among those of a round.
        """
        step, micro_batch = divmod(act, self.micro_batches)
        before, within = divmod(micro_batch, self.stages)
        members = min(self.stages, self.micro_batches - before * self.stages)
        rounds = (step * self.micro_batches + before * self.stages) * self.chunks
        return rounds + place * members + within


@dataclass(frozen=True)
class GPipe(Schedule):
    """All micro-batches of a step."""

    joined = True


@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """As many in flight as there are stages from this one on; with chunks, as turns need."""

    joined = True

    @property
    def keeps_turns(self) -> bool:
        """Only in full rounds: turns would keep the next step's from filling the gap of others."""
        return self.chunks > 1 and self.micro_batches % self.stages == 0

    def held(self, stage: int, chunk: int, alone: int) -> int:
        if self.chunks == 1:
            return self.stages - stage
        return self.most_held(stage, [int(k == chunk) for k in range(self.chunks)], steps=1)


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """Enough to fill all gaps with weight gradients (ZB-H2, Qi et al. 2023, arXiv 2401.10241)."""

    def held(self, stage: int, chunk: int, alone: int) -> int:
        return 2 * self.stages if self.stages > 1 else alone


@dataclass(frozen=True)
class VZeroBubble(Schedule):
    """No gap, with the memory of 1F1B (V-ZB, Qi et al. 2024, arXiv 2405.15362): what a stage holds
    of both chunks is the same on all stages.  What comes up the V goes first.
    """

    turns_back = True
    round = 1

    def held(self, stage: int, chunk: int, alone: int) -> int:
        return stage + 1 if chunk else 2 * self.stages - 1 - stage

    def priority(self, phase: str, chunk: int) -> int:
        return FIRST if phase == FORWARD and chunk else super().priority(phase, chunk)

    def turn(self, phase: str, stage: int, chunk: int, act: int) -> int:
        return 2 * act + chunk


@dataclass(frozen=True)
class VHalf(Schedule):
    """Half the memory of 1F1B, and half its gaps (V-Half, arXiv 2405.15362, section 3).

    A block of acts, repeated every six units of time, says turns and, by how long each chunk waits
    in it, slots.
    """

    turns_back = True
    round = 1

    def held(self, stage: int, chunk: int, alone: int) -> int:
        waits = self._start(BACKWARD, stage, chunk) - self._start(FORWARD, stage, chunk)
        return -(-(waits + self._room()) // 6)

    def turn(self, phase: str, stage: int, chunk: int, act: int) -> int:
        return act if phase == WEIGHT_GRAD else 6 * act + self._start(phase, stage, chunk)

    def _start(self, phase: str, stage: int, chunk: int) -> int:
        """Return the unit of time at which a micro-batch's act begins, in the block."""
        last, apart = 3 * self.stages - 2, 0 if self.stages % 2 else 3
        if phase == FORWARD:
            return last - stage if chunk else 2 * stage
        return last + 1 + apart + (2 * stage if chunk else last + 1 - stage)

    def _room(self) -> int:
        """Return the units that a slot is held beyond the start of backward: with room for weight
        gradients, two chunks on each stage would hold more than half together.
        """
        return 1


@dataclass(frozen=True)
class VMin(VHalf):
    """A third of the memory of 1F1B, and two thirds of its gaps (V-Min, the same section).

    Turns are kept: slots alone would let one chunk hold what is meant for the other.
    """

    keeps_turns = True

    def _start(self, phase: str, stage: int, chunk: int) -> int:
        last, apart = 2 * self.stages - 1, 0 if self.stages % 3 else 2
        if phase == FORWARD:
            return last - stage if chunk else stage
        return last + 1 + apart + (stage if chunk else last - stage)

    def _room(self) -> int:
        # until the weight gradient that fills the next gap of the block has ended
        return 2 if self.stages % 3 == 1 else 4


ONE_STAGE = Schedule(1, 1, 1)
SCHEDULES: Mapping[str, type[Schedule]] = {
    "gpipe": GPipe,
    "1f1b": OneForwardOneBackward,
    "zero_bubble": ZeroBubble,
    "auto": ZeroBubble,
    "v_zero_bubble": VZeroBubble,
    "v_half": VHalf,
    "v_min": VMin,
}


@dataclass(frozen=True)
class Slots(Schedule):
    """A number of the recipe, for every stage."""

    number: int

    def held(self, stage: int, chunk: int, alone: int) -> int:
        return self.number


def schedule_of(strategy: Strategy) -> Schedule:
    """Return the schedule of a strategy.  Raises RecipeError for an unknown one."""
    sizes = strategy.num_stages, strategy.chunks, strategy.micro_batches
    return make_schedule(strategy.in_flight, *sizes)


def make_schedule(
    in_flight: int | str | OwnSchedule, stages: int, chunks: int, micro_batches: int
) -> Schedule:
    """Return the schedule that `placement.in_flight` asks for.  Raises RecipeError."""
    if isinstance(in_flight, int):
        return Slots(stages, chunks, micro_batches, in_flight)
    if isinstance(in_flight, OwnSchedule):
        own: Schedule = in_flight.kind(stages, chunks, micro_batches, **dict(in_flight.settings))
        return own
    if in_flight not in SCHEDULES:
        raise RecipeError(
            "placement.in_flight",
            f"{in_flight!r} is not a schedule.",
            f"Write a number, or one of {', '.join(name for name in SCHEDULES if name != 'auto')}.",
        )
    return SCHEDULES[in_flight](stages, chunks, micro_batches)
