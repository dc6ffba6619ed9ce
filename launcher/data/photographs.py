"""Windows of scikit-learn's two photographs: real JPEG files inside a wheel, really decoded."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrun.launcher.data.digits import find_sklearn_data
from flowrun.launcher.data.steps import Step, StepwiseDataset

_HEIGHT, _WIDTH = 427, 640  # of both
_PIXELS = _HEIGHT * _WIDTH * 3
_MEAN, _STD = 114.0, 58.0
_CLASSES = 8


class Photographs(StepwiseDataset):
    """{images (3, size, size) float32, labels () int64}: a window of a quarter of a photograph.

    A class is one of the quarters, 8 in all; sample k is of class k mod 8, and the position of its
    window is a function of k.  In training the window is mirrored at random.
    samples: number of items.  size: pixels along a side, at most 200.
    """

    classes = _CLASSES
    unprepared: ClassVar = {"labels": "label"}

    def __init__(self, samples: int = 4096, size: int = 32) -> None:
        folder = find_sklearn_data() / "images"
        self.files = [folder / "china.jpg", folder / "flower.jpg"]
        self.samples, self.size = samples, size
        self.steps = (
            Step("read", 50e-6, self.files[0].stat().st_size),
            Step("decode", 4e-3, _PIXELS),
            Step("augment", 50e-6, 12 * size**2, random=True),
        )

    def __len__(self) -> int:
        return self.samples

    def label(self, index: int) -> Tensor:
        """Return the class of a sample."""
        return torch.tensor(index % _CLASSES)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return (the file's bytes, index)."""
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.files[index % _CLASSES // 4].read_bytes(), index

    def decode(self, sample: tuple[bytes, int]) -> tuple[Any, int]:
        """Return (an RGB image of PIL, 640 x 427, index)."""
        from PIL import Image

        encoded, index = sample
        with Image.open(io.BytesIO(encoded)) as image:
            return image.convert("RGB"), index

    def augment(
        self, sample: tuple[Any, int], draws: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return the window as the item's tensors."""
        from PIL import ImageOps

        image, index = sample
        label = int(self.label(index))
        quarter = np.array((_HEIGHT // 2, _WIDTH // 2))
        within = np.random.default_rng(index).integers(0, quarter - self.size + 1)
        top, left = (quarter * divmod(label % 4, 2) + within).tolist()
        window = image.crop((left, top, left + self.size, top + self.size))
        if draws is not None and draws.random() < 0.5:
            window = ImageOps.mirror(window)
        pixels = torch.from_numpy(np.array(window)).permute(2, 0, 1).contiguous()
        return {"images": (pixels.float() - _MEAN) / _STD, "labels": torch.tensor(label)}
