"""prove: check the signature rows that a user gives for an op, on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import Sbp, Split
from flowrun.engine.ir.signature import Local, NdSignature, OpView, Signature, torch_callable
from flowrun.engine.ir.table import GivenTable, RowsOf
from flowrun.engine.ops.proof.simulated_ranks import OpSample, row_failure, sample
from flowrun.engine.torch_internals import OpOverload, schema_of

RANK_COUNTS = (2, 3, 4, 5)  # few sizes are divisible by all of them, so uneven splits are tried

Arguments = Sequence[Any] | Mapping[str, Any]


class RowError(AssertionError):
    """A row that does not hold, with the sample that shows it."""


def prove(
    op: object,
    rows: Sequence[Signature | str] | RowsOf,
    samples: Iterable[Arguments],
    *,
    local: Local | None = None,
) -> None:
    """Check each row of an op on 2 to 5 simulated ranks, with every sample.

    op: "my::op" ("my::op.overload" for another overload), or the result of
        torch.library.custom_op.
    rows: rows as text, ["S0, B -> S0"], or the function that `signatures` names in a recipe.
    samples: arguments of one call each, as a sequence (by position) or a mapping (by name).  A row
        is tried on a sample if every dim that it splits is at least as long as the number of
        ranks.  Include the values that the op treats specially (ignore_index, ties, zeros).
    local: the local program of the op, as `signatures` names it in a recipe; None: the op itself.

    Raise RowError for the first row that does not hold or that no sample tries, SbpError for text
    that is no row of this op, and ValueError if there are no samples or if the op writes into its
    arguments.
    """
    target = _target(op)
    if schema_of(torch_callable(target)).is_mutable:
        raise ValueError(f"{target} writes into its arguments; rows describe pure ops only.")
    table = GivenTable(
        rule=rows if callable(rows) else lambda view: rows, local=local, name=f"of {target}"
    )
    tried: dict[Signature, bool] = {}
    given = [_sample(target, each, table) for each in samples]
    for each in given:
        for parts in RANK_COUNTS:
            for row in table.rows(_view(each, parts)):
                fits = _fits(row, each, parts)
                tried[row] = tried.get(row, False) or fits
                if fits and (failure := row_failure(each, NdSignature.of([row]), (parts,))):
                    raise RowError(
                        f"{each.label} on {parts} ranks: {row} does not hold.\n{failure}"
                    )
    if not given:
        raise ValueError(f"prove({target}) needs at least one sample.")
    for row, once in tried.items():
        if not once:
            raise RowError(
                f"{target}: no sample tries {row}, as the dims that it splits are too short."
            )


def _target(op: object) -> str:
    """Return the target of an op, "my.op.default" of "my::op"; raise ValueError if unknown."""
    if isinstance(op, OpOverload):
        return str(op)
    name = op if isinstance(op, str) else str(getattr(op, "_qualname", op))
    namespace, _, rest = name.partition("::")
    target = f"{namespace}.{rest}" + ("" if "." in rest else ".default")
    try:
        torch_callable(target)
    except (AttributeError, RuntimeError):
        raise ValueError(
            f"torch knows no op {name!r}; import the module that defines it first."
        ) from None
    return target


def _sample(target: str, given: Arguments, table: GivenTable) -> OpSample:
    with torch.no_grad():
        made = sample(target, **given) if isinstance(given, Mapping) else sample(target, *given)
    return replace(made, op=replace(made.op, table=table))


def _view(given: OpSample, parts: int) -> OpView:
    return OpView(given.op, tuple(given.in_shapes), tuple(given.out_shapes), parts)


def _fits(row: Signature, given: OpSample, parts: int) -> bool:
    """Return whether every dim that the row splits is at least `parts` long."""
    pairs: list[tuple[Sbp, Shape | None]] = [
        *zip(row.inputs, given.in_shapes, strict=True),
        *zip(row.outputs, given.out_shapes, strict=True),
    ]
    return all(
        shape is None or (sbp.dim < len(shape) and shape[sbp.dim] >= parts)
        for sbp, shape in pairs
        if isinstance(sbp, Split)
    )
