"""Signature: one legal row (input SBPs -> output SBPs) of an op, for ONE axis; and what a rule or a local program is given.

A rule is a function `rule(view) -> Iterable[Signature]`; registry.py holds the one explicit table target -> rule and lifts
rows to n axes by a product, axis after axis, on the shape that is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowrun.engine.graph import Op
from flowrun.engine.placement import Shape, Slices
from flowrun.engine.sbp import Sbp, parse_sbp


@dataclass(frozen=True, slots=True)
class Signature:
    """One row, for one axis.

    inputs: an SBP for each of op.inputs.  outputs: an SBP for each of op.outputs (an entry for unused ones too).
    reduced: elements of statistics that the row's expansion reduces over the axis inside the op (0: no expansion);
    a row with an expansion is replaced by ordinary ops and boxings (see ops/expansions.py).
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    reduced: int = 0

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class OpView:
    """What a rule sees: an op, the shapes left over by the axes before, and the number of parts of this axis.

    in_shapes: one for each of op.inputs.  out_shapes: one for each of op.outputs (None where unused and unknown).
    """

    op: Op
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape | None, ...]
    parts: int


@dataclass(frozen=True, slots=True)
class LocalView:
    """What a local program sees: an op and which slices of its inputs and outputs this rank holds (all axes together).

    in_slices, out_slices: ((start, length), …) along every dim of the logical tensor, for each of op.inputs / op.outputs.
    in_shapes, out_shapes: the logical shapes.
    """

    op: Op
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape | None, ...]
    in_slices: tuple[Slices, ...]
    out_slices: tuple[Slices | None, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank runs in place of the op: function(*args, **kwargs), with Refs where tensors go."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


Rule = Callable[[OpView], "tuple[Signature, ...]"]


def rows(*texts: str) -> tuple[Signature, ...]:
    """Rows from text: rows("S0,B -> S0", "P,B -> P")."""
    return tuple(_row(text) for text in texts)


def _row(text: str) -> Signature:
    left, right = text.split("->")
    return Signature(_sbps(left), _sbps(right))


def _sbps(text: str) -> tuple[Sbp, ...]:
    return tuple(parse_sbp(word) for word in text.split(",") if word.strip())
