"""draws: random ops whose numbers depend only on the order of the draws.

A module and its captured graph draw by different ops (`bernoulli_` on a tensor of any strides,
`native_dropout`).  Under `Draws` both get the same numbers at the same logical positions.  Each
draw takes a seed from torch's generator, so that a function that restores the generator's state, as
`torch.utils.checkpoint` does, draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrun.engine.capture.patches.substitutes import multinomial
from flowrun.engine.torch_internals import DispatchMode, OpOverload

_ATEN = torch.ops.aten


class Draws(DispatchMode):
    """A dispatch mode under which a random op draws from a generator of its own."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        seed = int(torch.empty((), dtype=torch.int64).random_())
        draw = _DRAWS.get(func)
        if draw is None:
            torch.manual_seed(seed)
            return func(*args, **kwargs)
        return draw(torch.Generator().manual_seed(seed), *args, **kwargs)


def _below(x: Tensor, p: float | Tensor, generator: torch.Generator) -> Tensor:
    """Draw a mask that is True with probability p."""
    return torch.empty(x.shape).uniform_(generator=generator) < p


def _native_dropout(
    g: torch.Generator, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool)
    mask = _below(x, 1 - p, g)
    return (x * mask).mul_(0.0 if p == 1.0 else 1 / (1 - p)), mask


def _bernoulli(
    g: torch.Generator, x: Tensor, p: float | Tensor | None = None, generator: object = None
) -> Tensor:
    return _below(x, x if p is None else p, g).to(x.dtype)


def _uniform(
    g: torch.Generator, x: Tensor, low: float = 0, high: float = 1, generator: object = None
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).uniform_(low, high, generator=g)


def _normal(
    g: torch.Generator, x: Tensor, mean: float = 0, std: float = 1, generator: object = None
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).normal_(mean, std, generator=g)


def _in_place(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda g, x, *args, **kwargs: x.copy_(draw(g, x, *args, **kwargs))


_DRAWS: Mapping[object, Callable[..., object]] = {
    _ATEN.native_dropout.default: _native_dropout,
    _ATEN.bernoulli_.float: lambda g, x, p=0.5, **how: x.copy_(_bernoulli(g, x, p)),
    _ATEN.bernoulli_.Tensor: _in_place(_bernoulli),
    _ATEN.bernoulli.default: _bernoulli,
    _ATEN.bernoulli.p: _bernoulli,
    _ATEN.bernoulli.Tensor: _bernoulli,
    _ATEN.uniform_.default: _in_place(_uniform),
    _ATEN.uniform.default: _uniform,
    _ATEN.normal_.default: _in_place(_normal),
    _ATEN.normal_functional.default: _normal,
    _ATEN.multinomial.default: lambda g, x, n, replacement=False, **_: multinomial(
        x, n, replacement, generator=g
    ),
}
