"""Tiles: some ops on some rows of their tensors, then on the next (lowering/tile.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from flowrun.engine.ir.placement import split_range
from flowrun.engine.runtime.kernels.program import Tile

Tensor = torch.Tensor
TileKernel = Callable[[list[Tensor]], tuple[Tensor, ...]]

_PIECE_BYTES = 1 << 21  # stays in the cache of a core; a device that is not a CPU has larger ones
_DEVICE_PIECE_BYTES = 1 << 26


def tiled(tile: Tile, whole: TileKernel, rows: TileKernel) -> Callable[..., tuple[Tensor, ...]]:
    """Of the tensors read, what is made.  whole, rows: the tile's programs.

    Where a tensor does not lie row after row, the ops run one after the other as they are.
    """

    def run(*reads: Tensor) -> tuple[Tensor, ...]:
        if not all(x.is_contiguous() for x, cut in zip(reads, tile.cut, strict=True) if cut):
            return whole(list(reads))
        made = [
            torch.empty(m.shape, dtype=m.dtype, device=reads[0].device)
            if m.over is None
            else reads[m.over]
            for m in tile.made
        ]
        cut = (*tile.cut, *(True for _ in made))
        flat = [_flat(x, c) for x, c in zip((*reads, *made), cut, strict=True)]
        for start, length in _pieces([x for x, c in zip(flat, cut, strict=True) if c]):
            rows([x[start : start + length] if c else x for x, c in zip(flat, cut, strict=True)])
        return tuple(made)

    return run


def _flat(x: Tensor, cut: bool) -> Tensor:
    """A matrix, or what stands beside each of its rows."""
    if x.dim() < 2:
        return x
    return x.view(-1, x.shape[-1]) if cut else x.reshape(x.shape[-1])


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(first row, rows): never one by itself, whose sum all threads would take together."""
    count = tensors[0].shape[0]
    row_bytes = max(math.prod(x.shape[1:]) * x.itemsize for x in tensors)
    most = _PIECE_BYTES * torch.get_num_threads() if tensors[0].is_cpu else _DEVICE_PIECE_BYTES
    pieces = max(1, min(count // 2, math.ceil(count * row_bytes / most)))
    return (split_range(count, pieces, k) for k in range(pieces))
