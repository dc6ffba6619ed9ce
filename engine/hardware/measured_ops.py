"""Measured ops: how far off the formula is for ops that were timed on this machine, each with its
shapes; and what that says of the same op with others.

What a library makes of one convolution and of the next differs by a factor of four, and no rule
short of the library says where.  Of an op that was timed its own factor counts; of the same op with
other shapes that of the nearest, by the ratios of its dims: the formula scales, the factor stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from flowrun.engine.ir.placement import Shape

Shapes = tuple[Shape, ...]


class Factors(dict[str, dict[str, float]]):
    """Op target -> its shapes as text (`text_of`) -> seconds measured over those foreseen without.

    Never changed; told apart by identity where answers are kept.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]


def text_of(dtype: str, shapes: Sequence[Shape]) -> str:
    """The dtype of the first output, then inputs and first output: "fp32 8x64 64x32 8x32"; a
    scalar is "1".
    """
    return " ".join([dtype, *("x".join(map(str, shape or (1,))) for shape in shapes)])


@lru_cache(maxsize=1 << 16)
def shapes_of(text: str) -> tuple[str, Shapes]:
    """What `text_of` wrote.  Raises ValueError."""
    dtype, *shapes = text.split(" ")
    return dtype, tuple(tuple(map(int, shape.split("x"))) for shape in shapes)


@lru_cache(maxsize=1 << 16)
def factor(known: Factors, target: str, dtype: str, shapes: Shapes) -> float:
    """Of the nearest that was measured; 1 of an op that was not, with that dtype and as many
    dims.
    """
    best, least = 1.0, math.inf
    for others, value in _parsed(known, target, dtype).get(tuple(map(len, shapes)), ()):
        away = _away(shapes, others, least)
        if away < least:
            best, least = value, away
    return best


@lru_cache(maxsize=1 << 12)
def _parsed(
    known: Factors, target: str, dtype: str
) -> Mapping[tuple[int, ...], list[tuple[Shapes, float]]]:
    """Numbers of dims -> the shapes that have these, with what was measured."""
    found: dict[tuple[int, ...], list[tuple[Shapes, float]]] = {}
    for text, value in known.get(target, {}).items():
        of, shapes = shapes_of(text)
        if of == dtype:
            found.setdefault(tuple(map(len, shapes)), []).append((shapes, value))
    return found


def _away(one: Shapes, other: Shapes, least: float) -> float:
    """How far two ops' shapes are from each other: octaves, over all dims; or `least` and more."""
    total = 0.0
    for these, those in zip(one, other, strict=True):
        pairs = zip(these, those, strict=True)
        total += sum([abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs if a != b])
        if total >= least:
            break
    return total
