"""Image files in a folder for each class, read, decoded and augmented in steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrun.models.data.steps import Step, StepwiseDataset

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}
_DECODE_S, _AUGMENT_S = 10e-9, 8e-9  # seconds a pixel on one core, about, for the rehearsal
_MEAN, _STD = 114.0, 58.0  # of photographs, over all channels


class ImageFolder(StepwiseDataset):
    """{images (3, size, size) float32, labels () int64} of path/CLASS/image files, decoded by PIL.

    Classes are numbered in sorted order of their folders.  The items have a shuffled order that is
    always the same, so that the last ones are a fair sample.
    size: pixels along a side.  The short side of an image is scaled to 8/7 of it; a square is cut
    from that, at random and mirrored or not in training, from the middle in evaluation.
    """

    unprepared: ClassVar = {"labels": "label"}

    def __init__(self, path: str, size: int = 224) -> None:
        root = Path(path).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {path}")
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not self.files:
            raise ValueError(f"{path}: no folder in it holds an image ({', '.join(_SUFFIXES)})")
        order = np.random.default_rng(0).permutation(len(self.files))
        self.files = [self.files[k] for k in order]
        self.size = size
        self.scaled = size * 8 // 7
        encoded = self.files[0][0].stat().st_size
        pixels = 3 * self.scaled**2
        self.steps = (
            Step("read", 50e-6, encoded),
            Step("decode", _DECODE_S * pixels * 4, pixels),
            Step("augment", _AUGMENT_S * 3 * size**2, 12 * size**2, random=True),
        )

    def __len__(self) -> int:
        return len(self.files)

    def label(self, index: int) -> Tensor:
        """Return the class of a sample."""
        return torch.tensor(self.files[index][1])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return (the file's bytes, class)."""
        file, label = self.files[index]
        return file.read_bytes(), label

    def decode(self, sample: tuple[bytes, int]) -> tuple[np.ndarray[Any, Any], int]:
        """Return (pixels (height, width, 3) uint8 with the short side scaled, class)."""
        from PIL import Image

        encoded, label = sample
        with Image.open(io.BytesIO(encoded)) as image:
            image.draft("RGB", (self.scaled, self.scaled))  # a JPEG decodes at a half, a quarter …
            colours = image.convert("RGB")
        shrink = self.scaled / min(colours.size)
        width, height = (max(self.scaled, round(side * shrink)) for side in colours.size)
        return np.asarray(colours.resize((width, height), Image.Resampling.BILINEAR)), label

    def augment(
        self, sample: tuple[np.ndarray[Any, Any], int], draws: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return a square of the image as the item's tensors."""
        pixels, label = sample
        spare = np.array(pixels.shape[:2]) - self.size
        top, left = spare // 2 if draws is None else draws.integers(0, spare + 1)
        square = pixels[top : top + self.size, left : left + self.size]
        if draws is not None and draws.random() < 0.5:
            square = square[:, ::-1]
        image = torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))
        return {"images": (image.float() - _MEAN) / _STD, "labels": torch.tensor(label)}
