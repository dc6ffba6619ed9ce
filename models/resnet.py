"""ResNet v1.5 (He et al., arXiv 1512.03385; 1.5: the stride is in the 3x3 convolution).

Shapes in names: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_EXPANSION = 4  # channels that leave a bottleneck, over those inside


class Convolution(nn.Module):
    """Convolution without bias, then batch normalisation.  size: of the kernel, odd."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.norm(self.conv(x_BCHW))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to a shortcut.  The 3x3 one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.reduce = Convolution(inputs, width, 1)
        self.spatial = Convolution(width, width, 3, stride)
        self.expand = Convolution(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else Convolution(inputs, outputs, 1, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = torch.relu(self.reduce(x_BCHW))
        y_BCHW = torch.relu(self.spatial(y_BCHW))
        return torch.relu(self.expand(y_BCHW) + self.shortcut(x_BCHW))


class Stem(nn.Module):
    """The first convolution: 7x7 with stride 2 and a pool, or for small images 3x3 alone."""

    def __init__(self, width: int, small_images: bool) -> None:
        super().__init__()
        self.first = Convolution(3, width, 3) if small_images else Convolution(3, width, 7, 2)
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, padding=1)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.pool(torch.relu(self.first(images_BCHW)))


class ResNet(nn.Module):
    """Images (B, 3, H, W) -> logits (B, outputs).

    blocks: bottlenecks of each group; [3, 4, 6, 3] is ResNet-50, [3, 4, 23, 3] ResNet-101.  The
    first of every group but the first halves height and width.
    width: channels inside the first group, doubled with each next; ResNet-50 has 64.
    small_images: the stem does not shrink images, which have about 32 pixels along a side.
    """

    def __init__(
        self, blocks: Sequence[int], width: int, outputs: int, small_images: bool = False
    ) -> None:
        super().__init__()
        self.stem = Stem(width, small_images)
        inside = [width * 2**group for group in range(len(blocks))]
        leaving = [width, *(_EXPANSION * w for w in inside)]
        self.groups = nn.ModuleList(
            nn.Sequential(
                *(
                    Bottleneck(outer if k == 0 else made, w, 2 if k == 0 and group else 1)
                    for k in range(count)
                )
            )
            for group, (count, w, (outer, made)) in enumerate(
                zip(blocks, inside, pairwise(leaving), strict=True)
            )
        )
        self.head = nn.Linear(leaving[-1], outputs)
        self._initialise()

    def _initialise(self) -> None:
        """Draw normal convolutions with a deviation of sqrt(2 / fan out).

        A bottleneck starts as its shortcut: the scale of its last norm is 0 (Goyal et al., arXiv
        1706.02677, section 5.1).
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.expand.norm.weight)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(images_BCHW)
        for group in self.groups:
            x_BCHW = group(x_BCHW)
        return self.head(x_BCHW.mean((2, 3)))
