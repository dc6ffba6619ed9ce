"""Placement: a named grid of ranks, and which slice of a tensor each rank of it holds.

Axes are ordered outermost first and ranks are row-major: rank k of `ranks` has the k-th coordinate
in lexicographic order. An nd-SBP is applied outer to inner: (S(0), S(0)) on a 2x3 grid splits dim 0
in 2, then each piece in 3. Uneven splits are balanced: of n pieces of a dimension of size t, the
first t mod n are one longer (OneFlow's rule).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.sbp import NdSbp, Owned, Split

Shape = tuple[int, ...]
Slices = tuple[tuple[int, int], ...]  # (start, length) along every dim of a tensor
BATCH_AXES = ("data", "dp", "batch")  # names of axes whose ranks divide the batch
LENGTH_AXES = ("context", "cp")  # of those whose ranks divide the length of each sample


def divide_samples(axis: str, samples: int, parts: int) -> int:
    """Return what each of `parts` ranks of an axis has of a micro-batch.  Raises RecipeError where
    its samples do not divide.
    """
    if samples % parts:
        raise RecipeError(
            f"placement.axes.{axis}",
            f"a micro-batch of {samples} samples cannot be divided over {parts} ranks.",
            "Choose train.batch_size and train.micro_batches so that "
            f"batch_size / micro_batches is a multiple of {parts}.",
        )
    return samples // parts


@dataclass(frozen=True)
class Placement:
    """A grid of ranks.

    axes: (name, size), outermost first; sizes of 1 are allowed.  ranks: row-major, len = product of
    the sizes.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == len(self.ranks), (
            f"{self.axes} does not hold {len(self.ranks)} ranks"
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: k for k, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._index

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a rank in the grid, one index for each axis."""
        k = self._index[rank]
        out: list[int] = []
        for size in reversed(self.shape):
            k, index = divmod(k, size)
            out.append(index)
        return tuple(reversed(out))

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        """The rank at a position of the grid."""
        k = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            k = k * size + index
        return self.ranks[k]

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in order of their coordinate."""
        here = self.coordinate(rank)
        return tuple(
            self.rank_at((*here[:axis], k, *here[axis + 1 :])) for k in range(self.shape[axis])
        )

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, each once, ordered by first rank."""
        firsts = (rank for rank in self.ranks if not self.coordinate(rank)[axis])
        return tuple(self.group(rank, axis) for rank in firsts)

    def slices(self, rank: int, shape: Shape, nd_sbp: NdSbp) -> Slices:
        """Return (start, length) along every dim of what a rank holds of a logical tensor."""
        return local_slices(shape, nd_sbp, self.shape, self.coordinate(rank))

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if not self.axes:
            return f"rank {first}"
        grid = " x ".join(f"{name} {size}" for name, size in self.axes)
        contiguous = self.ranks == tuple(range(first, last + 1))
        ranks = f"{first}-{last}" if contiguous and last > first else ",".join(map(str, self.ranks))
        return f"{grid} on ranks {ranks}"


def split_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index` of `size` elements cut into `parts` balanced pieces."""
    base, extra = divmod(size, parts)
    return index * base + min(index, extra), base + (index < extra)


def local_slices(
    shape: Shape, nd_sbp: NdSbp, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> Slices:
    """Return (start, length) along every dim of what the rank at `coordinate` holds.

    shape: logical.
    """
    slices = [(0, size) for size in shape]
    for sbp, parts, index in zip(nd_sbp, grid, coordinate, strict=True):
        if isinstance(sbp, Split):
            start, length = slices[sbp.dim]
            offset, length = split_range(length, parts, index)
            slices[sbp.dim] = (start + offset, length)
        elif isinstance(sbp, Owned) and sbp.owner != index and slices:
            slices[0] = (slices[0][0], 0)
    return tuple(slices)


def local_shape(
    shape: Shape, nd_sbp: NdSbp, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> Shape:
    """Return the lengths of local_slices.  grid: sizes of the axes of a placement."""
    return tuple(length for _, length in local_slices(shape, nd_sbp, grid, coordinate))


def largest_shape(shape: Shape, nd_sbp: NdSbp, grid: tuple[int, ...]) -> Shape:
    """Return the shape of the largest shard: what the rank at coordinate 0 holds, or an owner.

    shape, nd_sbp, grid: as for local_shape, which would be too slow here.
    """
    lengths = list(shape)
    for sbp, parts in zip(nd_sbp, grid, strict=True):
        if isinstance(sbp, Split):
            lengths[sbp.dim] = -(-lengths[sbp.dim] // parts)
    return tuple(lengths)


def left_over(shape: Shape, nd_sbp: NdSbp, grid: Sequence[int]) -> Shape:
    """Return the largest shard of `shape` on the first axes of a grid: those that nd_sbp covers."""
    return largest_shape(shape, nd_sbp, tuple(grid[: len(nd_sbp)]))
