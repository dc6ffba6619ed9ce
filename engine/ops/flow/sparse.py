"""Gradients of embedding tables as rows: `flow.collect`, `flow.coalesce`, `flow.update_rows`.

A look-up touches few rows of a table.  Its gradient is kept as (ids, rows), collected over the
micro-batches, summed for equal ids, and only those rows of the table and of its states are updated:
nothing of a step's cost grows with the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flowrun.engine.ir.graph import refs
from flowrun.engine.ir.op_info import OpCost, OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import LocalCall, LocalView, OpRows, OpView, Signature, rows
from flowrun.engine.ops.flow.update import Changed, one_or_all

Tensor = torch.Tensor
NOBODY = -1  # the id of a row that changes nothing
AT_ONCE = frozenset({"cpu"})  # devices that compute at once: shapes may follow from values


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """An optimizer that is applied to some rows.  Prints, and is compared, by name.

    function: (param, grad, *states, *, lr, …) -> (new param, *new states), on rows.
    """

    name: str
    function: Callable[..., Changed] = field(repr=False)

    def __str__(self) -> str:
        return self.name


# ---- functions -----------------------------------------------------------------------------------


def collect(
    grad: Tensor, ids: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids (K,) and rows (K, D) of a gradient `grad` (…, D) and `ids` (…).

    dtype: of the rows, if not the gradient's.  The runtime appends them to those of the
        micro-batches before.
    """
    return ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(dtype or grad.dtype)


def coalesce(
    ids: Sequence[Tensor], grads: Sequence[Tensor], paddings: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Sum the rows of equal ids of several look-ups: ids (K,), sums (K, D).

    paddings: of each look-up, an id whose rows count for nothing (-1: none).

    Each id comes once, in rising order; positions left over have the id -1 and sum 0.  The shapes
    do not depend on the ids, so no device waits for another.
    """
    seen = [
        i if padding < 0 else i.masked_fill(i == padding, NOBODY)
        for i, padding in zip(ids, paddings, strict=True)
    ]
    order = torch.cat(seen) if len(seen) > 1 else seen[0]
    values = torch.cat(list(grads)) if len(grads) > 1 else grads[0]
    order, where = order.sort(stable=True)
    begins = torch.ones_like(order)
    begins[1:] = order[1:] != order[:-1]
    place = begins.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add_(0, place, values.index_select(0, where))
    unique = torch.full_like(order, NOBODY).scatter_(0, place, order)
    return unique, sums.masked_fill_((unique == NOBODY).unsqueeze(-1), 0)


def update_rows(
    param: Tensor,
    ids: Tensor,
    sums: Tensor,
    *states: Tensor,
    by: RowUpdate,
    start: int = 0,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
    **numbers: Any,
) -> Changed:
    """Update the rows `ids` of a table and of its states in place, by the gradients `sums` of the
    rows.

    param, states: rows [start, start + n) of the table.
    ids: each once, -1 for nobody.
    by: the optimizer; numbers: its settings.
    coefficient: scalar that multiplies the gradient first.
    skip: where it is true nothing changes.
    """
    here = ids - start
    mine = (ids != NOBODY) & (here >= 0) & (here < param.shape[0])
    if ids.device.type in AT_ONCE or not len(param):
        chosen = mine.nonzero().squeeze(1)
    else:
        chosen, nobody = one_for_others(mine)
        here = here.clamp(0, len(param) - 1)
        skip = nobody if skip is None else skip | nobody
    here, grad = here.index_select(0, chosen), sums.index_select(0, chosen)
    if coefficient is not None:
        grad = grad * coefficient
    changed = (param, *states)
    old = [x.index_select(0, here) for x in changed]
    # an op that works in place may not spoil what `skip` keeps
    given = old if skip is None else [x.clone() for x in old]
    new = by.function(given[0], grad.to(param.dtype), *given[1:], **numbers)
    new = (new,) if isinstance(new, Tensor) else new
    for x, before, after in zip(changed, old, new, strict=True):
        kept = after if skip is None else torch.where(skip, before, after)
        x.index_copy_(0, here, kept.to(x.dtype))
    return one_or_all(changed)


def one_for_others(mine: Tensor) -> tuple[Tensor, Tensor]:
    """Return as many positions as `mine` (K,) has, those that are false replaced by one that is
    true; and whether none is.

    The host need not wait to know how many are true; a row that is written several times gets the
    same values.
    """
    places = torch.arange(len(mine), device=mine.device)
    return torch.where(mine, places, mine.to(torch.uint8).argmax()), ~mine.any()


# ---- signatures ----------------------------------------------------------------------------------


def rows_of_collect(view: OpView) -> OpRows:
    """(grad (…, D), ids (…)) -> (ids (K,), rows (K, D)), whose order means nothing as long as both
    have the same: samples split, and columns.
    """
    grad, ids = view.in_shapes
    once = view.out_shapes[0] in (None, (math.prod(ids),))
    # A part of the samples is a part of the rows: where the parts' parts are equal, too.
    even = bool(ids) and (grad[0] % view.parts == 0 or (once and len(ids) == 1))
    samples = rows("S0,S0 -> S0,S0") if even else ()
    columns = Signature((S(len(ids)), B), (B, S(1)))
    return (*samples, columns, Signature((P, B), (B, P)))


def rows_of_coalesce(view: OpView) -> OpRows:
    """Columns are independent, and sums linear in the rows.  Two ranks may hold rows of one id."""
    count = len(view.op.args[0])
    return tuple(Signature((B,) * count + (sbp,) * count, (B, sbp)) for sbp in (S(1), P))


def rows_of_update(view: OpView) -> OpRows:
    """(table, ids, sums, states …, scalars …): a table split by rows takes its own ids of all."""
    states = len(refs(view.op.args)) - 3
    scalars = (B,) * (len(view.in_shapes) - 3 - states)
    return tuple(
        Signature((home, B, sums, *(home,) * states, *scalars), (home,) * (1 + states))
        for home, sums in ((S(0), B), (S(1), S(1)))
    )


def local_update(view: LocalView) -> LocalCall:
    """The rows that are here."""
    start = view.in_slices[0][0][0]
    return LocalCall(update_rows, view.op.args, (*view.op.kwargs, ("start", start)))


COLLECT, COALESCE, UPDATE_ROWS = "flow.collect", "flow.coalesce", "flow.update_rows"

OPS: Mapping[str, OpInfo] = {
    COLLECT: OpInfo(
        rows_of_collect,
        function=collect,
        traits=(Trait.SUM,),
        cost=OpCost(moved_bytes=lambda op, read, made: 2 * sum(read)),  # `made` is of a whole step
    ),
    COALESCE: OpInfo(rows_of_coalesce, function=coalesce, traits=(Trait.PLAIN,)),
    UPDATE_ROWS: OpInfo(
        rows_of_update,
        local=local_update,
        function=update_rows,
        traits=(Trait.IN_PLACE, Trait.PLAIN),
        cost=OpCost(
            moved_bytes=lambda op, read, made: 3 * len(op.outputs) * read[2], counted_input=2
        ),
    ),
}
