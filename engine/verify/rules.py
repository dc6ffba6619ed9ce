"""Promise: one promise of a level, as a function that finds what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from flowrun.engine.actors.plan import Actor, Register
from flowrun.engine.errors import PlanError
from flowrun.engine.ir.graph import Op

Checked = TypeVar("Checked")
REPORT = "This is a defect of flowrun's compiler: please report it with the recipe."


@dataclass(frozen=True, slots=True)
class Fault:
    """A place where a promise is broken.

    where: the op, variable, actor or register, as a person reads it.  found: the facts.
    """

    where: str
    found: str


@dataclass(frozen=True, slots=True)
class Promise(Generic[Checked]):
    """A promise that holds from one level on.

    since: the first level at which it holds.
    promise: one sentence.
    faults: yields each place where it does not hold.
    """

    since: str
    promise: str
    faults: Callable[[Checked], Iterable[Fault]]


def refuse_faults(
    rules: Iterable[Promise[Checked]], checked: Checked, level: str, made_by: str
) -> None:
    """Raise PlanError for the first fault that a rule finds.

    rules: those that hold at the level.  level, made_by: of what is checked, for the error; made_by
    is the name of a pass.
    """
    for rule in rules:
        for fault in rule.faults(checked):
            source = f", made by {made_by}" if made_by else ""
            raise PlanError(
                fault.where,
                f"{fault.found}\nAt level {level}{source}. Expected: {rule.promise}",
                REPORT,
            )


def find_repeated(names: Iterable[str]) -> Iterator[str]:
    """Yield every name that came before, once for each repetition."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def name_of(what: Op | Actor | Register) -> str:
    """An op, an actor or a register as errors name it."""
    if isinstance(what, Op):
        where = f"module {what.module or '-'}, {what.phase}, stage {what.stage}"
        return f"op {what.name} ({what.target}, {where})"
    kind = "actor" if isinstance(what, Actor) else "register"
    return f"{kind} {what.id} {what.name} (stage {what.stage})"
