"""A generator and a critic, and updates of them; a test writes this file beside its recipe."""

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


def squares(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (output["real"] - 1).square().mean() + (output["made"] + 1).square().mean()


def ascend(param: Tensor, grad: Tensor, away: Tensor, *, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Go uphill, and note how far."""
    return param + lr * grad, lr * grad


def descend(param: Tensor, grad: Tensor, away: Tensor, *, lr: Tensor) -> tuple[Tensor, Tensor]:
    """Go back, and downhill along the gradient from there."""
    return param - away - lr * grad, torch.zeros_like(away)
