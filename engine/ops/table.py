"""Table: rows of one op that no family of the engine has, carried by the op itself (Op.table).

Two kinds: FoundTable, rows that held in an experiment (engine/proof/experiment.py), and GivenTable,
rows that a user gives for an op of his own (Strategy.signatures).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrun.engine.ops.signature import (
    Call,
    Local,
    LocalView,
    OpView,
    Rule,
    Signature,
    bind,
    rebound,
    rows,
)
from flowrun.engine.placement import Shape
from flowrun.engine.sbp import Broadcast, Sbp, Split


class Table(Protocol):
    """What registry.py asks of an op that brings its own rows."""

    @property
    def origin(self) -> str:
        """Where the rows come from, in the words of a note."""

    def rows(self, view: OpView) -> tuple[Signature, ...]:
        """Legal rows for one axis, without the one that is all B."""

    def localize(self, view: LocalView) -> Call:
        """What one rank runs in place of the op."""

    def flops(self, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float | None:
        """Floating-point operations on shapes that one rank holds; None: not known."""


# ---- found ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row that held in an experiment.

    sizes: (argument, position) of integers that are replaced by the local length of the dim that
    the row splits: the first input that is split says which.  Position -1: the argument is one
    integer.
    """

    signature: Signature
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        words = [name if at < 0 else f"{name}[{at}]" for name, at in self.sizes]
        return f"{self.signature}" + (f" | local {', '.join(words)}" if words else "")

    @property
    def anchor(self) -> tuple[int, int]:
        """(input, dim) of the first split input."""
        splits = (
            (i, sbp.dim) for i, sbp in enumerate(self.signature.inputs) if isinstance(sbp, Split)
        )
        return next(splits)


def parse_found(text: str) -> FoundRow:
    """Read what str() of a FoundRow prints."""
    row, _, words = text.partition(" | local ")
    sizes = []
    for word in (w.strip() for w in words.split(",") if w.strip()):
        name, _, at = word.rstrip("]").partition("[")
        sizes.append((name, int(at) if at else -1))
    return FoundRow(rows(row)[0], tuple(sizes))


@dataclass(frozen=True, slots=True)
class FoundTable:
    """Rows by experiment."""

    found: tuple[FoundRow, ...]

    @property
    def origin(self) -> str:
        """In the words of a note."""
        return "found by experiment"

    def rows(self, view: OpView) -> tuple[Signature, ...]:
        """All of them; registry.py drops those that do not fit the shapes."""
        return tuple(each.signature for each in self.found)

    def localize(self, view: LocalView) -> Call:
        """The op, with the integers that name a split size replaced by the local one."""
        op = view.op
        changed: dict[str, object] = {}
        given = bind(op) if any(row.sizes for row in self.found) else {}
        for inputs, outputs in _axes(op.in_sbp, op.out_sbp):
            row = next((r for r in self.found if r.signature == Signature(inputs, outputs)), None)
            if row is None or not row.sizes:
                continue
            tensor, dim = row.anchor
            length = view.in_slices[tensor][dim][1]
            for name, at in row.sizes:
                changed[name] = replaced(changed.get(name, given[name]), at, length)
        return rebound(op, **changed)

    def flops(self, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float | None:
        """An experiment does not tell."""
        return None


def _axes(
    in_sbp: Sequence[Sequence[Sbp]], out_sbp: Sequence[Sequence[Sbp]]
) -> list[tuple[tuple[Sbp, ...], tuple[Sbp, ...]]]:
    """The row of every axis, outermost first; axes where all is B change nothing."""
    num_axes = len(next(iter((*in_sbp, *out_sbp)), ()))
    found = [
        (tuple(nd[axis] for nd in in_sbp), tuple(nd[axis] for nd in out_sbp))
        for axis in range(num_axes)
    ]
    return [row for row in found if not all(isinstance(sbp, Broadcast) for sbp in row[0])]


def replaced(value: object, at: int, length: int) -> object:
    """An argument with one of its integers replaced; at -1 it is that integer."""
    if at < 0:
        return length
    assert isinstance(value, tuple), value
    return (*value[:at], length, *value[at + 1 :])


# ---- given ---------------------------------------------------------------------------------------

Flops = Callable[[Sequence[Shape], Sequence["Shape | None"]], float]


@dataclass(frozen=True, slots=True)
class GivenTable:
    """Rows that a user gives for an op of his own.

    rule: view -> rows, the one that is all B left out.
    local: view -> what a rank runs; None: the op itself, on the pieces.
    cost: (shapes of inputs, shapes of outputs) on one rank -> floating-point operations; None: the
        op is foreseen to take the time of its bytes.
    name: where it was given, for notes.
    """

    rule: Rule
    local: Local | None = None
    cost: Flops | None = None
    name: str = ""

    @property
    def origin(self) -> str:
        """In the words of a note."""
        return f"given by {self.name}"

    def rows(self, view: OpView) -> tuple[Signature, ...]:
        """As the user's rule says."""
        return tuple(self.rule(view))

    def localize(self, view: LocalView) -> Call:
        """The user's local program, or the op itself."""
        return self.local(view) if self.local else rebound(view.op)

    def flops(self, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float | None:
        """As the user's cost says."""
        return None if self.cost is None else float(self.cost(in_shapes, out_shapes))
