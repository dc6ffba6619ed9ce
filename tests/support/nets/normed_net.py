"""A small net with batch norms, and its training."""

import torch
from torch import Tensor, nn

from support.layouts.plain_loop import classifier, pins


class Normed(nn.Module):
    """A convolution and a linear layer, each with a batch norm behind it; one has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.linear, self.norm2 = nn.Linear(6 * 16, 8), nn.BatchNorm1d(8, momentum=0.3)
        self.output, self.norm3 = nn.Linear(8, 10), nn.BatchNorm1d(10, affine=False)

    def forward(self, x_BP: Tensor) -> Tensor:
        x_BCHW = torch.relu(self.norm1(self.conv(x_BP.view(-1, 1, 8, 8))))
        x_BH = nn.functional.max_pool2d(x_BCHW, 2).flatten(1)
        return self.norm3(self.output(torch.tanh(self.norm2(self.linear(x_BH)))))


NORMED = classifier(Normed, "x_BP", pins({"conv.*": 0, "linear.weight": 1}), micro_batches=2)
