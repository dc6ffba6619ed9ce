"""registry: the one explicit list of families; what is known of an op, found by its target.

Inference asks `signatures` for the rows of an op on one axis; a rank asks `localize` what to run in
place of the op; all else is read of `info(target)`, or of `info_of(op)` where an op may bring rows
of its own (Op.table).  Every row is proved by tests/engine/ops/test_signatures.py, but for the few
CUDA kernels that it names as unproved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowrun.engine.ir.expansion import Expansion
from flowrun.engine.ir.graph import LogicalTensor, Op, Ref, map_refs
from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import B, Sbp, Split
from flowrun.engine.ir.signature import (
    LocalCall,
    LocalView,
    OpView,
    Signature,
    bind,
    places,
    torch_callable,
)
from flowrun.engine.ir.table import table_of
from flowrun.engine.ops.experts import dropless
from flowrun.engine.ops.flow import (
    check,
    random,
    ranges,
    recurrent,
    rounding,
    scaling,
    sparse,
    structure,
    update,
)
from flowrun.engine.ops.math import grouped, matmul, pointwise, reduce
from flowrun.engine.ops.nn import (
    attention,
    batch_norm,
    chunked_head,
    conv,
    cross_entropy,
    embedding,
    loss,
    norm,
    softmax,
)
from flowrun.engine.ops.shapes import create, index, shape, slice_cat, strided

_FAMILIES = (
    *(matmul, grouped, pointwise, reduce),
    *(shape, slice_cat, index, strided, create),
    *(norm, batch_norm, attention, embedding, conv),
    *(softmax, loss, cross_entropy, chunked_head, dropless),
    *(random, ranges, check, update, rounding, scaling, sparse, structure, recurrent),
)
OPS: Mapping[str, OpInfo] = {
    target: known for family in _FAMILIES for target, known in family.OPS.items()
}
_UNKNOWN = OpInfo()


# ---- by target -----------------------------------------------------------------------------------


def info(target: str) -> OpInfo:
    """Return what is known of the op; OpInfo() of an op that no family has."""
    return OPS.get(target, _UNKNOWN)


def info_of(op: Op) -> OpInfo:
    """Return what is known of the op; rows that it brings itself go before those of its family."""
    known, table = info(op.target), table_of(op)
    return known if table is None else table.over(known)


def has_table(target: str) -> bool:
    """True if a family of the engine has rows for it; False: its rows, if any, are op.table's."""
    return info(target).rule is not None


def whole_function(target: str) -> Callable[..., Any]:
    """Return the function that the op applies to whole tensors."""
    return info(target).function or torch_callable(target)  # type: ignore[no-any-return]


def arguments_of(op: Op) -> dict[str, Any]:
    """Return arguments of an op by name, in order; of the engine's own ops, if it names them."""
    names = info(op.target).arguments
    return dict(zip(names, op.args, strict=True)) if names else bind(op)


def needs_whole(op: Op) -> bool:
    """Return whether one rank runs an op of the update that has an owner: a product."""
    return Trait.PRODUCT in info(op.target).traits


# ---- rows ----------------------------------------------------------------------------------------

_TENSOR = Ref("")
_cache: dict[object, tuple[Signature, ...]] = {}


def signatures(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], parts: int
) -> tuple[Signature, ...]:
    """Return legal rows of an op for one axis of `parts` ranks; the first is all-B.

    in_shapes, out_shapes: of op.inputs and op.outputs, as left over by the axes before.  A row that
    splits a dim that is not there, or is shorter than `parts`, is dropped.
    """
    view = OpView(op, tuple(in_shapes), tuple(out_shapes), parts)
    given = map_refs((op.args, op.kwargs), lambda _: _TENSOR)
    key = (op.target, op.table, given, view.in_shapes, view.out_shapes, parts)
    legal = _cache.get(key)
    if legal is None:
        legal = _cache[key] = tuple(dict.fromkeys(_rows(view)))
    return legal


def _rows(view: OpView) -> Iterator[Signature]:
    op = view.op
    yield Signature((B,) * len(op.inputs), (B,) * len(op.outputs))
    rule = info_of(op).rule
    if rule is None or view.parts == 1:
        return
    for row in rule(view):
        shapes = zip(row.inputs + row.outputs, view.in_shapes + view.out_shapes, strict=True)
        if all(_fits(sbp, shape, view.parts) for sbp, shape in shapes):
            yield row


def _fits(sbp: Sbp, shape: Shape | None, parts: int) -> bool:
    """True if a tensor of this shape can have this SBP; an unused output always can."""
    if shape is None or not isinstance(sbp, Split):
        return True
    return sbp.dim < len(shape) and shape[sbp.dim] >= parts


RowsOn = Callable[[int, Sequence[Shape], Sequence[Shape | None]], Iterable[Signature]]


def lift(
    rows_on: RowsOn,
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape | None],
    grid: Sequence[int],
    axis: int = 0,
) -> Iterator[tuple[Signature, ...]]:
    """Yield a Signature for each axis of a grid: rows on one axis, then on the shapes left over."""
    if axis == len(grid):
        yield ()
        return
    parts = (grid[axis],)
    for row in rows_on(axis, in_shapes, out_shapes):
        ins = [left_over(s, (sbp,), parts) for s, sbp in zip(in_shapes, row.inputs, strict=True)]
        outs = [
            None if s is None else left_over(s, (sbp,), parts)
            for s, sbp in zip(out_shapes, row.outputs, strict=True)
        ]
        for rest in lift(rows_on, ins, outs, grid, axis + 1):
            yield (row, *rest)


# ---- what runs in place of an op -----------------------------------------------------------------


def localize(view: LocalView) -> LocalCall:
    """Return the call that one rank runs: the op's local program, or the op itself on its pieces.

    A row with an expansion (Signature.reduced) has no local program: `expand` replaces the op
    before.
    """
    op = view.op
    local = info_of(op).local
    return local(view) if local else LocalCall(whole_function(op.target), op.args, op.kwargs)


def needs_expansion(op: Op, tensors: Mapping[str, LogicalTensor]) -> bool:
    """True if the op, by its in_sbp, splits a dim that it reduces; tensors: by name."""
    known = info(op.target).expands
    if known is None or not op.in_sbp:
        return False
    reduced = known.dims(op, tensors)
    at = places(op).index(known.argument)
    return any(isinstance(sbp, Split) and sbp.dim in reduced for sbp in op.in_sbp[at])


def expand(
    op: Op, tensors: Mapping[str, LogicalTensor], grid: Sequence[int]
) -> tuple[tuple[Op, ...], tuple[LogicalTensor, ...]]:
    """Return (ordinary ops in order, the tensors they make in between).  The last ones make
    op.outputs.

    op: one that needs an expansion.  grid: ranks of each axis of its stage.
    """
    known = info(op.target).expands
    assert known is not None, f"{op.target} has no expansion"
    written = Expansion(op=op, grid=tuple(grid), tensors=tensors, dims=known.dims(op, tensors))
    known.write(written)
    return written.done()
