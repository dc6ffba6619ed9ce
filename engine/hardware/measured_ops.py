"""Measured ops: factors between measured and foreseen time of ops that were timed on this machine.

Two convolutions of different shapes may differ by a factor of four in efficiency, and only the
library knows which is which.  An op that was timed has its own factor.  The same op with other
shapes has the factor of the nearest shapes, by the ratios of the dims: the formula scales with the
shapes, the factor stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from flowrun.engine.ir.placement import Shape

Shapes = tuple[Shape, ...]


class Factors(dict[str, dict[str, float]]):
    """Op target -> its shapes as text (`text_of`) -> measured seconds divided by foreseen seconds.

    Instances never change; caches distinguish them by identity.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]


def text_of(dtype: str, shapes: Sequence[Shape]) -> str:
    """Return an op as text: the dtype of its first output, its inputs, its first output: "fp32 8x64
    64x32 8x32"; a scalar is "1".
    """
    return " ".join([dtype, *("x".join(map(str, shape or (1,))) for shape in shapes)])


@lru_cache(maxsize=1 << 16)
def shapes_of(text: str) -> tuple[str, Shapes]:
    """Parse the text that `text_of` writes into (dtype, shapes).  Raises ValueError."""
    dtype, *shapes = text.split(" ")
    return dtype, tuple(tuple(map(int, shape.split("x"))) for shape in shapes)


@lru_cache(maxsize=1 << 16)
def factor(known: Factors, target: str, dtype: str, shapes: Shapes) -> float:
    """Return the factor of the measured op that is nearest to an op: of the same target, dtype and
    numbers of dims; without any it is 1.
    """
    best, least = 1.0, math.inf
    for others, value in _group_by_dims(known, target, dtype).get(tuple(map(len, shapes)), ()):
        distance = _distance(shapes, others, least)
        if distance < least:
            best, least = value, distance
    return best


@lru_cache(maxsize=1 << 12)
def _group_by_dims(
    known: Factors, target: str, dtype: str
) -> Mapping[tuple[int, ...], list[tuple[Shapes, float]]]:
    """Return numbers of dims -> the measured shapes that have these, with their factors."""
    groups: dict[tuple[int, ...], list[tuple[Shapes, float]]] = {}
    for text, value in known.get(target, {}).items():
        of, shapes = shapes_of(text)
        if of == dtype:
            groups.setdefault(tuple(map(len, shapes)), []).append((shapes, value))
    return groups


def _distance(one: Shapes, other: Shapes, least: float) -> float:
    """Return the octaves between the shapes of two ops, summed over dims; cut off at `least`."""
    total = 0.0
    for these, those in zip(one, other, strict=True):
        pairs = zip(these, those, strict=True)
        total += sum([abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs if a != b])
        if total >= least:
            break
    return total
