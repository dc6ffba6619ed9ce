"""InsightFace: a convolutional backbone, and a classification layer with a margin softmax.

Backbone: the improved ResNet of ArcFace (Deng et al., arXiv 1801.07698).  Classes may be sampled
(Partial-FC: An et al., arXiv 2010.05222).  Shapes in names: B samples, C channels, H height, W
width, D features, N classes, G groups of classes, K classes that a step looks at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Norm, 3x3, norm, PReLU, 3x3 with the stride, norm; added to a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.act = nn.PReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.act(self.norm2(self.conv1(self.norm1(x_BCHW))))
        return self.norm3(self.conv2(y_BCHW)) + self.shortcut(x_BCHW)


class Backbone(nn.Module):
    """Images (B, 3, size, size) -> features (B, D).

    blocks: of each group, every one of which halves the image: [3, 4, 14, 3] is r50, [3, 13, 30, 3]
    r100.  width: channels of the first group, doubled with each next; r50 has 64.
    """

    def __init__(self, blocks: Sequence[int], width: int, size: int, features: int) -> None:
        super().__init__()
        leaving = [width, *(width * 2**group for group in range(len(blocks)))]
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.PReLU(width)
        self.groups = nn.ModuleList(
            nn.Sequential(*(Residual(a if k == 0 else b, b, 1 + (k == 0)) for k in range(count)))
            for count, (a, b) in zip(blocks, pairwise(leaving), strict=True)
        )
        side = math.ceil(size / 2 ** len(blocks))
        self.last_norm = nn.BatchNorm2d(leaving[-1])
        self.project = nn.Linear(leaving[-1] * side**2, features)
        self.feature_norm = nn.BatchNorm1d(features)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.act(self.norm(self.conv(images_BCHW)))
        for group in self.groups:
            x_BCHW = group(x_BCHW)
        return self.feature_norm(self.project(self.last_norm(x_BCHW).flatten(1)))


class Scores(NamedTuple):
    """The output of MarginClasses.

    logits: (B, K), of the classes that the step looks at.  hits: (B, K), True at the sample's own.
    """

    logits: Tensor
    hits: Tensor


class MarginClasses(nn.Module):
    """Features (B, D) and labels (B,) -> Scores: scaled cosines, less a margin for the own class.

    The margin applies in training only.

    angle, cosine: margins, cos(theta + angle) - cosine; ArcFace is (0.5, 0), CosFace (0, 0.4).
    scale: of the cosines.
    sample: classes that a training step looks at, those of the batch and others at random; 0: all.
    groups: classes are sampled in as many groups of consecutive classes, from each the same number.
    It belongs to the model, so the sample is the same on any number of ranks; ranks whose number
    divides it hold whole groups, and no class leaves its rank.
    """

    def __init__(
        self,
        classes: int,
        features: int,
        scale: float = 64.0,
        angle: float = 0.5,
        cosine: float = 0.0,
        sample: int = 0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        if classes % groups or sample % groups or sample > classes:
            raise ValueError(
                f"classes {classes} and a sample of {sample} do not divide into {groups} groups"
            )
        self.classes, self.sample, self.groups = classes, sample, groups
        self.scale, self.angle, self.cosine = scale, angle, cosine
        self.weight = nn.Parameter(torch.empty(classes, features).normal_(std=0.01))

    def forward(self, features_BD: Tensor, labels_B: Tensor) -> Scores:
        classes_K = torch.arange(self.classes, device=labels_B.device)
        weight_KD: Tensor = self.weight
        if self.training and self.sample:
            weight_KD, classes_K = self._sample_classes(labels_B, classes_K)
        hits_BK = labels_B.unsqueeze(1) == classes_K
        cosines_BK = F.linear(F.normalize(features_BD), F.normalize(weight_KD))
        if self.training:
            cosines_BK = cosines_BK + self._margin(cosines_BK, hits_BK)
        return Scores(self.scale * cosines_BK, hits_BK)

    def _margin(self, cosines_BK: Tensor, hits_BK: Tensor) -> Tensor:
        """Return what the margin adds: (B, K), zero except at the sample's own class.

        It depends on one cosine of a sample, so that ranks that split the classes exchange one
        number a sample.
        """
        cosine_B1 = (cosines_BK * hits_BK).sum(1, keepdim=True)
        sine_B1 = (1 - cosine_B1 * cosine_B1).clamp(min=1e-6).sqrt()
        moved_B1 = cosine_B1 * math.cos(self.angle) - sine_B1 * math.sin(self.angle)
        return hits_BK * (moved_B1 - self.cosine - cosine_B1)

    def _sample_classes(self, labels_B: Tensor, classes_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights, numbers) of the classes of this batch and of others at random.

        Every class draws a number below 1, those of the batch have 2; the classes with the largest
        numbers of each group are taken.
        """
        taken = self.sample // self.groups
        if labels_B.shape[0] > taken:
            raise ValueError(
                f"a batch of {labels_B.shape[0]} may have more classes than the {taken} that each "
                f"of {self.groups} groups samples: raise sample, or use fewer groups"
            )
        present_N = (labels_B.unsqueeze(1) == classes_N).any(0)
        drawn_N = torch.rand(self.classes, device=labels_B.device)
        ranked_GN = torch.where(present_N, 2.0, drawn_N).view(self.groups, -1)
        best_GK = ranked_GN.topk(taken, dim=1).indices
        weight_GND = self.weight.view(self.groups, -1, self.weight.shape[1])
        rows_GKD = best_GK.unsqueeze(-1).expand(-1, -1, self.weight.shape[1])
        classes_GN = classes_N.view(self.groups, -1)
        return weight_GND.gather(1, rows_GKD).flatten(0, 1), classes_GN.gather(1, best_GK).flatten()


class InsightFace(nn.Module):
    """Images (B, 3, size, size) and labels (B,) -> Scores.  Arguments: see Backbone and
    MarginClasses.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        width: int,
        size: int,
        features: int,
        classes: int,
        scale: float = 64.0,
        angle: float = 0.5,
        cosine: float = 0.0,
        sample: int = 0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.backbone = Backbone(blocks, width, size, features)
        self.head = MarginClasses(classes, features, scale, angle, cosine, sample, groups)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Scores:
        return self.head(self.backbone(images_BCHW), labels_B)
