"""Rules: promises of a level, each a function that finds what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from flowrun.engine.actors.plan import Actor, Register
from flowrun.engine.errors import PlanError
from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.strategy import Strategy

Checked = TypeVar("Checked")
REPORT = "This is a defect of flowrun's compiler: please report it with the recipe."


@dataclass(frozen=True, slots=True)
class Fault:
    """A place where a promise is broken, and the facts."""

    where: str | Op | Actor | Register
    found: str


# level -> the rules that hold from it on; the first line of a rule's docstring is its promise
Rules = Mapping[str, tuple[Callable[[Checked], Iterable[Fault]], ...]]


@dataclass(frozen=True)
class Subject:
    """A graph, the strategy that it is compiled for, and what rules ask about both repeatedly."""

    graph: LogicalGraph
    strategy: Strategy

    def grid(self, stage: int) -> tuple[int, ...]:
        """Sizes of the axes of a stage."""
        return self.strategy.placements[stage].shape

    @cached_property
    def locations(self) -> dict[str, tuple[int, NdSbp]]:
        """Tensor -> the stage and nd-SBP in which it enters or is made."""
        places = {source.tensor: (source.stage, source.nd_sbp) for source in self.graph.sources}
        for op in self.graph.ops:
            for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=False):
                if name is not None:
                    places[name] = (op.stage, nd_sbp)
        return places


def refuse_faults(
    rules: Rules[Checked], checked: Checked, levels: Sequence[str], level: str, made_by: str
) -> None:
    """Raise PlanError for the first fault that a rule finds.

    levels: all, in order.  level, made_by: of what is checked; made_by is the name of a pass.
    """
    for since in levels[: levels.index(level) + 1]:
        for rule in rules.get(since, ()):
            for fault in rule(checked):
                source = f", made by {made_by}" if made_by else ""
                promise = str(rule.__doc__).partition("\n")[0]
                problem = f"{fault.found}\nAt level {level}{source}. Expected: {promise}"
                raise PlanError(name_of(fault.where), problem, REPORT)


def find_repeated(names: Iterable[str]) -> Iterator[str]:
    """Yield every name that came before, once for each repetition."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def name_of(what: str | Op | Actor | Register) -> str:
    """An op, an actor or a register as errors name it."""
    if isinstance(what, str):
        return what
    if isinstance(what, Op):
        where = f"module {what.module or '-'}, {what.phase}, stage {what.stage}"
        return f"op {what.name} ({what.target}, {where})"
    kind = "actor" if isinstance(what, Actor) else "register"
    return f"{kind} {what.id} {what.name} (stage {what.stage})"
