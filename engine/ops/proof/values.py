"""Numbers for experiments are such that no wrong row survives them by luck.

Each kind is a function of a dtype and a shape.  Floats are float64 wherever the op takes it, so
that a difference is more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.ir.placement import Shape

# (shape, generator) -> float64
Floats = Callable[[Shape, torch.Generator], torch.Tensor]


def _normal(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=random, dtype=torch.float64)


def _ties(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Whole numbers from -2 to 2: many are equal, some are zero."""
    return torch.randint(-2, 3, shape, generator=random).double()


def _positive(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Between 0.05 and 0.95: probabilities, and inside the domain of logarithms and roots."""
    return 0.05 + 0.9 * torch.rand(shape, generator=random, dtype=torch.float64)


def _wide(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Draw normal numbers times powers of ten from a thousandth to a thousand."""
    return _normal(shape, random) * 10 ** (6 * torch.rand(shape, generator=random).double() - 3)


def _large(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Around a million: beyond bounds that an op may cut at."""
    return _normal(shape, random) * 1e6


def _equal(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """A vector is one number; of a matrix the first row is: were all so, it would be singular."""
    x = _normal(shape, random)
    if shape:
        row = x[..., 0, :] if len(shape) > 1 else x
        row.copy_(row[..., :1].clone().expand_as(row))
    return x


def _definite(shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Square matrices are symmetric and positive definite."""
    x = _normal(shape, random)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return x
    return x @ x.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)


FLOATS: Mapping[str, Floats] = {
    "mixed": _normal,
    "ties": _ties,
    "positive": _positive,
    "wide": _wide,
    "large": _large,
    "equal": _equal,
    "definite": _definite,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Values of all inputs of an op.

    floats: of FLOATS.  below: integers are smaller, so that they are positions of any dim; ordered:
    they rise from 0 in even steps, as offsets do.
    wide: floats are float64, complex numbers complex128, whatever the op has.
    mark: about a third of all numbers are this one, where the dtype has it; None: as they fall.
    """

    floats: str
    below: int
    wide: bool = True
    ordered: bool = False
    mark: int | float | None = None

    def value(self, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """Draw one input of this shape and dtype; seed: another for each input."""
        numbers = self._draw_value(shape, dtype, seed)
        if self.mark is None or not _has(dtype, self.mark):
            return numbers
        random = torch.Generator().manual_seed(1000 + seed)
        return numbers.masked_fill_(torch.rand(shape, generator=random) < 1 / 3, self.mark)

    def _draw_value(self, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1 + seed)
        make = FLOATS[self.floats]
        if dtype.is_floating_point:
            return make(shape, random).to(torch.float64 if self.wide else dtype)
        if dtype.is_complex:
            numbers = torch.complex(make(shape, random), _normal(shape, random))
            return numbers.to(torch.complex128 if self.wide else dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=random) < 0.5
        # LAPACK counts rows that it swaps from 1, in 32 bits
        first = 1 if dtype == torch.int32 else 0
        if self.ordered:
            steps = torch.linspace(first, max(self.below - 1, first), max(*shape[-1:], 1))
            return steps.long().expand(shape or (1,)).reshape(shape).to(dtype)
        return torch.randint(first, max(self.below, first + 1), shape, generator=random).to(dtype)


def _has(dtype: torch.dtype, number: int | float) -> bool:
    if dtype.is_floating_point:
        return True
    if dtype.is_complex or dtype == torch.bool:
        return False
    return number == int(number) and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
