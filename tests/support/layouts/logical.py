"""Logical tensors laid out on simulated ranks, and put together again: the oracle of boxing tests.

Slicing is written apart from transport/transport.py, so that the two check each other.
"""

import functools
import itertools
from collections.abc import Mapping

import torch

from flowrun.engine.boxing.boxing import states, step_bytes
from flowrun.engine.ir.placement import Placement, Slices, local_slices
from flowrun.engine.ir.sbp import NdSbp, Partial
from flowrun.engine.runtime.transport.transport import (
    REDUCTIONS,
    BucketLayout,
    layout_of,
    local_step,
    run_group,
)

Pieces = dict[int, torch.Tensor]


def line(parts: int, first: int = 0) -> Placement:
    return Placement((("axis", parts),), tuple(range(first, first + parts)))


def grid_placement(grid: tuple[int, ...], first: int = 0) -> Placement:
    """A placement of unnamed axes on consecutive ranks."""
    size = len(list(itertools.product(*map(range, grid))))
    axes = tuple((f"axis{k}", n) for k, n in enumerate(grid))
    return Placement(axes, tuple(range(first, first + size)))


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of small distinct whole numbers of both signs: every sum of parts of it is exact."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) - count // 3).reshape(shape).to(dtype)


def lay_out(logical: torch.Tensor, nd_sbp: NdSbp, placement: Placement) -> Pieces:
    """What each rank holds; parts of a P are unlike each other, and of mixed signs."""
    pieces = {}
    for rank in placement.ranks:
        coordinate = placement.coordinate(rank)
        piece = logical.clone()
        for axis, (sbp, parts) in enumerate(zip(nd_sbp, placement.shape, strict=True)):
            if isinstance(sbp, Partial) and parts > 1:
                piece = _part(piece, sbp.reduce, coordinate[axis], parts)
        slices = local_slices(tuple(logical.shape), nd_sbp, placement.shape, coordinate)
        pieces[rank] = piece[tuple(slice(a, a + n) for a, n in slices)].clone()
    return pieces


def _part(tensor: torch.Tensor, reduce: str, index: int, parts: int) -> torch.Tensor:
    """Part `index` of a partial tensor; the parts reduce to the tensor exactly."""
    if reduce == "sum":
        others = torch.arange(1, parts) * 7 - 10
        return (
            tensor - others.sum()
            if index == 0
            else torch.full_like(tensor, others[index - 1].item())
        )
    away = {"max": -1, "min": 1, "logsumexp": -200}[reduce]  # exp(-200) is lost beside 1
    return tensor if index == parts - 1 else tensor + away * (index + 1)


def put_together(
    pieces: Mapping[int, torch.Tensor], nd_sbp: NdSbp, placement: Placement, shape: tuple[int, ...]
) -> torch.Tensor:
    """The logical tensor; fails where B copies differ in a bit.

    Parts of a P are gathered first, each from the ranks of one coordinate, and then reduced.
    """
    partial = [axis for axis, sbp in enumerate(nd_sbp) if isinstance(sbp, Partial)]
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    seen: dict[tuple[tuple[int, ...], Slices], torch.Tensor] = {}
    for rank, piece in pieces.items():
        coordinate = placement.coordinate(rank)
        part = tuple(coordinate[axis] for axis in partial)
        held = local_slices(shape, nd_sbp, placement.shape, coordinate)
        assert tuple(piece.shape) == tuple(length for _, length in held)
        assert torch.equal(piece, seen.setdefault((part, held), piece)), "B copies differ"
        whole = parts.setdefault(part, torch.empty(shape, dtype=piece.dtype))
        whole[tuple(slice(start, start + length) for start, length in held)] = piece
    wide = {
        sbp.reduce
        for sbp, n in zip(nd_sbp, placement.shape, strict=True)
        if n > 1 and isinstance(sbp, Partial)
    }
    return functools.reduce(REDUCTIONS[next(iter(wide), "sum")], parts.values())


def box(
    pieces: Mapping[int, torch.Tensor],
    source: NdSbp,
    target: NdSbp,
    placement: Placement,
    shape: tuple[int, ...],
) -> tuple[Pieces, int, float]:
    """Run the path from source to target: (pieces, bytes counted on the way, bytes foretold)."""
    grid, out = placement.shape, dict(pieces)
    sent, foretold = 0, 0.0
    num_bytes = torch.Size(shape).numel() * next(iter(pieces.values())).element_size()
    for step, state in states(source, target, grid, shape):
        if not step.moves:
            for rank, piece in out.items():
                out[rank] = local_step(step, piece, shape, state, grid, placement.coordinate(rank))
            continue
        foretold += step_bytes(step, state, grid, num_bytes)
        for group in placement.groups(step.axis):
            layout = layout_of(step, shape, state, grid, placement.coordinate(group[0]))
            pieces = [[out[rank]] for rank in group]
            done, bytes_sent = run_group(step, pieces, BucketLayout((layout,)))
            sent += sum(bytes_sent)
            out.update({rank: bucket[0] for rank, bucket in zip(group, done, strict=True)})
    return out, sent, foretold
