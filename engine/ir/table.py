"""Table: rows of one op that no family of the engine has, carried by the op itself (Op.table).

Two kinds: FoundTable, rows that held in an experiment (engine/ops/proof/experiment.py), and
GivenTable, rows that a user gives for an op of his own (Strategy.signatures).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowrun.engine.errors import SbpError
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import OpInfo
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, Split
from flowrun.engine.ir.signature import (
    Local,
    LocalCall,
    LocalView,
    OpView,
    Signature,
    bind,
    rebind,
    rows,
    sizes,
    torch_callable,
)

# ---- found ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row that held in an experiment.

    sizes: (argument, position) of integers that are replaced by the local length of the dim that
    the row splits: the first input that is split says which.  Position -1: the argument is one
    integer.
    means: outputs that are multiplied by the rank's share of that dim: each is (or divides by the
    count of) a mean over it, and of a part it is a mean over the part.
    """

    signature: Signature
    sizes: tuple[tuple[str, int], ...] = ()
    means: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [name if at < 0 else f"{name}[{at}]" for name, at in self.sizes]
        text = f"{self.signature} | local {', '.join(words)}" if words else str(self.signature)
        return f"{text} | mean {', '.join(map(str, self.means))}" if self.means else text

    @property
    def anchor(self) -> tuple[int, int]:
        """(input, dim) of the first split input."""
        inputs = enumerate(self.signature.inputs)
        return next((i, sbp.dim) for i, sbp in inputs if isinstance(sbp, Split))


def parse_found_row(text: str) -> FoundRow:
    """Read what str() of a FoundRow prints."""
    row, *more = text.split(" | ")
    said = dict(word.split(" ", 1) for word in more)
    local, mean = (said[key].split(", ") if key in said else () for key in ("local", "mean"))
    words = (word.rstrip("]").partition("[") for word in local)
    places = tuple((name, int(at or -1)) for name, _, at in words)
    return FoundRow(rows(row)[0], places, tuple(map(int, mean)))


def local_call(
    op: Op, by_axis: Sequence[tuple[FoundRow, Sequence[Shape], Sequence[Shape]]]
) -> LocalCall:
    """Return the call that a rank runs: the op on its pieces, as the row of each axis says.

    by_axis: of each axis the row, the shapes of the inputs, and those of the rank's pieces.
    """
    changed: dict[str, Any] = {}
    by_dim: dict[tuple[int, int, int], float] = {}  # output, input, dim: several axes may split it
    for row, shapes, pieces in by_axis:
        if not (row.sizes or row.means):
            continue
        tensor, dim = row.anchor
        length = pieces[tensor][dim]
        for name, at in row.sizes:
            value = changed.get(name, bind(op)[name])
            if at >= 0:
                assert isinstance(value, tuple), value
                changed[name] = (*value[:at], length, *value[at + 1 :])
            else:
                changed[name] = length
        for output in row.means:
            by_dim[output, tensor, dim] = length / shapes[tensor][dim]
    shares: dict[int, float] = {}
    for (output, _, _), share in by_dim.items():
        shares[output] = shares.get(output, 1.0) * share
    call = rebind(op, **changed)
    if not shares:
        return call
    return LocalCall(times_shares, (op.target, tuple(shares.items()), *call.args), call.kwargs)


def times_shares(
    target: str, shares: tuple[tuple[int, float], ...], *args: object, **kwargs: object
) -> object:
    """Return the outputs of the op `target`, some multiplied: `shares` has (output, factor)."""
    outputs = torch_callable(target)(*args, **kwargs)
    if isinstance(outputs, torch.Tensor):
        return outputs * shares[0][1]
    by_output = dict(shares)
    return tuple(v * by_output[k] if k in by_output else v for k, v in enumerate(outputs))


@dataclass(frozen=True, slots=True)
class FoundTable:
    """Rows by experiment."""

    found: tuple[FoundRow, ...]

    @property
    def origin(self) -> str:
        """Name the origin of the rows, for a note."""
        return "found by experiment"

    def rows(self, view: OpView) -> tuple[Signature, ...]:
        """All of them; registry.py drops those that do not fit the shapes."""
        return tuple(each.signature for each in self.found)

    def localize(self, view: LocalView) -> LocalCall:
        """The op, as the row of each axis says."""
        by_signature = {row.signature: row for row in self.found}
        pieces = [sizes(slices) for slices in view.in_slices]
        sides = (zip(*nd_sbps, strict=True) for nd_sbps in (view.op.in_sbp, view.op.out_sbp))
        axes = (Signature(ins, outs) for ins, outs in zip(*sides, strict=True) if set(ins) != {B})
        return local_call(view.op, [(by_signature[row], view.in_shapes, pieces) for row in axes])

    def over(self, known: OpInfo) -> OpInfo:
        """Return what is known of the op, with these rows."""
        return replace(known, rule=self.rows, local=self.localize)


# ---- given ---------------------------------------------------------------------------------------

Measure = Callable[[Sequence[Shape], Sequence["Shape | None"]], float]
RowsOf = Callable[[OpView], "Sequence[Signature | str]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTable:
    """Rows that a user gives for an op of his own.

    rule: view -> rows, as text or Signatures; the one that is all B may be left out.
    local: view -> what a rank runs; None: the op itself, on the pieces.
    cost_flops, cost_seconds: (shapes of inputs, shapes of outputs) on one rank -> floating-point
    operations, or seconds; None: the op is foreseen to take the time of its bytes.
    name: where it was given, for notes.
    """

    rule: RowsOf
    local: Local | None = None
    cost_flops: Measure | None = None
    cost_seconds: Measure | None = None
    name: str = "the user"

    @property
    def origin(self) -> str:
        """Name the origin of the rows, for a note."""
        return f"given by {self.name}"

    def rows(self, view: OpView) -> tuple[Signature, ...]:
        """Return the rows of the user's rule.  Raises SbpError if one does not fit this op."""
        return tuple(self._row(each, view) for each in self.rule(view))

    def _row(self, given: Signature | str, view: OpView) -> Signature:
        op = view.op
        try:
            row = rows(given)[0] if isinstance(given, str) else given
        except ValueError as error:
            raise SbpError(self.name, f"{given!r} is not a row: {error}") from None
        if (len(row.inputs), len(row.outputs)) != (len(op.inputs), len(op.outputs)):
            raise SbpError(
                self.name,
                f"row {row} has {len(row.inputs)} inputs and {len(row.outputs)} outputs; "
                f"{op.target} reads {len(op.inputs)} tensors and makes {len(op.outputs)}.",
                "Write an SBP for each, as in 'S(0), B -> S(0)'.",
            )
        return row

    def localize(self, view: LocalView) -> LocalCall:
        """The user's local program, or the op itself."""
        return self.local(view) if self.local else rebind(view.op)

    def over(self, known: OpInfo) -> OpInfo:
        """Return what is known of the op, with the user's rows and costs."""
        cost = known.cost
        if (flops := self.cost_flops) is not None:
            cost = replace(cost, flops=lambda _, read, made: float(flops(read, made)))
        cost = replace(cost, seconds=self.cost_seconds)
        return replace(known, rule=self.rows, local=self.localize, cost=cost)


OpTable = FoundTable | GivenTable


def table_of(op: Op) -> OpTable | None:
    """Return the table that an op brings itself."""
    assert op.table is None or isinstance(op.table, FoundTable | GivenTable), op
    return op.table
