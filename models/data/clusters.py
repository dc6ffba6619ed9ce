"""Generated samples of classes that can be told apart: images (kinds of objects, identities of
faces), or plain features.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

_GRID = 6  # values along a side of the pattern that is drawn large


class ImageClusters(Dataset[dict[str, Tensor]]):
    """{images (3, size, size) float32 of mean about 0, labels () int64}.

    A class is a smooth random pattern; a sample of it is the pattern plus a smooth pattern of its
    own and noise in every pixel.  Sample k belongs to class k mod classes.
    size: pixels along a side.  samples: number of items.
    spread: size of what is the sample's own, over what is the class's.
    """

    def __init__(
        self, classes: int, samples: int, size: int = 32, spread: float = 1.0, seed: int = 0
    ) -> None:
        self.classes, self.samples, self.size = classes, samples, size
        self.spread, self.seed = spread, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        label = index % self.classes
        centre = self._pattern(np.random.default_rng((self.seed, 0, label)))
        own = np.random.default_rng((self.seed, 1, index))
        noise = torch.from_numpy(own.standard_normal((3, self.size, self.size), dtype=np.float32))
        image = centre + self.spread * (self._pattern(own) + 0.3 * noise)
        return {"images": image, "labels": torch.tensor(label)}

    def _pattern(self, draws: np.random.Generator) -> Tensor:
        coarse = torch.from_numpy(draws.standard_normal((1, 3, _GRID, _GRID), dtype=np.float32))
        size = (self.size, self.size)
        return F.interpolate(coarse, size, mode="bilinear", align_corners=False)[0]


class FeatureClusters(Dataset[dict[str, Tensor]]):
    """{features (features,) float32, labels () int64}, all made at once and kept.

    A class is a random point, a sample of it the point plus noise.  Sample k belongs to class k mod
    classes.  spread: size of the noise, over what is the class's.
    """

    def __init__(
        self, classes: int, samples: int, features: int, spread: float = 1.0, seed: int = 0
    ) -> None:
        draws = np.random.default_rng(seed)
        centres = draws.standard_normal((classes, features), dtype=np.float32)
        noise = draws.standard_normal((samples, features), dtype=np.float32)
        labels = np.arange(samples) % classes
        self.features = torch.from_numpy(centres[labels] + np.float32(spread) * noise)
        self.labels = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.features[index], "labels": self.labels[index]}
