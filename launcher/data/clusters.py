"""Generated samples of distinct classes: images (kinds of objects, faces), or plain features."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowrun.launcher.data.stacked import Rows, StackedDataset

_GRID = 6  # values along a side of a pattern before it is enlarged
_SAMPLE_S, _VALUE_S = 12e-6, 14.5e-9  # seconds an image, and a value of it, on one core, about


class ImageClusters(StackedDataset):
    """{images (3, size, size) float32 of mean about 0, labels () int64}.

    A class is a smooth random pattern; a sample of it is the pattern plus a smooth pattern of its
    own and noise in every pixel.  Sample k belongs to class k mod classes.
    size: pixels along a side.  samples: number of items.
    spread: size of the sample's own part, relative to the pattern of its class.
    """

    unprepared: ClassVar = {"labels": "label"}

    def __init__(
        self, classes: int, samples: int, size: int = 32, spread: float = 1.0, seed: int = 0
    ) -> None:
        self.classes, self.samples, self.size = classes, samples, size
        self.spread, self.seed = spread, seed
        self.sample_seconds = _SAMPLE_S + _VALUE_S * 3 * size**2
        self.centres: dict[int, NDArray[np.float32]] = {}  # class -> pattern, once used

    def __len__(self) -> int:
        return self.samples

    def label(self, index: int) -> Tensor:
        """Return the class of a sample, () int64."""
        return torch.tensor(index % self.classes, device="cpu")

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items; all patterns are enlarged at once, of classes, then of samples."""
        labels = indices % self.classes
        count = len(indices)
        coarse = np.empty((2, count, 3, _GRID, _GRID), np.float32)
        noise = np.empty((count, 3, self.size, self.size), np.float32)
        for k, (index, label) in enumerate(zip(indices.tolist(), labels.tolist(), strict=True)):
            coarse[0, k] = self._centre(label)
            draws = np.random.default_rng((self.seed, 1, index))
            draws.standard_normal(out=noise[k], dtype=np.float32)
            draws.standard_normal(out=coarse[1, k], dtype=np.float32)
        size = (self.size, self.size)
        large = F.interpolate(torch.from_numpy(coarse).flatten(0, 1), size, mode="bilinear")
        centres, own = large.split(count)
        images = torch.from_numpy(noise).mul_(0.3).add_(own).mul_(self.spread).add_(centres)
        return {"images": images, "labels": labels}

    def _centre(self, label: int) -> NDArray[np.float32]:
        """Return the pattern of a class (3, 6, 6), cached: creating a generator is slow."""
        if label not in self.centres:
            draws = np.random.default_rng((self.seed, 0, label))
            self.centres[label] = draws.standard_normal((3, _GRID, _GRID), dtype=np.float32)
        return self.centres[label]


class FeatureClusters(Rows):
    """{features (features,) float32, labels () int64}, all made at once and kept in memory.

    A class is a random point, and a sample is that point plus noise.  Sample k belongs to class k
    mod classes.  spread: size of the noise, relative to the points.
    """

    def __init__(
        self, classes: int, samples: int, features: int, spread: float = 1.0, seed: int = 0
    ) -> None:
        draws = np.random.default_rng(seed)
        centres = draws.standard_normal((classes, features), dtype=np.float32)
        noise = draws.standard_normal((samples, features), dtype=np.float32)
        labels = np.arange(samples) % classes
        super().__init__(
            features=torch.from_numpy(centres[labels] + np.float32(spread) * noise),
            labels=torch.from_numpy(labels),
        )
