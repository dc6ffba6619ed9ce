"""A small convolutional net without batch normalisation, whose statistics would depend on how a
batch is split.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Grey images (B, size * size) -> logits (B, outputs).  size: pixels along a side, even.  C:
    channels.
    """

    def __init__(self, size: int, channels: int, outputs: int) -> None:
        super().__init__()
        self.size = size
        self.conv1 = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1)
        self.output = nn.Linear(2 * channels * (size // 2) ** 2, outputs)

    def forward(self, images_BP: Tensor) -> Tensor:
        x_BCHW = images_BP.view(-1, 1, self.size, self.size)
        x_BCHW = F.relu(self.conv1(x_BCHW))
        x_BCHW = F.max_pool2d(F.relu(self.conv2(x_BCHW)), 2)
        return self.output(x_BCHW.flatten(1))
