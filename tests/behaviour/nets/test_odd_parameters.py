"""Parameters unlike most: narrow, complex, of no dims, frozen ones that forward changes."""

import pytest
import torch
from torch import Tensor, nn

from support.layouts.grids import Layout
from support.nets.odd_models import DATA, STAGES, WIDTH, ZERO, Net, assert_trains_alike, trains_of


class Scaled(Net):
    """Scales by a number, and by a complex weight between Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.w = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int16))

    def between(self, z: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(torch.relu(z)) * self.w, n=WIDTH) * self.scale


class Momentum(Net):
    """A frozen copy of a weight follows it, by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def between(self, z: Tensor) -> Tensor:
        with torch.no_grad():
            self.copy.mul_(0.9).add_(self.a.weight, alpha=0.1)
        return torch.tanh(z + z @ self.copy)


@pytest.mark.parametrize("layout", [DATA, STAGES, ZERO], ids=str)
@pytest.mark.parametrize("model", [Scaled, Momentum])
def test_an_odd_parameter_trains_as_in_plain_torch(model: type[Net], layout: Layout) -> None:
    assert_trains_alike(trains_of(model), layout)
