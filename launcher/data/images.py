"""Image files in a folder for each class, read, decoded and transformed in steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.digits import find_sklearn_data
from flowrun.launcher.data.steps import Step, StepwiseDataset
from flowrun.launcher.data.transforms import (
    Transform,
    default_transforms,
    import_torchvision,
    seed_draws,
    transform,
)

if TYPE_CHECKING:
    from PIL import Image

_DECODE_S, _TRANSFORM_S = 10e-9, 8e-9  # seconds a value on one core, about, for the rehearsal
_HEIGHT, _WIDTH = 427, 640  # of both
_PIXELS = _HEIGHT * _WIDTH * 3
_MEAN, _STD = 114.0, 58.0
_CLASSES = 8


class ImageFiles(StepwiseDataset):
    """A data set that decodes image files; its labels need no image."""

    unprepared: ClassVar = {"labels": "label"}

    def decode(self, sample: tuple[bytes, int]) -> tuple[Image.Image, int]:
        """Return (an RGB image, what came with the file's bytes)."""
        from PIL import Image

        encoded, beside = sample
        with Image.open(io.BytesIO(encoded)) as image:
            return image.convert("RGB"), beside


class ImageFolder(ImageFiles):
    """{images (3, size, size) float32, labels () int64} of path/CLASS/image files, which
    torchvision finds and PIL decodes (pip install flowrun[images]).

    Classes are numbered in sorted order of their folders.  The items have a shuffled order that is
    always the same, so that the last ones are a fair sample.
    size: pixels along a side, of the default transforms.
    transforms: what an image passes in training, one after the other: callables of an RGB image of
    PIL, such as those of torchvision.transforms.v2 or what timm's create_transform makes.  What
    they draw from torch, Python or NumPy is a function of the seed and of the sample's number.
    eval_transforms: the same in evaluation; both are given, or neither.
    """

    def __init__(
        self,
        path: str,
        size: int = 224,
        transforms: Sequence[Transform] | None = None,
        eval_transforms: Sequence[Transform] | None = None,
    ) -> None:
        import_torchvision()
        from PIL import Image
        from torchvision.datasets import ImageFolder as Files

        if not Path(path).expanduser().is_dir():
            raise ArgumentError("path", f"there is no folder {path}.")
        if (transforms is None) != (eval_transforms is None):
            raise ValueError("give both transforms and eval_transforms, [] where there are none")
        listed = Files(Path(path).expanduser())
        self.classes = listed.classes
        order = np.random.default_rng(0).permutation(len(listed.samples))
        self.files = [listed.samples[k] for k in order]
        in_training, in_evaluation = default_transforms(size)
        self.transforms = in_training if transforms is None else [*transforms]
        self.eval_transforms = in_evaluation if eval_transforms is None else [*eval_transforms]
        with Image.open(self.files[0][0]) as image:
            values = 3 * image.width * image.height
            transformed = transform(image.convert("RGB"), self.eval_transforms)
        self.steps = (
            Step("read", 50e-6, Path(self.files[0][0]).stat().st_size),
            Step("decode", _DECODE_S * values, values),
            Step(
                "augment",
                _TRANSFORM_S * max(values, transformed.numel()),
                transformed.nbytes,
                random=True,
            ),
        )

    def __len__(self) -> int:
        return len(self.files)

    def label(self, index: int) -> Tensor:
        """Return the class of a sample."""
        return torch.tensor(self.files[index][1])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return (the file's bytes, class)."""
        file, label = self.files[index]
        return Path(file).read_bytes(), label

    def augment(
        self, sample: tuple[Image.Image, int], draws: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return the transformed image as the item's tensors."""
        image, label = sample
        if draws is None:
            return {"images": transform(image, self.eval_transforms), "labels": torch.tensor(label)}
        with seed_draws(int(draws.integers(2**63))):
            return {"images": transform(image, self.transforms), "labels": torch.tensor(label)}


class Photographs(ImageFiles):
    """{images (3, size, size) float32, labels () int64}: a window of a quarter of a photograph.

    A class is one of the quarters, 8 in all; sample k is of class k mod 8, and the position of its
    window is a function of k.  In training the window is mirrored at random.
    samples: number of items.  size: pixels along a side, at most 200.
    """

    classes = _CLASSES

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

    def augment(
        self, sample: tuple[Image.Image, int], draws: np.random.Generator | None
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
