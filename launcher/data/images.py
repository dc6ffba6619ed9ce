"""Image files in a folder for each class, read, decoded and transformed in steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.steps import Step, StepwiseDataset
from flowrun.launcher.data.transforms import (
    Transform,
    default_transforms,
    import_torchvision,
    seed_draws,
    transform,
)

_DECODE_S, _TRANSFORM_S = 10e-9, 8e-9  # seconds a value on one core, about, for the rehearsal


class ImageFolder(StepwiseDataset):
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

    unprepared: ClassVar = {"labels": "label"}

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
        found = Files(Path(path).expanduser())
        self.classes = found.classes
        order = np.random.default_rng(0).permutation(len(found.samples))
        self.files = [found.samples[k] for k in order]
        in_training, in_evaluation = default_transforms(size)
        self.transforms = in_training if transforms is None else [*transforms]
        self.eval_transforms = in_evaluation if eval_transforms is None else [*eval_transforms]
        with Image.open(self.files[0][0]) as image:
            values = 3 * image.width * image.height
            made = transform(image.convert("RGB"), self.eval_transforms)
        self.steps = (
            Step("read", 50e-6, Path(self.files[0][0]).stat().st_size),
            Step("decode", _DECODE_S * values, values),
            Step("augment", _TRANSFORM_S * max(values, made.numel()), made.nbytes, random=True),
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

    def decode(self, sample: tuple[bytes, int]) -> tuple[Any, int]:
        """Return (an RGB image of PIL, class)."""
        from PIL import Image

        encoded, label = sample
        with Image.open(io.BytesIO(encoded)) as image:
            return image.convert("RGB"), label

    def augment(
        self, sample: tuple[Any, int], draws: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return the transformed image as the item's tensors."""
        image, label = sample
        if draws is None:
            made = transform(image, self.eval_transforms)
        else:
            with seed_draws(int(draws.integers(2**63))):
                made = transform(image, self.transforms)
        return {"images": made, "labels": torch.tensor(label)}
