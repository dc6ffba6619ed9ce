"""prove: do the rows that one gives for an op hold?  Tried on simulated ranks of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import Sbp, Split
from flowrun.engine.ops.signature import Local, OpView, Signature, torch_callable
from flowrun.engine.ops.table import GivenTable, RowsOf
from flowrun.engine.proof.judge import on_one_axis
from flowrun.engine.proof.simulated_ranks import OpSample, row_failure, sample

PARTS = (2, 3, 4, 5)  # ranks: few sizes are divided by all of them

Arguments = Sequence[Any] | Mapping[str, Any]


class RowError(AssertionError):
    """A row that does not hold, and the sample that shows it."""


def prove(
    op: Any,
    rows: Sequence[Signature | str] | RowsOf,
    samples: Iterable[Arguments],
    *,
    local: Local | None = None,
) -> None:
    """Try each row of an op on 2 to 5 ranks, with every sample.

    op: "my::op" ("my::op.name" of another overload), or what torch.library.custom_op returns.
    rows: as text, ["S0, B -> S0"], or the function that `signatures` names in a recipe.
    samples: the arguments of a call each, in order or by name.  A row is tried where the dims that
    it splits are at least as long as there are ranks.  Let samples hold what the op treats apart
    (ignore_index, ties, zeros).
    local: the local program, as `signatures` names it.

    Raises RowError for the first row that does not hold, or that no sample tries; SbpError for what
    is no row of this op; ValueError without samples, and for an op that writes into its arguments.
    """
    target = _target(op)
    if torch_callable(target)._schema.is_mutable:
        raise ValueError(f"{target} writes into its arguments: no row can say so.")
    table = GivenTable(rows if callable(rows) else lambda view: rows, local, name=f"of {target}")
    tried: dict[Signature, bool] = {}
    given = [_sample(target, each, table) for each in samples]
    for each in given:
        for parts in PARTS:
            for row in table.rows(_view(each, parts)):
                fits = _fits(row, each, parts)
                tried[row] = tried.get(row, False) or fits
                if fits and (failure := row_failure(each, on_one_axis(row), (parts,))):
                    raise RowError(
                        f"{each.label} on {parts} ranks: {row} does not hold.\n{failure}"
                    )
    if not given:
        raise ValueError(f"There are no samples of {target}: nothing is proved.")
    for row, once in tried.items():
        if not once:
            raise RowError(f"{target}: no sample tries {row}: its dims are too short.")


def _target(op: Any) -> str:
    """ "my::op" -> "my.op.default"."""
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    name = op if isinstance(op, str) else str(getattr(op, "_qualname", op))
    namespace, _, rest = name.partition("::")
    target = f"{namespace}.{rest}" + ("" if "." in rest else ".default")
    try:
        torch_callable(target)
    except (AttributeError, RuntimeError):
        raise ValueError(f"torch knows no op {name!r}: import the file that defines it.") from None
    return target


def _sample(target: str, given: Arguments, table: GivenTable) -> OpSample:
    with torch.no_grad():
        made = sample(target, **given) if isinstance(given, Mapping) else sample(target, *given)
    return replace(made, op=replace(made.op, table=table))


def _view(given: OpSample, parts: int) -> OpView:
    return OpView(given.op, tuple(given.in_shapes), tuple(given.out_shapes), parts)


def _fits(row: Signature, given: OpSample, parts: int) -> bool:
    """True if every dim that the row splits can be split."""
    pairs: list[tuple[Sbp, Shape | None]] = [
        *zip(row.inputs, given.in_shapes, strict=True),
        *zip(row.outputs, given.out_shapes, strict=True),
    ]
    return all(
        shape is None or (sbp.dim < len(shape) and shape[sbp.dim] >= parts)
        for sbp, shape in pairs
        if isinstance(sbp, Split)
    )
