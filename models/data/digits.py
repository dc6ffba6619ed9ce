"""scikit-learn's handwritten digits: real images inside a wheel."""

from __future__ import annotations

import numpy as np
import torch

from flowrun.models.data.stacked import Rows

_ORDER = 1797  # seed of the fixed order, so that the held-out ones are a fair sample


class Digits(Rows):
    """Handwritten digits: {images (64,) float32 in 0..1, labels () int64}, 1797 samples in one
    fixed shuffled order.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(_ORDER).permutation(len(labels))
        super().__init__(
            images=torch.from_numpy((pixels[order] / 16).astype(np.float32)),
            labels=torch.from_numpy(labels[order].astype(np.int64)),
        )
