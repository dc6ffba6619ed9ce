"""Values for samples: drawn from one generator, so that every run sees the same."""

import torch

_random = torch.Generator().manual_seed(20240229)


def T(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    """Between 0.2 and 0.9: inside the domain of log, asin, atanh and sqrt."""
    return 0.2 + 0.7 * torch.rand(shape, generator=_random, dtype=torch.float64)


def below(high: int, *shape: int) -> torch.Tensor:
    """Whole numbers from 0 to high - 1."""
    return torch.randint(0, high, shape, generator=_random)


def mask(*shape: int) -> torch.Tensor:
    """Trues and falses, some of each: with one kind alone rows of `where` would hold by luck."""
    return shuffled(*shape) % 2 == 0


def whole_numbers(*shape: int) -> torch.Tensor:
    """0, 1, 2, 0, 1, 2 … as floats: many are equal, some are zero."""
    return (torch.arange(torch.Size(shape).numel()) % 3).double().reshape(shape)


def one_true(*shape: int) -> torch.Tensor:
    """False but for the first element, so that the ranks differ."""
    made = torch.zeros(shape, dtype=torch.bool)
    made.view(-1)[0] = True
    return made


def with_hole(hole: float, *shape: int) -> torch.Tensor:
    """Normal numbers, and one that is none."""
    made = T(*shape)
    made.view(-1)[1] = hole
    return made


def shuffled(*shape: int) -> torch.Tensor:
    """Whole numbers, each once, in a mixed order (the number of elements is no multiple of 11)."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 11 + 2) % count).double().reshape(shape)
