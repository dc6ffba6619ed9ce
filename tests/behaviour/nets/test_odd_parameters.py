"""Parameters unlike most: narrow, complex, of no dims, frozen ones that forward changes."""

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.ops.flow.update import adamw, sgd
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


NARROW = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adamw"])
def test_an_update_is_that_of_torchs_optimizer_in_every_dtype(
    name: str, dtype: torch.dtype
) -> None:
    """torch's own fused kernel of SGD is wrong in bf16 and fp16 on a CPU."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, dtype=dtype, generator=generator)
    plain, own = nn.Parameter(start.clone()), start.clone()
    momentum = 0.0 if name == "sgd" else 0.9
    given = {"momentum": momentum, "nesterov": name == "nesterov", "weight_decay": 0.01}
    optimizer: torch.optim.Optimizer
    if name == "adamw":
        optimizer = torch.optim.AdamW([plain], lr=0.1, eps=1e-3, foreach=False)
    else:
        optimizer = torch.optim.SGD([plain], lr=0.1, foreach=False, **given)  # type: ignore[arg-type]
    states = [torch.zeros_like(own) for _ in range({"sgd": 0, "adamw": 2}.get(name, 1))]
    for step in range(1, 4):
        grad = torch.randn(100, dtype=dtype, generator=generator)
        plain.grad = grad.clone()
        optimizer.step()
        rate, number = torch.tensor(0.1), torch.tensor(float(step))
        if name == "adamw":
            numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "weight_decay": 0.01}
            adamw(own, grad, *states, lr=rate, step=number, **numbers)
        else:
            sgd(own, grad, *states, lr=rate, **given)
    torch.testing.assert_close(own, plain.detach(), rtol=1e-5, atol=1e-6)
