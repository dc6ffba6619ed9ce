"""A generative adversarial network (Goodfellow et al. 2014) of images: generator and critic as
one module, and the loss of each, as `updates` of a recipe name them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ImageGan(nn.Module):
    """A generator, and a critic of its images and of real ones.

    forward: images (B, pixels) in 0..1, and noise (B, noise), which is drawn if it is not given ->
    logits (B, 1) of the real images and of those that were made.
    """

    def __init__(self, pixels: int = 64, width: int = 128, noise: int = 16) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, pixels),
            nn.Sigmoid(),
        )
        self.critic = nn.Sequential(
            nn.Linear(pixels, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def forward(self, images: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        if noise is None:
            noise = torch.randn(len(images), self.noise, device=images.device)
        return {"real": self.critic(images), "made": self.critic(self.generator(noise))}


def critic_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the critic's cross entropy: real images are 1, made ones 0."""
    return F.softplus(-output["real"]).mean() + F.softplus(output["made"]).mean()


def generator_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the generator's: the critic should take what it made for real."""
    return F.softplus(-output["made"]).mean()
