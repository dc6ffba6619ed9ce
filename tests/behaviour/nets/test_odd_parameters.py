"""Parameters and buffers unlike most: complex, of no dims, without elements."""

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


@pytest.mark.parametrize("layout", [DATA, STAGES, ZERO], ids=str)
def test_an_odd_parameter_trains_as_in_plain_torch(layout: Layout) -> None:
    assert_trains_alike(trains_of(Scaled), layout)
