"""registry: the one explicit list of signature tables and local programs; rows lifted to a grid.

Inference asks `signatures` for the rows of an op on one axis; a rank asks `localize` what to run in
place of the op.  An op that brings rows of its own (Op.table) is asked first.  Every row of RULES
is proved by tests/engine/ops/test_signatures.py, but for the few CUDA kernels that it names as
unproved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrun.engine.ir.graph import Op, Ref, map_refs
from flowrun.engine.ir.placement import Shape, left_over
from flowrun.engine.ir.sbp import B, Sbp, Split
from flowrun.engine.ops import (
    attention,
    batch_norm,
    check,
    conv,
    create,
    cross_entropy,
    ctc,
    embedding,
    grouped,
    index,
    loss,
    matmul,
    mirror,
    norm,
    pieces,
    pointwise,
    random,
    ranges,
    reduce,
    scaling,
    shape,
    sparse,
    strided,
    update,
)
from flowrun.engine.ops.signature import (
    Local,
    LocalCall,
    LocalView,
    NdSignature,
    OpView,
    Rule,
    Signature,
    torch_callable,
)

RULES: Mapping[str, Rule] = {
    **matmul.RULES,
    **grouped.RULES,
    **pointwise.RULES,
    **reduce.RULES,
    **shape.RULES,
    **pieces.RULES,
    **index.RULES,
    **norm.RULES,
    **batch_norm.RULES,
    **attention.RULES,
    **embedding.RULES,
    **conv.RULES,
    **loss.RULES,
    **cross_entropy.RULES,
    **ctc.RULES,
    **create.RULES,
    **random.RULES,
    **ranges.RULES,
    **update.RULES,
    **scaling.RULES,
    **sparse.RULES,
    **check.RULES,
    **strided.RULES,
}

LOCALS: Mapping[str, Local] = {
    **grouped.LOCALS,
    **reduce.LOCALS,
    **shape.LOCALS,
    **pieces.LOCALS,
    **index.LOCALS,
    **norm.LOCALS,
    **embedding.LOCALS,
    **conv.LOCALS,
    **loss.LOCALS,
    **cross_entropy.LOCALS,
    **create.LOCALS,
    **random.LOCALS,
    **ranges.LOCALS,
    **mirror.LOCALS,
    **update.LOCALS,
    **scaling.LOCALS,
    **sparse.LOCALS,
    **check.LOCALS,
    **strided.LOCALS,
}

_TENSOR = Ref("")
_cache: dict[Any, tuple[Signature, ...]] = {}


def has_table(target: str) -> bool:
    """True if a family of the engine has rows for it; False: its rows, if any, are op.table's."""
    return target in RULES


def signatures(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], parts: int
) -> tuple[Signature, ...]:
    """Legal rows of an op for one axis of `parts` ranks; the first is all-B.

    in_shapes, out_shapes: of op.inputs and op.outputs, as left over by the axes before.  A row that
    splits a dim that is not there, or is shorter than `parts`, is dropped.
    """
    key = (
        op.target,
        op.table,
        map_refs(op.args, _nameless),
        map_refs(op.kwargs, _nameless),
        tuple(in_shapes),
        tuple(out_shapes),
        parts,
    )
    found = _cache.get(key)
    if found is None:
        view = OpView(op, tuple(in_shapes), tuple(out_shapes), parts)
        found = _cache[key] = tuple(dict.fromkeys(_rows(view)))
    return found


def _nameless(_: Ref) -> Ref:
    return _TENSOR


def _rows(view: OpView) -> Iterator[Signature]:
    op = view.op
    yield Signature((B,) * len(op.inputs), (B,) * len(op.outputs))
    rule = op.table.rows if op.table is not None else RULES.get(op.target)
    if rule is None or view.parts == 1:
        return
    for row in rule(view):
        fits_in = all(map(_fits, row.inputs, view.in_shapes, (view.parts,) * len(row.inputs)))
        if fits_in and all(
            map(_fits, row.outputs, view.out_shapes, (view.parts,) * len(row.outputs))
        ):
            yield row


def _fits(sbp: Sbp, shape: Shape | None, parts: int) -> bool:
    """True if a tensor of this shape can have this SBP; an unused output always can."""
    if shape is None or not isinstance(sbp, Split):
        return True
    return sbp.dim < len(shape) and shape[sbp.dim] >= parts


def lift(
    op: Op, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None], grid: Sequence[int]
) -> tuple[NdSignature, ...]:
    """Rows for all axes of a grid: the product of rows, axis after axis, on the shapes left over.

    grid: sizes of the axes, outermost first.
    """
    if not grid:
        return (NdSignature(((),) * len(op.inputs), ((),) * len(op.outputs)),)
    lifted = []
    for row in signatures(op, in_shapes, out_shapes, grid[0]):
        left_in = [left_over(s, (sbp,), grid) for s, sbp in zip(in_shapes, row.inputs, strict=True)]
        left_out = [
            None if s is None else left_over(s, (sbp,), grid)
            for s, sbp in zip(out_shapes, row.outputs, strict=True)
        ]
        for rest in lift(op, left_in, left_out, grid[1:]):
            lifted.append(
                NdSignature(
                    tuple((sbp, *nd) for sbp, nd in zip(row.inputs, rest.inputs, strict=True)),
                    tuple((sbp, *nd) for sbp, nd in zip(row.outputs, rest.outputs, strict=True)),
                )
            )
    return tuple(lifted)


def localize(view: LocalView) -> LocalCall:
    """What one rank runs in place of the op: the torch operator itself, or the op's local program.

    A row with an expansion (Signature.reduced) has no local program: expansions/ replaces the op
    before.
    """
    op = view.op
    local = op.table.localize if op.table is not None else LOCALS.get(op.target)
    return local(view) if local else LocalCall(torch_callable(op.target), op.args, op.kwargs)
