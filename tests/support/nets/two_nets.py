"""A generator and a critic, and updates of them; a test writes this file beside its recipe."""

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 8, generator=generator) * 2 + 1
        self.z = torch.randn(samples, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "z": self.z[index]}


class TwoNets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        return {"real": self.critic(x), "made": self.critic(self.generator(z))}


def critic_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return F.softplus(-output["real"]).mean() + F.softplus(output["made"]).mean()


def generator_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return F.softplus(-output["made"]).mean()


def of_rows(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return output["made"].square().flatten()


def squares(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (output["real"] - 1).square().mean() + (output["made"] + 1).square().mean()


def ascend(param: Tensor, grad: Tensor, away: Tensor, *, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Go uphill, and note how far."""
    return param + lr * grad, lr * grad


def descend(param: Tensor, grad: Tensor, away: Tensor, *, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Go back, and downhill along the gradient from there."""
    return param - away - lr * grad, torch.zeros_like(away)


class SlowCritic(TwoNets):
    """Its forward moves a slow critic, which the generator's loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.critic).requires_grad_(False)

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return {"slow": self.slow(x), **super().forward(x, z)}


def slow_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return critic_loss(output, batch) + F.mse_loss(output["real"], output["slow"])


def backwards(seed: int, epoch: int, numbers: Tensor, *, num_samples: int) -> Tensor:
    """An order of samples that any loop can follow."""
    return (num_samples - 1 - numbers + epoch) % num_samples


def real_squares(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (output["real"] - 1).square().mean()


def made_squares(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (output["made"] + 1).square().mean()


def hold(param: Tensor, grad: Tensor, held: Tensor, *, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the gradient of one task for the other."""
    return param, grad


def join(param: Tensor, grad: Tensor, held: Tensor, *, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Descend along both gradients, each without what it has against the other."""
    against = (grad * held).sum().clamp(max=0)
    one = held - against / grad.square().sum().clamp(min=1e-20) * grad
    other = grad - against / held.square().sum().clamp(min=1e-20) * held
    return param - lr * (one + other), torch.zeros_like(held)


class Penalised(TwoNets):
    """Its forward also has the critic's gradient between real and made points."""

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        between = ((x + self.generator(z).detach()) / 2).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return {"slope": slope, **super().forward(x, z)}


def penalised_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Gulrajani et al. 2017."""
    penalty = (output["slope"].norm(dim=-1) - 1).square().mean()
    return output["made"].mean() - output["real"].mean() + 10 * penalty
