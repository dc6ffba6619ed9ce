"""The state of a run's life: frozen values, and what holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.supervise.life.events import Asked, Company, StartPoint
from flowrun.launcher.supervise.life.halts import Halts
from flowrun.launcher.supervise.life.instructions import End, Instruction
from flowrun.launcher.supervise.life.verdicts import Attempts, Blame, Rollbacks, Terms


class Life(Enum):
    """What a run awaits; see machine.py."""

    MEETING, TRAINING, PARTING, FINISHING, RESTING, PLANNING, OVER = range(7)


@dataclass(frozen=True, kw_only=True)
class Round:
    """The ranks of a round.

    halts: what is asked of them.  blame: why they end.  ended: ranks that have ended well.  bad:
    steps begun by the end of one whose numbers are not finite; 0: no such.  files: of each
    checkpoint that is being written, those that are on the disk.  lingers: a timer is set, after
    which they are killed.  verdict: how they have ended.  finished: the first host has written all.
    rests: only a pause is left before the next round.
    """

    halts: Halts
    blame: Blame = field(default_factory=Blame)
    ended: frozenset[int] = frozenset()
    bad: int = 0
    files: Mapping[int, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    lingers: bool = False
    verdict: End | None = None
    finished: bool = False
    rests: bool = False


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run on one host.

    place: where its ranks begin, or have begun.  reached: steps done.  round: of ranks that run, or
    of the last.  attempts, rollbacks: so far.  lost: why ranks are to begin again, which is not
    written down yet.  waiting: requests that wait for ranks to run.
    """

    terms: Terms
    phase: Life
    round: Round
    attempts: Attempts
    place: StartPoint = field(default_factory=StartPoint)
    reached: int = 0
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    lost: Reason | None = None
    waiting: tuple[Asked, ...] = ()

    @property
    def company(self) -> Company:
        return self.round.halts.company


Move = tuple[RunState, tuple[Instruction, ...]]


def new_round(terms: Terms, company: Company, place: StartPoint) -> Round:
    """Return a round whose ranks begin at a place."""
    return Round(halts=Halts(terms=terms, company=company, saved=place.saved))


def in_round(state: RunState, **known: object) -> RunState:
    """Return the state with other fields of its round."""
    return replace(state, round=replace(state.round, **known))  # type: ignore[arg-type]


def violations(state: RunState) -> tuple[str, ...]:
    """Return the invariants that a state breaks: none for every state that the machine reaches."""
    terms, halts, phase, waits = state.terms, state.round.halts, state.phase, bool(state.waiting)
    blame, verdict, files = state.round.blame, state.round.verdict, state.round.files
    rules = (
        (halts.halt is not None and halts.ending is None, "it halts, and nobody has asked for it"),
        (halts.halt is not None and halts.halt > terms.steps, "it halts after the last step"),
        (halts.mine is not None and not halts.current, "a gate is frozen for nobody"),
        (not state.round.ended <= set(range(terms.num_ranks)), "a rank has ended that is not here"),
        (any(len(f) >= terms.num_ranks for f in files.values()), "a whole checkpoint"),
        (bool(files) and state.company.number > 0, "another host's files"),
        (verdict is not None and phase is Life.TRAINING, "an early verdict"),
        (verdict is None and phase is Life.RESTING, "it rests without a verdict"),
        (phase is Life.FINISHING and not state.company.number, "the first waits for itself"),
        (waits and phase is Life.TRAINING, "a request waits, though ranks run"),
        (phase is Life.OVER and waits, "a request waits for ever"),
        (not 0 <= state.place.saved <= state.place.step, "it begins before a checkpoint"),
        (state.reached < 0, "it has done less than nothing"),
        (blame.killed and phase is Life.MEETING, "ranks are killed that do not run"),
    )
    return tuple(broken for is_broken, broken in rules if is_broken)
