"""Signatures and local programs of embeddings.

Split indices split the output; split columns split its last dim.  Split rows (a vocabulary too
large for one rank) look up what they have and zero elsewhere, so the output is P (Megatron-LM's
vocabulary-parallel embedding, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import IDS, LookUp, OpCost, OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.ir.signature import (
    Labels,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
    labelled_rows,
)


def _positions(view: OpView) -> Labels:
    return tuple(f"i{d}" for d in range(len(view.in_shapes[1])))


def embedding(view: OpView) -> OpRows:
    """(weight (V, D), indices (…)) -> (…, D)."""
    where = _positions(view)
    return (
        *labelled_rows([(None, "d"), where], [(*where, "d")]),
        Signature((S(0), B), (P,)),
        Signature((P, B), (P,)),
    )


def embedding_backward(view: OpView) -> OpRows:
    """(grad (…, D), indices (…)) -> (V, D): a sum over positions, linear in the gradient.

    Rows are independent of each other, so any can be made alone.
    """
    where = _positions(view)
    by_freq = view.given["scale_grad_by_freq"]  # would count the indices of a part
    contracted = {} if by_freq else dict.fromkeys(where, P)
    return (
        *labelled_rows([(*where, "d"), where], [(None, "d")], contracted),
        Signature((B, B), (S(0),)),
        Signature((P, B), (P,)),
    )


# ---- local programs: rows [start, start + rows) of the table -------------------------------------


def look_up_rows(weight: torch.Tensor, indices: torch.Tensor, start: int) -> torch.Tensor:
    """Return rows of a piece of the table; zeros where the index belongs to another rank.

    weight: rows [start, start + n) of the table.  indices: into the whole table.
    """
    here = indices - start
    outside = (here < 0) | (here >= weight.shape[0])
    looked_up = torch.ops.aten.embedding.default(weight, here.masked_fill_(outside, 0))
    return looked_up.masked_fill_(outside.unsqueeze(-1), 0)  # type: ignore[no-any-return]


def rows_gradient(
    grad: torch.Tensor, indices: torch.Tensor, start: int, rows: int, padding: int, by_freq: bool
) -> torch.Tensor:
    """Return the gradient of rows [start, start + rows) of the table.

    grad, indices: of all positions.  padding, by_freq: as of aten.embedding_dense_backward.
    Indices of other ranks fall into one row too many, which is cut off.
    """
    here = indices - start
    here = here.masked_fill_((here < 0) | (here >= rows), rows)
    own_padding = padding - start if start <= padding < start + rows else rows
    result = torch.ops.aten.embedding_dense_backward.default(
        grad, here, rows + 1, own_padding, by_freq
    )
    return result[:rows]  # type: ignore[no-any-return]


def local_embedding(view: LocalView) -> LocalCall:
    """The op itself where all rows are here."""
    start, rows = view.in_slices[0][0]
    if rows == view.in_shapes[0][0]:
        return view.rebind()
    return LocalCall(look_up_rows, (*view.op.args[:2], start))


def local_embedding_backward(view: LocalView) -> LocalCall:
    """The op itself where all rows are made here."""
    given, held = view.given, view.out_slices[0]
    if held is None or held[0][1] == given["num_weights"]:
        return view.rebind()
    rest = (given["padding_idx"], given["scale_grad_by_freq"])
    return LocalCall(rows_gradient, (*view.op.args[:2], *held[0], *rest))


EMBEDDING_BACKWARD = "aten.embedding_dense_backward.default"
_BAG = LookUp(table="weight", ids="indices", dim=0, words=IDS)

OPS: Mapping[str, OpInfo] = {
    "aten.embedding.default": OpInfo(
        embedding,
        local=local_embedding,
        looks_up=LookUp(table="weight", ids="indices", dim=0, words=IDS, by_mask=True),
        cost=OpCost(moved_bytes=lambda op, read, made: sum(read[1:]) + sum(made)),  # no whole table
    ),
    EMBEDDING_BACKWARD: OpInfo(
        embedding_backward, local=local_embedding_backward, traits=(Trait.PLAIN,)
    ),
    "aten._embedding_bag.default": OpInfo(looks_up=_BAG),
    "aten._embedding_bag_forward_only.default": OpInfo(looks_up=_BAG),
}
